"""The files of a source, on this machine or in a store: found, opened, and identified by their content.

A file that changes while it is read is detected.
"""

import hashlib
import io
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import google_crc32c

from baton.tasks.foundation.contracts.home_files import most_bytes, require_readable, too_large
from baton.tasks.foundation.errors import (
    DamagedInTransit,
    FileMissing,
    FileTooLarge,
    SourceChanged,
    SourceError,
    StorageError,
)
from baton.tasks.foundation.storage.interface import FileStat, Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.opening import open_storage
from baton.tasks.foundation.storage.transfers import parallel_map
from baton.tasks.foundation.text import counted
from baton.tasks.prepare_data.sources.verified_reads import RandomAccessStream, RemoteRead

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file and how to read it. The constructor reads nothing."""

    storage: Storage
    path: str  # relative to the storage's root
    relative: str  # path relative to the folder or pattern of data.options.path; files are sorted by it
    local: Path | None = None  # its path, if it is local
    # The read in progress; after an error, the read that failed.
    _current: list[RemoteRead] = field(default_factory=list, init=False, compare=False, repr=False)

    @property
    def uri(self) -> str:
        """Absolute path or address."""
        return f"{self.storage.uri}/{self.path}" if self.local is None else str(self.local)

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    def stat(self) -> FileStat:
        """Return size and checksum; for a local file this reads it.

        Raises:
            SourceError: the file is missing.
        """
        with self._errors():
            return self.storage.stat(self.path)

    def read(self, most: int | None = None) -> bytes:
        """Return the whole content.

        Args:
            most: its largest number of bytes; None: that of a small file that describes others, see `home_files`.

        Raises:
            SourceError: the file cannot be read, has more bytes, or is JSON of more lists or values than is read.
        """
        with self._errors():
            if self.local is None:
                return self.storage.read(self.path)  # bounded by the store
            limit = most or most_bytes(self.uri)
            with self.local.open("rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                if size > limit:
                    raise too_large(self.uri, limit)
                data = opened.read(size)
            if most is None:
                require_readable(self.uri, data)
            return data

    @contextmanager
    def reading(self) -> Iterator[Iterator[bytes]]:
        """Yield its bytes from the beginning, in blocks. Reads from a store are verified when the context ends.

        Raises:
            DamagedInTransit: other bytes arrived than the store has.
            SourceError: the file cannot be read, or changed meanwhile.
        """
        with self._errors():
            if self.local is not None:
                with self.local.open("rb") as opened:
                    yield iter(partial(opened.read, _BLOCK_BYTES), b"")
                return
            with self._remote_read(sequential=True) as remote:
                with closing(remote.blocks()) as blocks:  # stops reading ahead
                    yield blocks
                remote.finish()

    @contextmanager
    def open(self, *, has_checksums: bool = False) -> Iterator[IO[bytes]]:
        """Open for random access; each range is requested from a store when it is read.

        Args:
            has_checksums: the caller verifies checksums inside the file. Otherwise all ranges that were read from a
                store are read once more when the context ends.

        Raises:
            DamagedInTransit: other bytes arrived than the store has.
            SourceError: the file cannot be read; also raised later, while reading.
        """
        with self._errors():
            if self.local is not None:
                with self.local.open("rb") as opened:
                    yield opened
                return
            with self._remote_read(sequential=False) as remote:
                whole = remote.whole_if_small()
                random_access = RandomAccessStream(remote)
                stream = io.BufferedReader(random_access, _BLOCK_BYTES) if whole is None else io.BytesIO(whole)
                with stream as opened:
                    yield opened
                if not has_checksums:
                    remote.finish()

    def confirm(self) -> None:
        """Check whether the last bytes were damaged in transit. Call this when their content is invalid.

        Raises:
            DamagedInTransit: the bytes were damaged.
        """
        with self._errors():
            for remote in self._current:
                remote.confirm()

    @contextmanager
    def _remote_read(self, *, sequential: bool) -> Iterator[RemoteRead]:
        remote = RemoteRead(self.storage, self.path, self.uri, sequential=sequential)
        self._current[:] = [remote]
        try:
            yield remote
        except (DamagedInTransit, SourceChanged, StorageError):
            raise
        except Exception:
            remote.confirm()  # the file may be valid, and only its bytes damaged in transit
            raise
        self._current.clear()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FileMissing as fault:
            raise SourceError(f"{self.uri} is missing; restore it, or correct data.options.path") from fault
        except FileTooLarge as fault:
            raise SourceError(f"{fault}; restore it, or remove it") from fault
        except OSError as fault:
            raise SourceError(
                f"{self.uri}: cannot be read: {fault.strerror}; check that it exists, and its permissions"
            ) from fault


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
    return matches(below, patterns) if patterns else True


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
        suffix: in a folder, select only files with this suffix, in letters of any case.

    Raises:
        InvalidInput: the address has an unknown scheme.
        SourceError: there are no files, or one of them is a link to a folder, which is not followed.
    """
    return find_and_sort_out(path, code_folder, suffix=suffix)[0]


def find_and_sort_out(path: str, code_folder: Path, *, suffix: str = "") -> tuple[list[SourceFile], list[SourceFile]]:
    """Return what `find_files` does, and the files of the folder that have another suffix; lists it once."""
    address = _ADDRESS.fullmatch(path)
    if address:
        at, (is_folder, files) = path, _remote(path, address[1], address[2])
    else:
        target = local_path(path, code_folder)
        at, (is_folder, files) = str(target), _local(path, target)
    files.sort(key=lambda file: file.relative)
    found = [file for file in files if not is_folder or _ends(file.name, suffix)]
    if not found:
        kind = f"no files ending in {suffix!r}" if suffix else "no files"
        raise SourceError(f"data.options.path: {path!r}: {kind} at {at}; name a file, or a folder with files")
    return found, [file for file in files if is_folder and not _ends(file.name, suffix)]


def _local(path: str, target: Path) -> tuple[bool, list[SourceFile]]:
    """Whether a folder is named, and its files; or those that are named otherwise."""
    found: Iterable[Path]
    try:
        if target.is_file():
            return False, [_local_file(target, LocalStorage(target.parent, guarded=False))]
        if target.is_dir():
            base, found = target, target.rglob("*")
        elif any(mark in path for mark in _MARKS):
            # Relative names start at the first pattern character, as in a store.
            base = Path(*_fixed(target.parts))
            found = base.glob(str(target.relative_to(base)))
        else:
            raise _missing_path_error(path, target)
        storage = LocalStorage(base, guarded=False)
        taken = []
        for file in found:
            relative = file.relative_to(base)
            if _INSTALLED.intersection(relative.parts):
                continue
            if file.is_file():
                taken.append(_local_file(file, storage))
            elif base == target and file.is_symlink() and file.is_dir() and not _is_hidden(relative.as_posix()):
                raise SourceError(
                    f"data.options.path: {file} is a link to a folder, whose files would be left out; put the folder "
                    "itself there, or remove the link"
                )
    except OSError as fault:
        raise SourceError(f"data.options.path: {path!r}: {target}: {fault.strerror}; check its permissions") from fault
    return base == target, taken


def _is_hidden(relative: str) -> bool:
    return any(part.startswith(".") for part in relative.split("/"))


def _ends(name: str, suffix: str) -> bool:
    return name.lower().endswith(suffix.lower())


def left_out(path: str, others: Iterable[SourceFile]) -> str:
    """Return a sentence about the files at `data.options.path` that a source does not read; "" if all are hidden."""
    shown = [file.relative for file in others if not _is_hidden(file.relative)]
    if not shown:
        return ""
    more = ", …" if len(shown) > _SHOWN else ""
    return f"data.options.path: {path}: {counted(len(shown), 'file')} not read: {', '.join(shown[:_SHOWN])}{more}"


def _local_file(file: Path, storage: LocalStorage) -> SourceFile:
    relative = file.relative_to(storage.root).as_posix()
    return SourceFile(storage=storage, path=relative, relative=relative, local=file)


def _remote(path: str, scheme: str, rest: str) -> tuple[bool, list[SourceFile]]:
    """Whether a folder is named, and its files; or those that are named otherwise."""
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
            return False, [SourceFile(storage=above, path=name, relative=name)]
    base = open_storage(f"{scheme}://{'/'.join(fixed)}", relative_to=Path(), guarded=False)
    patterns = parts[len(fixed) :]
    return not patterns, [
        SourceFile(storage=base, path=file, relative=file)
        for file in base.files("")
        # Some tools mark folders with empty objects.
        if not file.endswith("/") and (not patterns or matches(file.split("/"), patterns))
    ]


def _fixed(parts: Sequence[str]) -> list[str]:
    """Return the leading parts of a path that contain no pattern."""
    count = next((index for index, part in enumerate(parts) if any(mark in part for mark in _MARKS)), len(parts))
    return list(parts[:count])


def matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Match as `Path.glob` does: `*` stays within one part, `**` matches any number of parts."""
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(matches(parts[begin:], patterns[1:]) for begin in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and matches(parts[1:], patterns[1:])


def _missing_path_error(path: str, target: Path) -> SourceError:
    return SourceError(f"data.options.path: {path!r}: {target} does not exist; {_beside(target)}")


def _beside(target: Path) -> str:
    folder = next((parent for parent in target.parents if parent.is_dir()), target.parent)
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    return f"{folder} contains: {shown or 'nothing'}; correct the path"


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


def fingerprint_by_stamps(files: Sequence[SourceFile]) -> Fingerprint:
    """Identify files by path and stamp, without reading them: indexing computes the ranges' checksums anyway.

    Files that were moved or rewritten are indexed again; if their content is the same, it is the same dataset.
    """
    stamps = file_stamps(files)
    lines = (f"{file.uri}\0{stamp}\n" for file, stamp in zip(files, stamps, strict=True))
    content = hashlib.sha256("".join(lines).encode()).hexdigest()
    return Fingerprint(content=content, origin=describe_origin(files, stamps, content), size=0, stamps=tuple(stamps))


def require_unchanged(files: Sequence[SourceFile], found: Fingerprint, items: Iterator[T]) -> Iterator[T]:
    """Yield the items that are made from files; after the last one, check that the files have not changed.

    Raises:
        SourceChanged: a file was changed.
    """
    yield from items
    for file, stamp, now in zip(files, found.stamps, file_stamps(files), strict=True):
        if stamp != now:
            raise SourceChanged(f"{file}: changed while it was being read; run again when no process writes to it")


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
