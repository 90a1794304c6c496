"""Reading source files from a store, with every byte compared before the dataset is committed.

The store has a checksum of each object but none of its parts, and large files arrive in parts. A file that is read to
its end is compared with the store's checksum. Parts that are read alone are read twice and compared, unless the file
format has checksums of its own. Small files are read whole.
"""

import io
from collections import deque
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

import google_crc32c

from tasks.foundation.errors import DamagedInTransit, SourceChanged
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.transit_damage import WHAT_TO_DO
from tasks.prepare_data.sources.read_ahead import in_order

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# A request to a store costs its time however little it asks for.
_REQUEST_BYTES = 8 << 20
# Up to this size a file is read whole and compared, even if only its beginning is needed.
_SMALL_BYTES = 256 << 10
# The most that is read only to compare the rest of a file with the store's checksum.
_LITTLE_BYTES = 64 << 20
# A bad row in a file that is read in order comes from one of the last blocks.
_SUSPECT_BLOCKS = 8
_DIFFERENT = "two reads brought different bytes"


class Arriving:
    """One file that is being read. The constructor asks the store for its size and checksum."""

    def __init__(self, storage: Storage, path: str, uri: str, *, sequential: bool) -> None:
        """Nothing is read yet.

        Args:
            storage: where it lies.
            path: relative to the storage's root.
            uri: its address, for messages.
            sequential: the file is read from the beginning with `blocks`; otherwise anywhere with `read`.

        Raises:
            FileMissing: it is not there.
        """
        self._storage, self._path, self._uri, self._sequential = storage, path, uri, sequential
        self._stored = storage.stat(path)
        self._parts: deque[tuple[int, int, int]] = deque()  # begin, size and crc32c of what was handed out
        self._taken = self._crc = 0

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return self._stored.size

    def blocks(self) -> Generator[bytes, None, None]:
        """All of it, in order, compared at its end.

        Raises:
            DamagedInTransit: other bytes arrived than the store has.
            SourceChanged: the file was changed meanwhile.
        """
        if self.size <= _REQUEST_BYTES and not self._taken:
            block = self._whole()
            self._taken, self._crc = self.size, google_crc32c.value(block)
            yield block
            return
        begins = range(self._taken, self.size, _REQUEST_BYTES)
        workers = min(self._storage.transfers, 4)
        arrived = in_order(lambda begin: self._request(begin, self.size), begins, workers=workers)
        for begin, block in zip(begins, arrived, strict=True):
            self._crc = google_crc32c.extend(self._crc, block)
            self._taken += len(block)
            self._note(begin, block)
            if self._taken == self.size:
                self._compare(self._crc)  # before anything is made of the last block
            yield block
        if self._taken != self.size:
            raise self._changed()

    def whole_if_small(self) -> bytes | None:
        """All of it, compared; None if it is too large for that.

        Raises:
            DamagedInTransit: other bytes arrived than the store has.
            SourceChanged: the file was changed meanwhile.
        """
        return self._whole() if self.size <= _SMALL_BYTES else None

    def _whole(self) -> bytes:
        data = self._storage.read(self._path)
        self._compare(google_crc32c.value(data))
        return data

    def read(self, begin: int, size: int) -> bytes:
        """At most `size` bytes from `begin` on."""
        data = self._storage.read_range(self._path, begin, size) if size else b""
        self._note(begin, data)
        return data

    def finish(self) -> None:
        """Compare what was handed out and is not compared yet. Call this at the end.

        Raises:
            DamagedInTransit: it is not.
            SourceChanged: the file was changed meanwhile.
        """
        if not self._sequential:
            self._read_again()
        elif 0 < self._taken < self.size:
            if self._rest() <= max(self._taken, _LITTLE_BYTES):
                self._compare_with_rest()
            elif self._prefix() != self._crc:
                raise self._damaged(_DIFFERENT)

    def confirm(self) -> None:
        """Check whether the last bytes were damaged on the way. Call this when they seem to be wrong.

        Raises:
            DamagedInTransit: it was.
            SourceChanged: the file was changed meanwhile.
        """
        self._read_again()
        # If the same bit flips in every read, only the checksum of the whole file shows it.
        if self._rest() <= _LITTLE_BYTES:
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
        raise self._damaged(f"what arrived has crc32c {found}, the store has {self._stored.crc32c}")

    def _changed(self) -> SourceChanged:
        return SourceChanged(f"{self._uri}: changed while it was being read; run again when nobody writes to it")

    def _damaged(self, how: str) -> DamagedInTransit:
        return DamagedInTransit(f"{self._uri}: its bytes are damaged on the way here ({how}); {WHAT_TO_DO}")


class Anywhere(io.RawIOBase):
    """A file on a store as a stream that can be read at any place, one request a read."""

    def __init__(self, arriving: Arriving) -> None:
        self._arriving = arriving
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As files have it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._arriving.size}[whence]
        return self._at

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """As files have it."""
        with memoryview(buffer) as view:
            data = self._arriving.read(self._at, max(0, min(len(view), self._arriving.size - self._at)))
            view[: len(data)] = data
        self._at += len(data)
        return len(data)


class InOrder(io.RawIOBase):
    """Blocks as a stream."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._held = memoryview(b"")

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """As files have it."""
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
