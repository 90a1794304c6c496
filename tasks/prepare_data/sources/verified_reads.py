"""Reads source files from a store, and verifies every byte before the dataset is committed.

The store has a checksum of each object but not of its parts, and large files arrive in parts. A file that is read to
its end is compared with the store's checksum. Single parts are read twice and compared, unless the file format has its
own checksums. Small files are read whole.

Applies a function to items in parallel, ahead of the reader, with results in order.
"""

import io
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import google_crc32c

from baton.tasks.foundation.errors import DamagedInTransit, SourceChanged
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.transfers import REMEDY

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


T = TypeVar("T")
R = TypeVar("R")


def map_ahead(work: Callable[[T], R], items: Iterable[T], *, workers: int) -> Iterator[R]:
    """Apply `work` to each item in threads; yield the results in order, holding at most 2 * workers of them.

    Args:
        work: releases Python's lock while it runs, as requests and TensorFlow do.
        items: consumed in the calling thread, a few ahead.
        workers: number of threads, at least 1; with 1, `work` runs in the calling thread, and not ahead.
    """
    if workers == 1:
        yield from map(work, items)
        return
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="baton-source")
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) == 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Do not wait: the results are not needed, and the store may be unreachable.
        pool.shutdown(wait=False, cancel_futures=True)


# Even a small request takes time.
_REQUEST_BYTES = 8 << 20
# Up to this size a file is read and verified whole, even if only its beginning is needed.
_SMALL_BYTES = 256 << 10
# Maximum number of extra bytes to read in order to compare a whole file with the store's checksum.
_MAX_REST_BYTES = 64 << 20
# If a row is bad in a file that is read in order, it is in one of the last blocks.
_SUSPECT_BLOCKS = 8
# Requests at the same time that read a file in order.
_WORKERS = 4
_DIFFERENT = "two reads returned different bytes"


class RemoteRead:
    """A read of one remote file. The constructor asks the store for the file's size and checksum."""

    def __init__(self, storage: Storage, path: str, uri: str, *, sequential: bool) -> None:
        """Ask for the size and checksum; no content is read yet.

        Args:
            storage: the store.
            path: relative to the storage's root.
            uri: the file's address, for messages.
            sequential: read from the beginning with `blocks`; otherwise at any position with `read`.

        Raises:
            FileMissing: the file does not exist.
        """
        self._storage, self._path, self._uri, self._sequential = storage, path, uri, sequential
        self._stored = storage.stat(path)
        self._parts: deque[tuple[int, int, int]] = deque()  # begin, size and crc32c of the bytes returned
        self._taken = self._crc = 0

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return self._stored.size

    def blocks(self) -> Generator[bytes, None, None]:
        """Yield the whole file in order, verified at its end.

        Raises:
            DamagedInTransit: other bytes arrived than the store has.
            SourceChanged: the file changed meanwhile.
        """
        if self.size <= _REQUEST_BYTES and not self._taken:
            block = self._whole()
            self._taken, self._crc = self.size, google_crc32c.value(block)
            yield block
            return
        begins = range(self._taken, self.size, _REQUEST_BYTES)
        workers = min(self._storage.transfers, _WORKERS)
        arrived = map_ahead(lambda begin: self._request(begin, self.size), begins, workers=workers)
        for begin, block in zip(begins, arrived, strict=True):
            self._crc = google_crc32c.extend(self._crc, block)
            self._taken += len(block)
            self._note(begin, block)
            if self._taken == self.size:
                self._compare(self._crc)  # before the last block is used
            yield block
        if self._taken != self.size:
            raise self._changed()

    def whole_if_small(self) -> bytes | None:
        """Return the whole file, verified; None if it is too large for that.

        Raises:
            DamagedInTransit: other bytes arrived than the store has.
            SourceChanged: the file changed meanwhile.
        """
        return self._whole() if self.size <= _SMALL_BYTES else None

    def _whole(self) -> bytes:
        data = self._storage.read(self._path)
        self._compare(google_crc32c.value(data))
        return data

    def read(self, begin: int, size: int) -> bytes:
        """Return at most `size` bytes from offset `begin`."""
        data = self._storage.read_range(self._path, begin, size) if size else b""
        self._note(begin, data)
        return data

    def finish(self) -> None:
        """Verify the bytes that were returned and not yet verified. Call this at the end.

        Raises:
            DamagedInTransit: other bytes arrived than the store has.
            SourceChanged: the file changed meanwhile.
        """
        if not self._sequential:
            self._read_again()
        elif 0 < self._taken < self.size:
            if self._rest() <= max(self._taken, _MAX_REST_BYTES):
                self._compare_with_rest()
            elif self._prefix() != self._crc:
                raise self._damaged(_DIFFERENT)

    def confirm(self) -> None:
        """Check whether the last bytes were damaged in transit. Call this when their content is invalid.

        Raises:
            DamagedInTransit: the bytes were damaged.
            SourceChanged: the file changed meanwhile.
        """
        self._read_again()
        # If the same bit flips in every read, only the checksum of the whole file detects it.
        if self._rest() <= _MAX_REST_BYTES:
            self._compare_with_rest()

    def _read_again(self) -> None:
        for begin, size, crc in self._parts:
            if google_crc32c.value(self._storage.read_range(self._path, begin, size)) != crc:
                raise self._damaged(_DIFFERENT)

    def _rest(self) -> int:
        return self.size - self._taken

    def _compare_with_rest(self) -> None:
        self._compare(self._extended(self._crc, self._taken, self.size))

    def _prefix(self) -> int:
        return self._extended(0, 0, self._taken)

    def _extended(self, crc: int, begin: int, end: int) -> int:
        for at in range(begin, end, _REQUEST_BYTES):
            crc = google_crc32c.extend(crc, self._request(at, end))
        return crc

    def _request(self, begin: int, end: int) -> bytes:
        return self._storage.read_range(self._path, begin, min(_REQUEST_BYTES, end - begin))

    def _note(self, begin: int, data: bytes) -> None:
        self._parts.append((begin, len(data), google_crc32c.value(data)))
        if self._sequential and len(self._parts) > _SUSPECT_BLOCKS:
            self._parts.popleft()

    def _compare(self, crc: int) -> None:
        found = f"{crc:08x}"
        if found == self._stored.crc32c:
            return
        if self._storage.stat(self._path) != self._stored:
            raise self._changed()
        raise self._damaged(f"the bytes that arrived have crc32c {found}, the store has {self._stored.crc32c}")

    def _changed(self) -> SourceChanged:
        return SourceChanged(f"{self._uri}: changed while it was being read; run again when no process writes to it")

    def _damaged(self, how: str) -> DamagedInTransit:
        return DamagedInTransit(f"{self._uri}: its bytes were damaged in transit ({how}); {REMEDY}")


class RandomAccessStream(io.RawIOBase):
    """A remote file as a seekable stream, with one request per read."""

    def __init__(self, arriving: RemoteRead) -> None:
        self._arriving = arriving
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.IOBase.seek`."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._arriving.size}[whence]
        return self._at

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """See `io.RawIOBase.readinto`."""
        with memoryview(buffer) as view:
            data = self._arriving.read(self._at, max(0, min(len(view), self._arriving.size - self._at)))
            view[: len(data)] = data
        self._at += len(data)
        return len(data)


class BlockStream(io.RawIOBase):
    """Blocks of bytes as a stream."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._held = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """See `io.RawIOBase.readinto`."""
        while not self._held:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._held = memoryview(block)
        with memoryview(buffer) as view:
            size = min(len(view), len(self._held))
            view[:size] = self._held[:size]
        self._held = self._held[size:]
        return size
