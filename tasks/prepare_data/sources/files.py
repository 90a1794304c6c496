"""Files of a source: found by the run file's path, told apart by their bytes, watched while they are read."""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c

from tasks.foundation.errors import SourceError
from tasks.prepare_data.sources.base import Located

STDLIB = "{stdlib}"
_BLOCK_BYTES = 1 << 20
_FILES_IN_ORIGIN = 100
# Installed packages are nobody's corpus, and differ from machine to machine.
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What some files held when they were looked at."""

    content: str  # sha256 over sizes and bytes, in order
    size: int  # bytes that were looked at
    origin: dict[str, str]  # file -> checksum


def locate(path: str, code_folder: Path) -> Path:
    """The file or folder that `data.options.path` means; it need not be there.

    Args:
        path: absolute, `~/…`, `{stdlib}/…` for the sources of Python's standard library, or relative to `code_folder`.
        code_folder: the run file's folder.
    """
    if path.startswith(STDLIB):
        return Path(sysconfig.get_paths()["stdlib"] + path.removeprefix(STDLIB))
    return code_folder / Path(path).expanduser()


def find_files(path: str, code_folder: Path, *, suffix: str = "") -> list[Path]:
    """The file at `path`, or the files below the folder or matching the pattern, sorted by relative path.

    Args:
        path: see `locate`; `*`, `?` and `[` make it a pattern.
        code_folder: the run file's folder.
        suffix: of a folder, only the files whose names end so.

    Raises:
        SourceError: there are none.
    """
    place = locate(path, code_folder)
    found: Iterable[Path]
    try:
        if place.is_file():
            return [place]
        if place.is_dir():
            base, found = place, (file for file in place.rglob("*") if file.name.endswith(suffix))
        elif any(mark in path for mark in "*?["):
            base = Path(place.anchor)
            found = base.glob(str(place.relative_to(base)))
        else:
            raise SourceError(f"data.options.path: {path!r}: {place} is not there; {_beside(place)}")
        files = [file for file in found if not _INSTALLED.intersection(file.relative_to(base).parts) and file.is_file()]
    except OSError as fault:
        raise SourceError(f"data.options.path: {path!r}: {place}: {fault.strerror}; see who may read it") from fault
    if not files:
        kind = f"no files ending in {suffix!r}" if suffix else "no files"
        raise SourceError(f"data.options.path: {path!r}: {kind} at {place}; name a file, or a folder that holds some")
    return sorted(files, key=lambda file: file.relative_to(base).as_posix())


def fingerprint(files: Sequence[Path], *, max_bytes: int | None = None) -> Fingerprint:
    """Read files through, in blocks, up to `max_bytes` in all.

    Raises:
        SourceError: one of them cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    origin: dict[str, str] = {}
    for file in files:
        crc = 0
        for block in blocks(file):
            kept = block if max_bytes is None else block[: max_bytes - size]
            digest.update(kept)
            crc = google_crc32c.extend(crc, kept)
            size += len(kept)
            if len(kept) < len(block):
                break
        digest.update(f"\0{size}\0".encode())
        if len(origin) < _FILES_IN_ORIGIN:
            origin[file.name if file.name not in origin else str(file)] = f"crc32c {crc:08x}"
        if size == max_bytes:
            break
    if len(files) > _FILES_IN_ORIGIN:
        origin["…"] = f"{len(files)} files, sha256 {digest.hexdigest()}"
    return Fingerprint(content=digest.hexdigest(), size=size, origin=origin)


def blocks(file: Path) -> Iterator[bytes]:
    """A file's bytes, a block at a time.

    Raises:
        SourceError: it cannot be read.
    """
    try:
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK_BYTES):
                yield block
    except OSError as fault:
        raise SourceError(
            f"{file}: cannot be read: {fault.strerror}; see that it is there and who may read it"
        ) from fault


def watched(files: Sequence[Path], examples: Iterator[Located]) -> Iterator[Located]:
    """The examples; at their end, the files must be those that were there at the beginning.

    Raises:
        SourceError: a file was changed meanwhile.
    """
    before = [_stamp(file) for file in files]
    yield from examples
    for file, stamp in zip(files, before, strict=True):
        if _stamp(file) != stamp:
            raise SourceError(f"{file}: changed while it was being read; run again when nobody writes to it")


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _beside(place: Path) -> str:
    folder = next((parent for parent in place.parents if parent.is_dir()), place.parent)
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")  # noqa: PLR2004
    return f"{folder} holds: {shown or 'nothing'}; correct the path"
