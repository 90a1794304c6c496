"""Files of a source: found by the run file's path, on this machine or on a store."""

import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tasks.foundation.errors import SourceError
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.opening import open_storage
from tasks.prepare_data.sources.source_file import SourceFile

STDLIB = "{stdlib}"
_MARKS = "*?["
_ADDRESS = re.compile(r"(?!file:)([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
# Installed packages are nobody's corpus, and differ from machine to machine.
_INSTALLED = {"site-packages", "dist-packages"}
_SHOWN = 10


def locate(path: str, code_folder: Path) -> Path:
    """The local file or folder that `data.options.path` means; it need not be there.

    Args:
        path: absolute, `~/…`, `file://…`, `{stdlib}/…` for the sources of Python's standard library, or relative to
            `code_folder`.
        code_folder: the run file's folder.
    """
    if path.startswith(STDLIB):
        return Path(sysconfig.get_paths()["stdlib"] + path.removeprefix(STDLIB))
    return code_folder.absolute() / Path(path.removeprefix("file://")).expanduser()


def require_there(path: str, code_folder: Path) -> None:
    """Refuse a local path at which nothing is; addresses and patterns are left to `find_files`.

    Raises:
        SourceError: naming what is beside it.
    """
    if _ADDRESS.fullmatch(path) or any(mark in path for mark in _MARKS):
        return
    place = locate(path, code_folder)
    if not place.exists():
        raise _nothing_at(path, place)


def find_files(path: str, code_folder: Path, *, suffix: str = "") -> list[SourceFile]:
    """The file at `path`, or the files below the folder or matching the pattern, sorted by relative path.

    Args:
        path: see `locate`, or an address such as gs://bucket/prefix; `*`, `?` and `[` make it a pattern.
        code_folder: the run file's folder.
        suffix: of a folder, only the files whose names end so.

    Raises:
        InvalidInput: no store of that kind is known.
        SourceError: there are no files.
    """
    address = _ADDRESS.fullmatch(path)
    if address:
        at, found = path, list(_remote(path, address[1], address[2], suffix))
    else:
        place = locate(path, code_folder)
        at, found = str(place), _local(path, place, suffix)
    if not found:
        kind = f"no files ending in {suffix!r}" if suffix else "no files"
        raise SourceError(f"data.options.path: {path!r}: {kind} at {at}; name a file, or a folder that holds some")
    return sorted(found, key=lambda file: file.relative)


def _local(path: str, place: Path, suffix: str) -> list[SourceFile]:
    found: Iterable[Path]
    try:
        if place.is_file():
            return [_local_file(place, LocalStorage(place.parent, fenced=False))]
        if place.is_dir():
            base, found = place, (file for file in place.rglob("*") if file.name.endswith(suffix))
        elif any(mark in path for mark in _MARKS):
            # What comes before the first mark is where the relative names begin, as on a store.
            base = Path(*_fixed(place.parts))
            found = base.glob(str(place.relative_to(base)))
        else:
            raise _nothing_at(path, place)
        storage = LocalStorage(base, fenced=False)
        return [
            _local_file(file, storage)
            for file in found
            if not _INSTALLED.intersection(file.relative_to(base).parts) and file.is_file()
        ]
    except OSError as fault:
        raise SourceError(f"data.options.path: {path!r}: {place}: {fault.strerror}; see who may read it") from fault


def _local_file(file: Path, storage: LocalStorage) -> SourceFile:
    relative = file.relative_to(storage.root).as_posix()
    return SourceFile(storage=storage, path=relative, relative=relative, local=file)


def _remote(path: str, scheme: str, rest: str, suffix: str) -> Iterator[SourceFile]:
    parts = rest.strip("/").split("/")
    fixed = _fixed(parts)
    if not fixed:
        raise SourceError(f"data.options.path: {path!r}: a pattern needs a bucket before it; write gs://bucket/…")
    if len(parts) > 1:
        # Looked for by its name first: a store may hold a file whose name looks like a pattern.
        folder = _fixed(parts[:-1])
        above = open_storage(f"{scheme}://{'/'.join(folder)}", relative_to=Path(), fenced=False)
        name = "/".join(parts[len(folder) :])
        if above.exists(name):
            yield SourceFile(storage=above, path=name, relative=name)
            return
    base = open_storage(f"{scheme}://{'/'.join(fixed)}", relative_to=Path(), fenced=False)
    patterns = parts[len(fixed) :]
    for file in base.files(""):
        # Some tools mark folders by empty objects.
        if file.endswith("/") or not (_matches(file.split("/"), patterns) if patterns else file.endswith(suffix)):
            continue
        yield SourceFile(storage=base, path=file, relative=file)


def _fixed(parts: Sequence[str]) -> list[str]:
    """The leading parts of a path that are no pattern."""
    count = next((index for index, part in enumerate(parts) if any(mark in part for mark in _MARKS)), len(parts))
    return list(parts[:count])


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """As `Path.glob` does it: `*` stays within a part, `**` is any number of them."""
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_matches(parts[begin:], patterns[1:]) for begin in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _nothing_at(path: str, place: Path) -> SourceError:
    return SourceError(f"data.options.path: {path!r}: {place} is not there; {_beside(place)}")


def _beside(place: Path) -> str:
    folder = next((parent for parent in place.parents if parent.is_dir()), place.parent)
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return f"{folder} holds: {shown or 'nothing'}; correct the path"
