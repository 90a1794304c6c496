"""A file that a source reads, on this machine or in a store."""

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from tasks.foundation.errors import DamagedInTransit, FileMissing, SourceChanged, SourceError, StorageError
from tasks.foundation.storage.base import FileStat, Storage
from tasks.prepare_data.sources.verified_reads import RandomAccessStream, RemoteRead

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

    def read(self) -> bytes:
        """Return the whole content.

        Raises:
            SourceError: the file cannot be read.
        """
        with self._errors():
            return self.storage.read(self.path) if self.local is None else self.local.read_bytes()

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
        except OSError as fault:
            raise SourceError(
                f"{self.uri}: cannot be read: {fault.strerror}; check that it exists, and its permissions"
            ) from fault
