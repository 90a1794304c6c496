"""Finds the files of a source, on this machine or in a store."""

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
# Installed packages differ between machines, so they are not part of a text source.
_INSTALLED = {"site-packages", "dist-packages"}
_SHOWN = 10


def local_path(path: str, code_folder: Path) -> Path:
    """Return the local file or folder at `data.options.path`; it need not exist.

    Args:
        path: absolute, `~/…`, `file://…`, `{stdlib}/…` for Python's standard library, or relative to `code_folder`.
        code_folder: the run file's folder.

    Raises:
        SourceError: it begins with `~`, and there is no such home folder.
    """
    if path.startswith(STDLIB):
        return Path(sysconfig.get_paths()["stdlib"] + path.removeprefix(STDLIB))
    try:
        return code_folder.absolute() / Path(path.removeprefix("file://")).expanduser()
    except RuntimeError as fault:
        raise SourceError(f"data.options.path: {path}: no such user's home folder; name a file or folder") from fault


def names_file(path: str, code_folder: Path, uri: str) -> bool:
    """Return whether `data.options.path` names a file, by the texts alone; `find_files` might find it.

    Args:
        path: see `find_files`.
        code_folder: the run file's folder.
        uri: absolute path or address of the file, as `SourceFile.uri`.
    """
    address = _ADDRESS.fullmatch(path)
    named = f"{address[1]}://{address[2].strip('/')}" if address else str(local_path(path, code_folder))
    if uri == named:
        return True
    parts, given = uri.split("/"), named.split("/")
    fixed = _fixed(given)
    below, patterns = parts[len(fixed) :], given[len(fixed) :]
    if parts[: len(fixed)] != fixed or not below or {"", ".", ".."} & set(below):
        return False
    return _matches(below, patterns) if patterns else True


def require_local_path(path: str, code_folder: Path) -> None:
    """Refuse a local path that does not exist; addresses and patterns are checked by `find_files`.

    Raises:
        SourceError: lists the files next to it.
    """
    if _ADDRESS.fullmatch(path) or any(mark in path for mark in _MARKS):
        return
    target = local_path(path, code_folder)
    if not target.exists():
        raise _missing_path_error(path, target)


def find_files(path: str, code_folder: Path, *, suffix: str = "") -> list[SourceFile]:
    """Return the file at `path`, the files below the folder, or the files that match, sorted by relative path.

    Args:
        path: see `local_path`, or an address such as gs://bucket/prefix; with `*`, `?` or `[` it is a pattern.
        code_folder: the run file's folder.
        suffix: in a folder, select only files with this suffix.

    Raises:
        InvalidInput: the address has an unknown scheme.
        SourceError: there are no files.
    """
    address = _ADDRESS.fullmatch(path)
    if address:
        at, found = path, list(_remote(path, address[1], address[2], suffix))
    else:
        target = local_path(path, code_folder)
        at, found = str(target), _local(path, target, suffix)
    if not found:
        kind = f"no files ending in {suffix!r}" if suffix else "no files"
        raise SourceError(f"data.options.path: {path!r}: {kind} at {at}; name a file, or a folder with files")
    return sorted(found, key=lambda file: file.relative)


def _local(path: str, target: Path, suffix: str) -> list[SourceFile]:
    found: Iterable[Path]
    try:
        if target.is_file():
            return [_local_file(target, LocalStorage(target.parent, guarded=False))]
        if target.is_dir():
            base, found = target, (file for file in target.rglob("*") if file.name.endswith(suffix))
        elif any(mark in path for mark in _MARKS):
            # Relative names start at the first pattern character, as in a store.
            base = Path(*_fixed(target.parts))
            found = base.glob(str(target.relative_to(base)))
        else:
            raise _missing_path_error(path, target)
        storage = LocalStorage(base, guarded=False)
        return [
            _local_file(file, storage)
            for file in found
            if not _INSTALLED.intersection(file.relative_to(base).parts) and file.is_file()
        ]
    except OSError as fault:
        raise SourceError(f"data.options.path: {path!r}: {target}: {fault.strerror}; check its permissions") from fault


def _local_file(file: Path, storage: LocalStorage) -> SourceFile:
    relative = file.relative_to(storage.root).as_posix()
    return SourceFile(storage=storage, path=relative, relative=relative, local=file)


def _remote(path: str, scheme: str, rest: str, suffix: str) -> Iterator[SourceFile]:
    parts = rest.strip("/").split("/")
    fixed = _fixed(parts)
    if not fixed:
        raise SourceError(f"data.options.path: {path!r}: a pattern needs a bucket before it, such as gs://bucket/…")
    if len(parts) > 1:
        # Try the exact name first: a store may have a file whose name looks like a pattern.
        folder = _fixed(parts[:-1])
        above = open_storage(f"{scheme}://{'/'.join(folder)}", relative_to=Path(), guarded=False)
        name = "/".join(parts[len(folder) :])
        if above.exists(name):
            yield SourceFile(storage=above, path=name, relative=name)
            return
    base = open_storage(f"{scheme}://{'/'.join(fixed)}", relative_to=Path(), guarded=False)
    patterns = parts[len(fixed) :]
    for file in base.files(""):
        # Some tools mark folders with empty objects.
        if file.endswith("/") or not (_matches(file.split("/"), patterns) if patterns else file.endswith(suffix)):
            continue
        yield SourceFile(storage=base, path=file, relative=file)


def _fixed(parts: Sequence[str]) -> list[str]:
    """Return the leading parts of a path that contain no pattern."""
    count = next((index for index, part in enumerate(parts) if any(mark in part for mark in _MARKS)), len(parts))
    return list(parts[:count])


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Match as `Path.glob` does: `*` stays within one part, `**` matches any number of parts."""
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_matches(parts[begin:], patterns[1:]) for begin in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _missing_path_error(path: str, target: Path) -> SourceError:
    return SourceError(f"data.options.path: {path!r}: {target} does not exist; {_beside(target)}")


def _beside(target: Path) -> str:
    folder = next((parent for parent in target.parents if parent.is_dir()), target.parent)
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return f"{folder} contains: {shown or 'nothing'}; correct the path"
