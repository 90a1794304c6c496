"""What files held: told apart by their bytes, or by what their store says of these, and watched while they are read."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import google_crc32c

from tasks.foundation.errors import SourceChanged
from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.download import side_by_side
from tasks.prepare_data.sources.source_file import SourceFile

T = TypeVar("T")
_FILES_IN_ORIGIN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What some files held when they were looked at."""

    content: str  # sha256 over sizes and bytes, in order; on a store, over names, sizes and checksums
    size: int  # bytes that were looked at
    origin: dict[str, str]  # file -> checksum
    stats: tuple[Stored, ...] = ()  # of files on a store, in order: all of them
    stamps: tuple[str, ...]  # of all files, in order, from before they were looked at; see `stamps_of`


def fingerprint(files: Sequence[SourceFile], *, max_bytes: int | None = None) -> Fingerprint:
    """Read local files through, in blocks, up to `max_bytes` in all; of files on a store, ask it for their checksums.

    Raises:
        SourceError: one of them cannot be read.
    """
    if all(file.local is None for file in files):
        return _of_store(files, max_bytes=max_bytes)
    stamps = stamps_of(files)
    digest, size = hashlib.sha256(), 0
    told: list[str] = []
    for file in files:
        crc = 0
        with file.reading() as blocks:
            for block in blocks:
                kept = block if max_bytes is None else block[: max_bytes - size]
                digest.update(kept)
                crc = google_crc32c.extend(crc, kept)
                size += len(kept)
                if len(kept) < len(block):
                    break
        digest.update(f"\0{size}\0".encode())
        told.append(f"crc32c {crc:08x}")
        if size == max_bytes:
            break
    content = digest.hexdigest()
    return Fingerprint(content=content, size=size, origin=origin_of(files, told, content), stamps=tuple(stamps))


def _of_store(files: Sequence[SourceFile], *, max_bytes: int | None) -> Fingerprint:
    digest, size = hashlib.sha256(), 0
    told: list[str] = []
    stats = _stats(files)
    for file, stored in zip(files, stats, strict=True):
        if max_bytes is not None and size >= max_bytes:
            break
        digest.update(f"{file.relative}\0{stored.size}\0{stored.crc32c}\n".encode())
        told.append(f"crc32c {stored.crc32c}")
        size += stored.size
    if max_bytes is not None and max_bytes < size:
        size = max_bytes
        digest.update(f"{size}".encode())
    content = digest.hexdigest()
    return Fingerprint(
        content=content,
        size=size,
        origin=origin_of(files, told, content),
        stats=tuple(stats),
        stamps=tuple(map(_stamp_of_store, stats)),
    )


def watched(files: Sequence[SourceFile], found: Fingerprint, items: Iterator[T]) -> Iterator[T]:
    """What is made of the files; at its end, they must be those that were looked at.

    Raises:
        SourceChanged: a file was written since.
    """
    yield from items
    for file, stamp, now in zip(files, found.stamps, stamps_of(files), strict=True):
        if stamp != now:
            raise SourceChanged(f"{file}: changed while it was being read; run again when nobody writes to it")


def confirmed(files: Sequence[SourceFile]) -> None:
    """See `Source.confirm`."""
    for file in files:
        file.confirm()


def stamps_of(files: Sequence[SourceFile]) -> list[str]:
    """A word for each file's state, without reading it: size and checksum from its store, or size and time of change.

    Raises:
        SourceError: one is gone.
    """
    if all(file.local is None for file in files):
        return [_stamp_of_store(stored) for stored in _stats(files)]
    return [_stamp(file) for file in files]


def origin_of(files: Sequence[SourceFile], told: Sequence[str], content: str) -> dict[str, str]:
    """Names of the files and what is told of each, the first hundred of them; then their number and `content`.

    Args:
        files: at least as many as are told of.
        told: in the order of the files.
        content: a digest of all.
    """
    origin: dict[str, str] = {}
    for file, text in zip(files[:_FILES_IN_ORIGIN], told, strict=False):
        origin[file.name if file.name not in origin else file.uri] = text
    if len(files) > _FILES_IN_ORIGIN:
        origin["…"] = f"{len(files)} files, sha256 {content}"
    return origin


def _stamp_of_store(stored: Stored) -> str:
    return f"{stored.size} bytes, crc32c {stored.crc32c}"


def _stamp(file: SourceFile) -> str:
    try:
        status = Path(file.uri).stat()
    except OSError:
        return "gone"
    return f"{status.st_size} bytes, written at {status.st_mtime_ns}"


def _stats(files: Sequence[SourceFile]) -> list[Stored]:
    return side_by_side(SourceFile.stat, files, workers=files[0].storage.transfers)
