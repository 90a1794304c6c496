"""A file that a source reads, on this machine or on a store."""

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from tasks.foundation.errors import DamagedInTransit, FileMissing, SourceChanged, SourceError, StorageError
from tasks.foundation.storage.base import Storage, Stored
from tasks.prepare_data.sources.verified_reads import Anywhere, Arriving

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """Where a file lies, and how it is read; making one reads nothing."""

    storage: Storage
    path: str  # relative to the storage's root
    relative: str  # to the folder that data.options.path means, or begins with: files are sorted by it
    local: Path | None = None  # where it lies on this machine
    # What is being read of it, or was when something went wrong.
    _current: list[Arriving] = field(default_factory=list, init=False, compare=False, repr=False)

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

    @contextmanager
    def reading(self) -> Iterator[Iterator[bytes]]:
        """Its bytes from the beginning, in blocks. What was read from a store is compared when the context ends.

        Raises:
            DamagedInTransit: other bytes arrived than the store has.
            SourceError: it cannot be read, or changes meanwhile.
        """
        with self._errors():
            if self.local is not None:
                with self.local.open("rb") as opened:
                    yield iter(partial(opened.read, _BLOCK_BYTES), b"")
                return
            with self._arriving(sequential=True) as arriving:
                with closing(arriving.blocks()) as blocks:  # what is read ahead is not wanted any more
                    yield blocks
                arriving.finish()

    @contextmanager
    def open(self, *, has_checksums: bool = False) -> Iterator[IO[bytes]]:
        """For reading at any place; on a store, what is asked for is fetched as it is asked for.

        Args:
            has_checksums: the caller compares checksums inside the file; otherwise what was read from a store is read
                once more when the context ends.

        Raises:
            DamagedInTransit: other bytes arrived than the store has.
            SourceError: it cannot be read, also later.
        """
        with self._errors():
            if self.local is not None:
                with self.local.open("rb") as opened:
                    yield opened
                return
            with self._arriving(sequential=False) as arriving:
                whole = arriving.whole_if_small()
                stream = io.BufferedReader(Anywhere(arriving), _BLOCK_BYTES) if whole is None else io.BytesIO(whole)
                with stream as opened:
                    yield opened
                if not has_checksums:
                    arriving.finish()

    def confirm(self) -> None:
        """Check whether the last bytes were damaged on the way. Call this when they seem to be wrong.

        Raises:
            DamagedInTransit: they were.
        """
        with self._errors():
            for arriving in self._current:
                arriving.confirm()

    @contextmanager
    def _arriving(self, *, sequential: bool) -> Iterator[Arriving]:
        arriving = Arriving(self.storage, self.path, self.uri, sequential=sequential)
        self._current[:] = [arriving]
        try:
            yield arriving
        except (DamagedInTransit, SourceChanged, StorageError):
            raise
        except Exception:
            arriving.confirm()  # the file may be sound, and its bytes damaged on the way
            raise
        self._current.clear()

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
