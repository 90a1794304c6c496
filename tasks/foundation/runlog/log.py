"""The log of a run in `log/`: create-only entries, numbered without gaps.

Modelled on Delta Lake's transaction log: optimistic concurrency with put-if-absent, without leases or clocks.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from tasks.foundation.contracts.base import is_json
from tasks.foundation.contracts.checkpoint import base_in_folder_name
from tasks.foundation.contracts.log_entry import Body, Entry, Head, Retire
from tasks.foundation.errors import FileAlreadyThere, FileMissing, RunLogError, StorageError
from tasks.foundation.runlog.entry_paths import entry_number, entry_path
from tasks.foundation.runlog.folding import fold
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.parallel import parallel_map

_LOGGER = logging.getLogger(__name__)
# Describes the fork that a home without a log is about to become; see checkpoint/fork.py.
UNFINISHED_FORK = "fork.json"
_HINT = "log/HINT"
_READ_TOGETHER = 64
_HINT_SECONDS = 2.0

_Read = TypeVar("_Read")
Decide = Callable[[Head | None], Body | None]


class RunLog:
    """The log of the run in `home`."""

    def __init__(self, home: Storage) -> None:
        self.home = home

    def head(self) -> Head | None:
        """Return the folded state of the newest entry; None if there is no run."""
        entry = self._newest()
        return None if entry is None else entry.head

    def require_head(self) -> Head:
        """Return the head of a log that this process has read before.

        Raises:
            RunLogError: the log no longer exists.
        """
        head = self.head()
        if head is None:
            raise RunLogError(f"{self.home.uri}: the log has disappeared; check that its disk is still mounted")
        return head

    def entry(self, number: int) -> Entry:
        """Read one entry.

        Raises:
            RunLogError: the entry is missing or cannot be read.
            AnotherVersion: a newer version of Baton wrote it.
        """
        entry = self._entry(number)
        if entry is None:
            raise _missing_entry(f"{self.home.uri}/{entry_path(number)}")
        return entry

    def require_whole(self) -> None:
        """Check that no entry is missing; appending to an incomplete log could start a second history.

        Raises:
            RunLogError: an entry is missing, or the whole log of a run that has checkpoints.
        """
        staged = sorted(self.home.folders("checkpoints"))
        listed = {number for path in self.home.files("log") if (number := entry_number(path)) is not None}
        for number in range(max(listed, default=0)):
            # A listing may lag behind, so check a missing name directly.
            if number not in listed and not self.home.exists(entry_path(number)):
                raise _missing_entry(f"{self.home.uri}/{entry_path(number)}")
        # The origin is written before any checkpoint, so a home with checkpoints but no origin has lost its log.
        # The order matters: a fork in progress writes its origin first, and only then deletes its note.
        lost = staged and not listed and not self._is_unfinished_fork(staged) and not self.home.exists(entry_path(0))
        if lost and any(self.home.folders("checkpoints")):
            raise RunLogError(
                f"{self.home.uri} has checkpoints ({staged[0]}) but no log; restore log/ from a backup, or move the "
                "folder away to start a new run"
            )

    def _is_unfinished_fork(self, staged: Sequence[str]) -> bool:
        """Return whether a fork is in progress: all checkpoints are copies (base 0), and there is no origin yet."""
        return all(base_in_folder_name(folder) == 0 for folder in staged) and self.home.exists(UNFINISHED_FORK)

    def entries(self) -> Iterator[Entry]:
        """Yield all entries, oldest first.

        Raises:
            RunLogError: an entry is missing or cannot be read.
        """
        self.require_whole()
        newest = self._newest()
        yield from self.read_all(self.entry, 0 if newest is None else newest.number + 1)

    def read_all(self, read: Callable[[int], _Read], count: int) -> Iterator[_Read]:
        """Yield `read(number)` for 0 to `count` - 1, in order, with parallel reads on remote storage."""
        for begin in range(0, count, _READ_TOGETHER):
            numbers = range(begin, min(begin + _READ_TOGETHER, count))
            yield from parallel_map(read, numbers, workers=self.home.transfers)

    def append(self, decide: Decide, *, attempt: str) -> Entry | None:
        """Append the entry that `decide` returns for the newest state.

        If another writer appends first, `decide` is called again with the new state, so it sees every state that it
        appends to. It returns None if nothing is left to append, or raises `StaleWriter` if its work is obsolete.
        Nothing is appended after an entry that cannot be read, because the state after it is unknown.

        Args:
            decide: returns the body of the next entry for the newest state.
            attempt: id of the writer, a uuid4 made in this process.

        Returns:
            The entry as it is in the log, or None.

        Raises:
            RunLogError: the newest entry cannot be read.
            AnotherVersion: a newer version of Baton wrote it.
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
                self.home.create(entry_path(number), entry.to_json())
            except FileAlreadyThere:
                existing = self.entry(number)
                # The existing entry may be our own: the create succeeded, but its response was lost. Compare the
                # JSON, because a NaN metric is not equal to itself.
                if existing.attempt == attempt and existing.body.to_json() == body.to_json():
                    return existing
                head = existing.head
                continue
            # A Retire follows right after a commit, and Cloud Storage limits writes of one object to one per second.
            if not isinstance(body, Retire):
                self._write_hint(number)
            return entry

    def _entry(self, number: int) -> Entry | None:
        """Read one entry; None if it does not exist."""
        path = entry_path(number)
        where = f"{self.home.uri}/{path}"
        try:
            data = self.home.read(path)
        except FileMissing:
            return None
        try:
            entry = Entry.from_json(data, where=where, error=RunLogError)
        except RunLogError as error:
            remedy = "restore the file from a backup"
            if is_json(data):  # complete, so another version may be able to read it
                remedy += ", or use the version of Baton that wrote it"
            elif not self.home.exists(entry_path(number + 1)):
                remedy += (
                    "; without a backup, stop all processes of this run and delete the file: only this entry is lost"
                )
            raise RunLogError(f"{error}; {remedy}") from error
        if entry.number != number:
            raise RunLogError(f"{where} has the number {entry.number}; restore the file from a backup")
        return entry

    def _newest(self) -> Entry | None:
        """Read the newest entry: three requests if HINT is correct, five after a retirement, for any length of log."""
        hint = self._read_hint()
        number = self._last_from(hint) if hint > 0 else 0
        entry = self._entry(number) if number > 0 else None
        if entry is not None:
            return entry
        # HINT is missing, or points past the end.
        return self.entry(self._last_from(0)) if self.home.exists(entry_path(0)) else None

    def _last_from(self, low: int) -> int:
        """Return the number of the last entry, probing forward from `low`, which need not exist.

        Entries have no gaps, so an existing entry proves that all before it exist. The number of probes is logarithmic
        in the distance.
        """
        stride = 1
        while self.home.exists(entry_path(low + stride)):
            low += stride
            stride *= 2
        high = low + stride
        while high - low > 1:
            middle = (low + high) // 2
            if self.home.exists(entry_path(middle)):
                low = middle
            else:
                high = middle
        return low

    def _read_hint(self) -> int:
        try:
            text = self.home.with_deadline(_HINT_SECONDS).read(_HINT).decode("ascii", errors="replace")
        except StorageError:
            return 0  # without a hint, finding the newest entry only takes longer
        return int(text) if text.isdecimal() and len(text) <= 12 else 0  # noqa: PLR2004 - longer is not an entry number

    def _write_hint(self, number: int) -> None:
        try:
            self.home.with_deadline(_HINT_SECONDS).write(_HINT, str(number).encode())
        except StorageError as error:
            # The entry is committed; without a hint, finding it only takes longer.
            _LOGGER.warning("could not write %s: %s", _HINT, error)


def _missing_entry(where: str) -> RunLogError:
    return RunLogError(
        f"{where} is missing: the log has lost an entry; restore it from a backup, or check that its disk is still "
        "mounted"
    )
