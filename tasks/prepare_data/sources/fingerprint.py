"""Identifies the content of files, and detects files that change while they are read."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import google_crc32c

from tasks.foundation.errors import SourceChanged
from tasks.foundation.storage.base import FileStat
from tasks.foundation.storage.transfers import parallel_map
from tasks.prepare_data.sources.source_file import SourceFile

T = TypeVar("T")
_FILES_IN_ORIGIN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What some files contained when they were inspected."""

    content: str  # sha256 over sizes and bytes, in order; in a store, over names, sizes and checksums
    size: int  # bytes inspected
    origin: dict[str, str]  # file -> checksum
    stats: tuple[FileStat, ...] = ()  # of all files in order, if they are in a store
    stamps: tuple[str, ...]  # of all files in order, taken before the inspection; see `file_stamps`


def fingerprint(files: Sequence[SourceFile], *, max_bytes: int | None = None) -> Fingerprint:
    """Fingerprint files: read local files, `max_bytes` in total; for files in a store, use its checksums.

    Raises:
        SourceError: a file cannot be read.
    """
    if all(file.local is None for file in files):
        return _of_store(files, max_bytes=max_bytes)
    stamps = file_stamps(files)
    digest, size = hashlib.sha256(), 0
    texts: list[str] = []
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
        texts.append(f"crc32c {crc:08x}")
        if size == max_bytes:
            break
    content = digest.hexdigest()
    return Fingerprint(content=content, size=size, origin=describe_origin(files, texts, content), stamps=tuple(stamps))


def _of_store(files: Sequence[SourceFile], *, max_bytes: int | None) -> Fingerprint:
    digest, size = hashlib.sha256(), 0
    texts: list[str] = []
    stats = _stats(files)
    for file, stored in zip(files, stats, strict=True):
        if max_bytes is not None and size >= max_bytes:
            break
        digest.update(f"{file.relative}\0{stored.size}\0{stored.crc32c}\n".encode())
        texts.append(f"crc32c {stored.crc32c}")
        size += stored.size
    if max_bytes is not None and max_bytes < size:
        size = max_bytes
        digest.update(f"{size}".encode())
    content = digest.hexdigest()
    return Fingerprint(
        content=content,
        size=size,
        origin=describe_origin(files, texts, content),
        stats=tuple(stats),
        stamps=tuple(map(_stamp_of_store, stats)),
    )


def require_unchanged(files: Sequence[SourceFile], found: Fingerprint, items: Iterator[T]) -> Iterator[T]:
    """Yield the items that are made from files; after the last one, check that the files have not changed.

    Raises:
        SourceChanged: a file was changed.
    """
    yield from items
    for file, stamp, now in zip(files, found.stamps, file_stamps(files), strict=True):
        if stamp != now:
            raise SourceChanged(f"{file}: changed while it was being read; run again when no process writes to it")


def confirm_all(files: Sequence[SourceFile]) -> None:
    """See `Source.confirm`."""
    for file in files:
        file.confirm()


def file_stamps(files: Sequence[SourceFile]) -> list[str]:
    """Return a text for each file's state, without reading it: size and checksum in the store, or size and mtime.

    Raises:
        SourceError: a file is missing.
    """
    if all(file.local is None for file in files):
        return [_stamp_of_store(stored) for stored in _stats(files)]
    return [_stamp(file) for file in files]


def describe_origin(files: Sequence[SourceFile], texts: Sequence[str], content: str) -> dict[str, str]:
    """Return file names with their text, for the first hundred files; then the number of files and `content`.

    Args:
        files: at least as many as `texts`.
        texts: a text for each file, in order.
        content: digest of all files.
    """
    origin: dict[str, str] = {}
    for file, text in zip(files[:_FILES_IN_ORIGIN], texts, strict=False):
        origin[file.name if file.name not in origin else file.uri] = text
    if len(files) > _FILES_IN_ORIGIN:
        origin["…"] = f"{len(files)} files, sha256 {content}"
    return origin


def _stamp_of_store(stored: FileStat) -> str:
    return f"{stored.size} bytes, crc32c {stored.crc32c}"


def _stamp(file: SourceFile) -> str:
    try:
        status = Path(file.uri).stat()
    except OSError:
        return "gone"
    return f"{status.st_size} bytes, written at {status.st_mtime_ns}"


def _stats(files: Sequence[SourceFile]) -> list[FileStat]:
    return parallel_map(SourceFile.stat, files, workers=files[0].storage.transfers)
