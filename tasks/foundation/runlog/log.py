"""Reading and appending to `log/`: create-only entries, numbered without gaps.

After Delta Lake's transaction log: optimistic concurrency by put-if-absent, no lease and no clock.
"""

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from tasks.foundation.contracts.log_entry import Body, Entry, Head
from tasks.foundation.errors import FileAlreadyThere, FileMissing, RunLogError, StorageError
from tasks.foundation.runlog.folding import fold
from tasks.foundation.storage.base import Storage

_LOGGER = logging.getLogger(__name__)
_HINT = "log/HINT"

Decide = Callable[[Head | None], Body | None]


class RunLog:
    """The log of the run whose home is `home`."""

    def __init__(self, home: Storage) -> None:
        self.home = home

    def head(self) -> Head | None:
        """The folded state of the newest entry; None where no run is."""
        number = self._newest()
        return None if number is None else self.entry(number).head

    def entry(self, number: int) -> Entry:
        """One entry.

        Raises:
            RunLogError: it is not there, or cannot be read.
        """
        path = _path(number)
        where = f"{self.home.uri}/{path}"
        try:
            data = self.home.read(path)
        except FileMissing as fault:
            raise RunLogError(f"{where} is not there; the log has lost an entry, restore it from a backup") from fault
        entry = Entry.from_json(data, where=where, error=RunLogError)
        if entry.number != number:
            raise RunLogError(f"{where} calls itself entry {entry.number}; restore the file from a backup")
        return entry

    def entries(self) -> Iterator[Entry]:
        """All entries, oldest first."""
        newest = self._newest()
        if newest is not None:
            for number in range(newest + 1):
                yield self.entry(number)

    def append(self, decide: Decide, *, attempt: str) -> Entry | None:
        """Append what `decide` makes of the newest state.

        `decide` is asked again whenever another writer came first, so it sees every state that it appends to. It
        returns None if there is nothing (any more) to say, or raises (`StaleWriter`) if its work is void.

        Args:
            decide: from the newest state to the body of the next entry.
            attempt: who writes; a uuid4 of this process.

        Returns:
            The entry as it stands in the log, or None.
        """
        head = self.head()
        while True:
            body = decide(head)
            if body is None:
                return None
            number = 0 if head is None else head.number + 1
            entry = Entry(
                number=number,
                time=datetime.now(UTC).isoformat(timespec="seconds"),
                attempt=attempt,
                body=body,
                head=fold(head, body),
            )
            try:
                self.home.create(_path(number), entry.to_json())
            except FileAlreadyThere:
                there = self.entry(number)
                # A create that is refused may be our own: the first answer got lost. Compared as written, since a
                # metric that is NaN is not equal to itself.
                if there.attempt == attempt and there.body.to_json() == body.to_json():
                    return there
                head = there.head
                continue
            self._write_hint(number)
            return entry

    def _newest(self) -> int | None:
        """Number of the newest entry, from HINT by probing forward: cost grows with the logarithm of HINT's error."""
        low = self._read_hint()
        if not self.home.exists(_path(low)):
            low = 0
            if not self.home.exists(_path(low)):
                return None
        stride = 1
        while self.home.exists(_path(low + stride)):
            low += stride
            stride *= 2
        high = low + stride
        while high - low > 1:
            middle = (low + high) // 2
            if self.home.exists(_path(middle)):
                low = middle
            else:
                high = middle
        return low

    def _read_hint(self) -> int:
        try:
            text = self.home.read(_HINT).decode("ascii", errors="replace")
        except StorageError:
            return 0  # missing or unreadable, it costs time, never truth
        return int(text) if text.isdecimal() and len(text) <= 12 else 0  # noqa: PLR2004 - longer is no entry number

    def _write_hint(self, number: int) -> None:
        try:
            self.home.write(_HINT, str(number).encode())
        except StorageError as fault:
            # The entry is committed; a missing hint costs time, never truth.
            _LOGGER.warning("could not write %s: %s", _HINT, fault)


def _path(number: int) -> str:
    return f"log/{number:08d}.json"
