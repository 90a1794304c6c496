"""A file that a source reads, on this machine or on a store."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tasks.foundation.errors import FileMissing, SourceError
from tasks.foundation.storage.base import Storage, Stored
from tasks.prepare_data.sources.ahead import in_order

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BLOCK_BYTES = 1 << 20
# A request to a store costs its time however little it asks for.
_REQUEST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """Where a file lies, and how it is read; making one reads nothing."""

    storage: Storage
    path: str  # relative to the storage's root
    relative: str  # to the folder that data.options.path means, or begins with: files are sorted by it
    local: Path | None = None  # where it lies on this machine

    @property
    def uri(self) -> str:
        """Its absolute path or its address."""
        return f"{self.storage.uri}/{self.path}" if self.local is None else str(self.local)

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    def stat(self) -> Stored:
        """Size and checksum as the store has them; a local file is read for it.

        Raises:
            SourceError: it is not there.
        """
        with self._errors():
            return self.storage.stat(self.path)

    def read(self) -> bytes:
        """All of it.

        Raises:
            SourceError: it cannot be read.
        """
        with self._errors():
            return self.storage.read(self.path) if self.local is None else self.local.read_bytes()

    def blocks(self) -> Iterator[bytes]:
        """Its bytes, a block at a time.

        Raises:
            SourceError: it cannot be read.
        """
        with self._errors():
            if self.local is None:
                yield from self._requested()
                return
            with self.local.open("rb") as opened:
                while block := opened.read(_BLOCK_BYTES):
                    yield block

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """For reading at any place; on a store, what is asked for is fetched as it is asked for.

        Raises:
            SourceError: it cannot be read, also later.
        """
        with self._errors():
            if self.local is not None:
                with self.local.open("rb") as opened:
                    yield opened
                return
            size = self.storage.stat(self.path).size
            with io.BufferedReader(_Requests(self.storage, self.path, size), _BLOCK_BYTES) as opened:
                yield opened

    def _requested(self) -> Iterator[bytes]:
        size = self.storage.stat(self.path).size
        begins = range(0, size, _REQUEST_BYTES)
        done = 0
        for block in in_order(
            lambda begin: self.storage.read_range(self.path, begin, min(_REQUEST_BYTES, size - begin)),
            begins,
            workers=min(self.storage.transfers, 4),
        ):
            done += len(block)
            yield block
        if done != size:
            raise SourceError(f"{self.uri}: changed while it was being read; run again when nobody writes to it")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FileMissing as fault:
            raise SourceError(f"{self.uri} is not there any more; put it back, or correct data.options.path") from fault
        except OSError as fault:
            raise SourceError(
                f"{self.uri}: cannot be read: {fault.strerror}; see that it is there and who may read it"
            ) from fault


class _Requests(io.RawIOBase):
    """A file on a store as a stream that can be read at any place, one request a read."""

    def __init__(self, storage: Storage, path: str, size: int) -> None:
        self._storage = storage
        self._path = path
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: "WriteableBuffer") -> int:
        with memoryview(buffer) as view:
            wanted = max(0, min(len(view), self._size - self._at))
            data = self._storage.read_range(self._path, self._at, wanted) if wanted else b""
            view[: len(data)] = data
        self._at += len(data)
        return len(data)
