"""A local cache of byte ranges of remote files, limited in bytes, and the one that a process has for all its shards.

Ranges that are in use or read ahead are pinned. Other ranges stay while there is room, and the least recently used is
removed first. So a small dataset is downloaded once, and a large one needs room for the windows in use only. Training
and validation share the cache of the process in all segments. The environment variable BATON_CACHE_BYTES limits it, in
bytes. The default is 8 GiB, or half of the free space in the temporary folder (TMPDIR) if that is less. The limit is
read when the first shard is opened.
"""

import atexit
import errno
import itertools
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from baton.tasks.foundation.errors import InvalidInput, StorageError
from baton.tasks.foundation.storage.local_files import temporary_folder

# An upper limit, even if the stores allow more parallel transfers.
_MOST_THREADS = 32
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """A range of bytes in a remote file, as a manifest lists it.

    Attributes:
        address: address of the file.
        begin: offset of the first byte.
        size: number of bytes.
        crc32c: checksum of the bytes.
        fetch: downloads the range to a local file and verifies it; called in a thread of the cache.
        transfers: parallel downloads that the store allows.
    """

    address: str
    begin: int
    size: int
    crc32c: str
    fetch: Callable[[Path], None] = field(compare=False, repr=False)
    transfers: int = field(default=1, compare=False)


@dataclass(slots=True, eq=False)
class _CachedRange:
    """A range that is cached or being downloaded. Its full size counts from the start."""

    file_range: FileRange
    file: Path
    pins: int = 0
    waits: bool = True
    ready: tuple[int, int] | None = None  # size and modification time, set when the file is complete
    fault: BaseException | None = None

    @property
    def idle(self) -> bool:
        return self.ready is not None and not self.pins

    @property
    def unwanted(self) -> bool:
        """Whether the range is being downloaded, but no longer pinned."""
        return not (self.waits or self.ready or self.fault or self.pins)


class Pin:
    """Ranges that stay in the cache until they are released."""

    def __init__(self, cache: "ShardCache", entries: Sequence[_CachedRange]) -> None:
        self._cache = cache
        self._entries = entries

    def files(self) -> list[Path]:
        """Wait for all ranges and return their files; they are downloaded before ranges that are only read ahead.

        Raises:
            BatonError: a download failed.
        """
        return self._cache._files_of(self._entries)

    def release(self) -> None:
        """Unpin the ranges; those whose download has not started are dropped."""
        entries, self._entries = self._entries, ()
        self._cache._release(entries)


class ShardCache:
    """Cached files in one folder. All methods are thread-safe."""

    def __init__(self, folder: Path, bound: int) -> None:
        """Create an empty cache; nothing is written.

        Args:
            folder: an empty local folder.
            bound: maximum number of bytes to keep. Several pinned windows together may exceed it; a single one may not.
        """
        self._folder = folder
        self._bound = bound
        self._changed = threading.Condition()
        self._entries: dict[FileRange, _CachedRange] = {}  # least recently used first
        self._waiting: deque[_CachedRange] = deque()
        self._threads = 0
        self._most_threads = 1
        self._names = itertools.count()
        self._closed = False

    def pin(self, ranges: Sequence[FileRange]) -> Pin:
        """Pin ranges that are needed now; missing ones are downloaded in the background.

        Raises:
            StorageError: the ranges are larger than the bound, or the cache is closed.
        """
        size = _size(set(ranges))
        if size > self._bound:
            raise StorageError(
                f"data.window_shards: the shards of one window take {_mib(size)}, but the cache in {self._folder} is "
                f"limited to {_mib(self._bound)}; choose a smaller data.window_shards, set the environment variable "
                "TMPDIR to a larger disk, or raise BATON_CACHE_BYTES"
            )
        with self._changed:
            self._forget_changed(ranges)
            while self._over(ranges) > 0:
                self._make_room(ranges)
                if not any(entry.unwanted for entry in self._entries.values()):
                    break
                self._changed.wait()  # it can be removed when its download ends
            return self._pin(ranges)

    def prefetch(self, ranges: Sequence[FileRange]) -> Pin | None:
        """Pin ranges that are needed later, if there is room besides all pinned ranges; else return None."""
        with self._changed:
            self._forget_changed(ranges)
            if self._over(ranges) > _size(entry.file_range for entry in self._idle(ranges)):
                return None
            self._make_room(ranges)
            return self._pin(ranges)

    def close(self) -> None:
        """Stop all downloads; unfinished ones are discarded."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            for entry in self._entries.values():
                if entry.ready is None:
                    entry.fault = self._ending()
            self._entries.clear()
            self._changed.notify_all()

    def _over(self, coming: Collection[FileRange] = ()) -> int:
        return _size({*self._entries, *coming}) - self._bound

    def _idle(self, excluding: Collection[FileRange] = ()) -> list[_CachedRange]:
        return [entry for entry in self._entries.values() if entry.idle and entry.file_range not in excluding]

    def _make_room(self, coming: Collection[FileRange] = ()) -> None:
        """Remove unpinned ranges until there is room for `coming`."""
        over = self._over(coming)
        for entry in self._idle(excluding=coming):
            if over <= 0:
                break
            self._drop(entry)
            over -= entry.file_range.size

    def _forget_changed(self, ranges: Collection[FileRange]) -> None:
        """Forget files that changed or are gone: systems clean up temporary folders. They are downloaded again."""
        for file_range in ranges:
            entry = self._entries.get(file_range)
            if entry is not None and entry.ready is not None and entry.ready != _stamp(entry.file):
                self._drop(entry)

    def _drop(self, entry: _CachedRange) -> None:
        if self._entries.get(entry.file_range) is entry:
            del self._entries[entry.file_range]
        with suppress(OSError):
            entry.file.unlink()

    def _pin(self, ranges: Sequence[FileRange]) -> Pin:
        if self._closed:
            raise self._ending()
        entries = []
        for file_range in ranges:
            entry = self._entries.pop(file_range, None)
            if entry is None:
                entry = _CachedRange(
                    file_range, self._folder / f"{next(self._names):06d}-{Path(file_range.address).name}"
                )
                self._waiting.append(entry)
                self._most_threads = min(max(self._most_threads, file_range.transfers), _MOST_THREADS)
            self._entries[file_range] = entry  # now the most recently used
            entry.pins += 1
            entries.append(entry)
        for _ in range(min(self._most_threads - self._threads, len(self._waiting))):
            # Daemon threads, so that the process can exit in the middle of a download.
            threading.Thread(target=self._work, name="baton-fetch", daemon=True).start()
            self._threads += 1
        return Pin(self, entries)

    def _files_of(self, entries: Sequence[_CachedRange]) -> list[Path]:
        with self._changed:
            for entry in reversed(entries):
                if entry.waits and entry in self._waiting:
                    self._waiting.remove(entry)
                    self._waiting.appendleft(entry)
            while not all(entry.ready for entry in entries):
                for entry in entries:
                    if entry.fault is not None:
                        raise entry.fault
                self._changed.wait()
            return [entry.file for entry in entries]

    def _release(self, entries: Sequence[_CachedRange]) -> None:
        with self._changed:
            for entry in entries:
                entry.pins -= 1
                if not entry.pins and entry.waits and entry in self._waiting:
                    self._waiting.remove(entry)
                    self._drop(entry)
            self._make_room()
            self._changed.notify_all()

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            try:
                self._fetch(entry)
                outcome: tuple[int, int] | BaseException | None = _stamp(entry.file)
            except BaseException as fault:  # noqa: BLE001 - raised in the thread that waits for the range
                outcome = fault
            with self._changed:
                if isinstance(outcome, tuple) and not self._closed:
                    entry.ready = outcome
                    self._make_room()
                else:
                    entry.fault = outcome if isinstance(outcome, BaseException) else self._ending()
                    self._drop(entry)
                self._changed.notify_all()

    def _next(self) -> _CachedRange | None:
        with self._changed:
            if not self._waiting:
                self._threads -= 1
                return None
            entry = self._waiting.popleft()
            entry.waits = False
            return entry

    def _fetch(self, entry: _CachedRange) -> None:
        try:
            entry.file_range.fetch(entry.file)
        except StorageError as fault:
            if not (disk_is_full(fault) and self._drop_idle()):
                raise
            entry.file_range.fetch(entry.file)

    def _drop_idle(self) -> bool:
        """Remove all unpinned ranges; return whether there were any."""
        with self._changed:
            idle = self._idle()
            for entry in idle:
                self._drop(entry)
            return bool(idle)

    def _ending(self) -> StorageError:
        return StorageError(f"{self._folder}: the shard cache is closed because the process is ending; run again")


def disk_is_full(fault: BaseException | None) -> bool:
    """Whether the error, or one that caused it, says that a local disk is full."""
    while fault is not None:
        if isinstance(fault, OSError) and fault.errno in _FULL:
            return True
        fault = fault.__cause__
    return False


def _size(ranges: Iterable[FileRange]) -> int:
    return sum(file_range.size for file_range in ranges)


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


_BOUND_BYTES = 8 << 30
_VARIABLE = "BATON_CACHE_BYTES"

# At most one open cache: a process has one local disk, and its segments reuse what they downloaded.
_LOCK = threading.Lock()
_OPEN: list[tuple[ShardCache, ExitStack]] = []


def shared_cache() -> ShardCache:
    """Return the cache of this process. It is deleted at exit; after a kill, the next process deletes it.

    Raises:
        InvalidInput: BATON_CACHE_BYTES is not a number of bytes.
        StorageError: there is no writable temporary folder.
    """
    with _LOCK:
        if not _OPEN:
            with ExitStack() as stack:
                try:
                    folder = stack.enter_context(temporary_folder("baton-shards-"))
                    cache = ShardCache(folder, bound_bytes(folder))
                except OSError as fault:
                    raise StorageError(
                        f"there is no writable temporary folder for shards ({fault.strerror or fault}); set the "
                        "environment variable TMPDIR to a folder with free space"
                    ) from fault
                stack.callback(cache.close)
                _OPEN.append((cache, stack.pop_all()))
            atexit.register(close_shared_cache)
        return _OPEN[0][0]


def close_shared_cache() -> None:
    """Delete the cache of this process; the next `shared_cache` call creates another."""
    with _LOCK:
        atexit.unregister(close_shared_cache)
        while _OPEN:
            with suppress(OSError):
                _OPEN.pop()[1].close()


def bound_bytes(folder: Path) -> int:
    """Return the maximum number of bytes for a cache in `folder`.

    Raises:
        InvalidInput: BATON_CACHE_BYTES is not a number of bytes.
    """
    value = os.environ.get(_VARIABLE)
    if value is None:
        return min(_BOUND_BYTES, shutil.disk_usage(folder).free // 2)
    if not (value.isascii() and value.isdecimal() and int(value)):
        raise InvalidInput(
            f"{_VARIABLE}={value!r} is not a number of bytes; set it to a number such as {_BOUND_BYTES}, or unset it"
        )
    return int(value)
