"""Reading and appending to `log/`: create-only entries, numbered without gaps.

After Delta Lake's transaction log: optimistic concurrency by put-if-absent, no lease and no clock.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from tasks.foundation.contracts.base import is_json
from tasks.foundation.contracts.checkpoint import base_in_folder_name
from tasks.foundation.contracts.log_entry import Body, Entry, Head, Retire
from tasks.foundation.errors import FileAlreadyThere, FileMissing, RunLogError, StorageError
from tasks.foundation.runlog.folding import fold
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.download import side_by_side

_LOGGER = logging.getLogger(__name__)
# What a home without a log is to be a fork of; see forking.py.
UNFINISHED_FORK = "fork.json"
_HINT = "log/HINT"
_READ_TOGETHER = 64
_HINT_SECONDS = 2.0
_ENTRY = re.compile(r"log/(\d{8})\.json")

_Read = TypeVar("_Read")
Decide = Callable[[Head | None], Body | None]


class RunLog:
    """The log of the run whose home is `home`."""

    def __init__(self, home: Storage) -> None:
        self.home = home

    def head(self) -> Head | None:
        """The folded state of the newest entry; None where no run is."""
        entry = self._newest()
        return None if entry is None else entry.head

    def require_head(self) -> Head:
        """The head of a log that this process has seen before.

        Raises:
            RunLogError: there is no log any more.
        """
        head = self.head()
        if head is None:
            raise RunLogError(f"{self.home.uri}: the log was there and is gone; see whether its disk is still mounted")
        return head

    def entry(self, number: int) -> Entry:
        """One entry.

        Raises:
            RunLogError: it is not there, or cannot be read.
            AnotherVersion: a newer Baton wrote it.
        """
        entry = self._entry(number)
        if entry is None:
            raise _lost(f"{self.home.uri}/{_path(number)}")
        return entry

    def require_whole(self) -> None:
        """See that no entry is missing: appending to such a log could put a second history beside the first.

        Raises:
            RunLogError: an entry, or the whole log of a run that has checkpoints, is gone.
        """
        staged = sorted(self.home.folders("checkpoints"))
        listed = {int(match[1]) for path in self.home.files("log") if (match := _ENTRY.fullmatch(path))}
        for number in range(max(listed, default=0)):
            # A listing may be late: what it lacks is asked for by name.
            if number not in listed and not self.home.exists(_path(number)):
                raise _lost(f"{self.home.uri}/{_path(number)}")
        # The origin is the first of all files; so it is there, unless it was lost.
        # Asked in this order: a fork that is made meanwhile writes its origin, and only then deletes its note.
        lost = staged and not listed and not self._is_unfinished_fork(staged) and not self.home.exists(_path(0))
        if lost and any(self.home.folders("checkpoints")):
            raise RunLogError(
                f"{self.home.uri} holds checkpoints ({staged[0]}) but no log; restore log/ from a backup, or move the "
                "folder away to begin anew"
            )

    def _is_unfinished_fork(self, staged: Sequence[str]) -> bool:
        """A fork copies before its origin is written. Nothing was trained there: that has a later base."""
        return all(base_in_folder_name(folder) == 0 for folder in staged) and self.home.exists(UNFINISHED_FORK)

    def entries(self) -> Iterator[Entry]:
        """All entries, oldest first.

        Raises:
            RunLogError: one is not there, or cannot be read.
        """
        self.require_whole()
        newest = self._newest()
        yield from self.read_all(self.entry, 0 if newest is None else newest.number + 1)

    def read_all(self, read: Callable[[int], _Read], count: int) -> Iterator[_Read]:
        """What `read` makes of the numbers 0 to `count` - 1, in order, side by side where the store is far away."""
        for begin in range(0, count, _READ_TOGETHER):
            numbers = range(begin, min(begin + _READ_TOGETHER, count))
            yield from side_by_side(read, numbers, workers=self.home.transfers)

    def append(self, decide: Decide, *, attempt: str) -> Entry | None:
        """Append what `decide` makes of the newest state.

        `decide` is asked again whenever another writer came first, so it sees every state that it appends to. It
        returns None if there is nothing (any more) to say, or raises (`StaleWriter`) if its work is void. Nothing is
        appended to a newest entry that cannot be read: the state after it would be a guess.

        Args:
            decide: from the newest state to the body of the next entry.
            attempt: who writes; a uuid4 of this process.

        Returns:
            The entry as it stands in the log, or None.

        Raises:
            RunLogError: the newest entry cannot be read.
            AnotherVersion: a newer Baton wrote it.
        """
        head = self.head()
        while True:
            body = decide(head)
            if body is None:
                return None
            if head is None:
                self.require_whole()
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
            if not isinstance(body, Retire):
                # Which comes right after a commit, and Cloud Storage takes one write a second of the same object.
                self._write_hint(number)
            return entry

    def _entry(self, number: int) -> Entry | None:
        """One entry; None if it is not there."""
        path = _path(number)
        where = f"{self.home.uri}/{path}"
        try:
            data = self.home.read(path)
        except FileMissing:
            return None
        try:
            entry = Entry.from_json(data, where=where, error=RunLogError)
        except RunLogError as fault:
            remedy = "restore the file from a backup"
            if is_json(data):  # so it was not cut short, and is perhaps sound to another version
                remedy += ", or use the Baton that wrote it"
            elif not self.home.exists(_path(number + 1)):
                remedy += "; without one, delete it while no process of this run lives, and only what it says is lost"
            raise RunLogError(f"{fault}; {remedy}") from fault
        if entry.number != number:
            raise RunLogError(f"{where} calls itself entry {entry.number}; restore the file from a backup")
        return entry

    def _newest(self) -> Entry | None:
        """The newest entry. Three requests where HINT is right, five right after a retirement, however long the log."""
        hint = self._read_hint()
        number = self._last_from(hint) if hint > 0 else 0
        entry = self._entry(number) if number > 0 else None
        if entry is not None:
            return entry
        # No HINT, or one that points past the end.
        return self.entry(self._last_from(0)) if self.home.exists(_path(0)) else None

    def _last_from(self, low: int) -> int:
        """Number of the last entry, by probing forward from `low`, which itself may not be there.

        Entries have no gaps, so what is there tells of all before it; the cost grows with the logarithm of the way.
        """
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
            text = self.home.with_deadline(_HINT_SECONDS).read(_HINT).decode("ascii", errors="replace")
        except StorageError:
            return 0  # missing or unreadable, it costs time, never truth
        return int(text) if text.isdecimal() and len(text) <= 12 else 0  # noqa: PLR2004 - longer is no entry number

    def _write_hint(self, number: int) -> None:
        try:
            self.home.with_deadline(_HINT_SECONDS).write(_HINT, str(number).encode())
        except StorageError as fault:
            # The entry is committed; a missing hint costs time, never truth.
            _LOGGER.warning("could not write %s: %s", _HINT, fault)


def _lost(where: str) -> RunLogError:
    return RunLogError(
        f"{where} is not there; the log has lost an entry, restore it from a backup, or see whether its disk is still "
        "mounted"
    )


def _path(number: int) -> str:
    return f"log/{number:08d}.json"
