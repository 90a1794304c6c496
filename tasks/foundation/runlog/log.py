"""The log of a run in `log/`: create-only entries, numbered without gaps.

Modelled on Delta Lake's transaction log: optimistic concurrency with put-if-absent, without leases or clocks.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Literal, TypeVar

from tasks.foundation.contracts.log_entry import Body, Commit, Entry, Head, Retire, Totals
from tasks.foundation.errors import BatonError, FileAlreadyThere, FileMissing, FileTooLarge, RunLogError
from tasks.foundation.runlog.completeness import (
    disappeared_log,
    missing_entry,
    require_whole,
    unreadable_entry,
)
from tasks.foundation.runlog.entry_blocks import BLOCK_ENTRIES, entries_of_block
from tasks.foundation.runlog.entry_codec import Decoded, decode, encode
from tasks.foundation.runlog.entry_memory import EntryMemory
from tasks.foundation.runlog.entry_paths import entry_path
from tasks.foundation.runlog.folding import fold
from tasks.foundation.runlog.kept_pages import PageStore
from tasks.foundation.runlog.newest_entry import Hint, last_from
from tasks.foundation.runlog.totals import totals_after, totals_of
from tasks.foundation.runlog.whole_reads import WholeReads
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.transfers import PROCESS_DEADLINE, parallel_map

_READ_TOGETHER = 64

_Read = TypeVar("_Read")
Decide = Callable[[Head | None], Body | None]


class RunLog:
    """The log of the run in `home`.

    It remembers entries, because they never change, and the newest one that it has seen. So a process that keeps its
    log asks the store only for what comes next. Safe to use from several threads.

    Attributes:
        home: the run's.
        whole_reads: the checkpoints that this process has read whole.
        is_swept: whether garbage of earlier attempts is gone, see `checkpoint/retention.py`.
    """

    def __init__(self, home: Storage) -> None:
        self.home = home
        self.whole_reads = WholeReads()
        self._memory = EntryMemory()
        self._pages = PageStore(home)
        self._hint = Hint(home)
        self._totals_unreadable = False
        self.is_swept = False

    def head(self) -> Head | None:
        """Return the folded state of the newest entry; None if there is no run.

        The first call takes a few requests. Later ones take one, and a few more if other writers have appended.
        """
        newest = self.newest()
        return None if newest is None else newest.head

    def newest(self) -> Entry | None:
        """Return the newest entry; None if there is no run. See `head`."""
        newest = self._newest()
        return None if newest is None else newest.entry

    def newest_seen(self) -> Entry | None:
        """Return the newest entry that this log has seen, which costs no request; the first call asks for it."""
        seen = self._memory.newest
        return self.newest() if seen is None else seen.entry

    def head_seen(self) -> Head | None:
        """Return the newest head that this log has seen, which costs no request; the first call asks for it."""
        newest = self.newest_seen()
        return None if newest is None else newest.head

    def totals(self, newest: Entry) -> Totals:
        """Return what the history up to an entry adds up to; reads all entries only if the entry does not say it.

        Raises:
            RunLogError: it has to read the entries, and one is missing or cannot be read.
        """
        return newest.totals or totals_of(list(self.read_all(self.entry, newest.number + 1)))

    def require_head(self) -> Head:
        """Return the head of a log that this process has read before.

        Raises:
            RunLogError: the log no longer exists.
        """
        head = self.head()
        if head is None:
            raise disappeared_log(self.home)
        return head

    def require_still_there(self) -> None:
        """Check that the log has not disappeared since this process read it.

        Raises:
            RunLogError: the newest entry that was seen no longer exists.
        """
        seen = self._memory.newest
        if seen is not None and not self.home.exists(entry_path(seen.entry.number)):
            self._memory.forget()
            raise disappeared_log(self.home)

    def entry(self, number: int) -> Entry:
        """Return one entry; reads it if it is not remembered.

        Raises:
            RunLogError: the entry is missing or cannot be read.
            AnotherVersion: a newer version of Baton wrote it.
        """
        return self._require(number).entry

    def entry_and_size(self, number: int) -> tuple[Entry, int]:
        """Return one entry, and the bytes of its file; see `entry`."""
        found = self._require(number)
        return found.entry, found.size

    def _require(self, number: int) -> Decoded:
        found = self._entry(number)
        if found is None:
            raise missing_entry(f"{self.home.uri}/{entry_path(number)}")
        return found

    def require_whole(self) -> None:
        """Check that no entry is missing; appending to an incomplete log could start a second history.

        Raises:
            RunLogError: an entry is missing, or the whole log of a run that has checkpoints.
        """
        require_whole(self.home)

    def entries(self, *, blocks: Literal["ignored", "read", "written"] = "ignored") -> Iterator[Entry]:
        """Yield all entries, oldest first.

        Args:
            blocks: whether blocks of entries are read, see `entry_blocks.py`, and also written where they are missing.
                What decides anything ignores them.

        Raises:
            RunLogError: an entry is missing or cannot be read.
        """
        self.require_whole()
        newest = self._newest()
        count = 0 if newest is None else newest.entry.number + 1
        in_blocks = 0 if blocks == "ignored" else count // BLOCK_ENTRIES * BLOCK_ENTRIES
        for first in range(0, in_blocks, BLOCK_ENTRIES):
            yield from entries_of_block(
                self.home,
                first,
                decode=lambda data, number: self._decoded(data, number).entry,
                read=lambda first=first: list(self.read_all(self.entry, first + BLOCK_ENTRIES, begin=first)),  # type: ignore[misc]
                write=blocks == "written",
            )
        yield from self.read_all(self.entry, count, begin=in_blocks)

    def read_all(self, read: Callable[[int], _Read], count: int, *, begin: int = 0) -> Iterator[_Read]:
        """Yield `read(number)` for `begin` to `count` - 1, in order, with parallel reads on remote storage."""
        together = 1 if self.home.transfers == 1 else _READ_TOGETHER
        for first in range(begin, count, together):
            numbers = range(first, min(first + together, count))
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
        seen = self._memory.newest
        # A log that was read before need not look for rivals first: if there are any, the create is refused. But only
        # the newest state may say that there is nothing to append.
        is_newest = seen is None
        head = self.head() if seen is None else seen.entry.head
        while True:
            try:
                body = decide(head)
            except BatonError:
                if is_newest:
                    raise
                body = None
            if body is None:
                if is_newest:
                    return None
                head, is_newest = self.head(), True
                continue
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
                entry = self._create(entry)
            except FileAlreadyThere:
                found = self._require(number)
                existing = found.entry
                # The existing entry may be our own: the create succeeded, but its response was lost. Compare the
                # JSON, because a NaN metric is not equal to itself.
                if existing.attempt == attempt and existing.body.to_json() == body.to_json():
                    return self._memory.see(found).entry
                head, is_newest = self.head(), True
                continue
            # Retention follows a commit and writes HINT. Cloud Storage limits writes of one object to one per second.
            if not isinstance(body, Commit | Retire):
                self.write_hint()
            return entry

    def _create(self, entry: Entry) -> Entry:
        """Create the file of an entry, after the entry before it; return the entry as it is read from its file.

        Raises:
            FileAlreadyThere: another writer was first.
            RunLogError: the log has disappeared; the new file would begin another log in its place.
        """
        before = self._require(entry.number - 1) if entry.number else None
        entry = entry.model_copy(update={"totals": self._totals_up_to(entry, None if before is None else before.entry)})
        encoded = encode(entry, before, self._pages)
        for digest, page in encoded.pages.items():
            self._pages.write(digest, page)
        written = self._decoded(encoded.data, entry.number)  # the tip itself may stand in one of these pages
        path = entry_path(entry.number)
        if self.home.transfers == 1:
            self.require_still_there()
            self.home.create(path, encoded.data)
        else:
            # Side by side, because each request to a remote store takes long. If the log has disappeared, the new
            # entry stays: deleting one could never be safe, and without those before it, nobody continues it.
            steps: list[Callable[[], None]] = [lambda: self.home.create(path, encoded.data), self.require_still_there]
            parallel_map(lambda step: step(), steps, workers=len(steps))
        PROCESS_DEADLINE.mark_written()  # its data may lie in a bucket, and the home on a disk
        return self._memory.see(self._memory.keep(written)).entry

    def _totals_up_to(self, entry: Entry, before: Entry | None) -> Totals | None:
        """The totals of a new entry; None if they cannot be had, because no commit fails for them."""
        totals = totals_after(before, entry.body, time=entry.time)
        if totals is not None or self._totals_unreadable:
            return totals
        try:
            return totals_of([*self.read_all(self.entry, entry.number), entry])
        except BatonError:
            self._totals_unreadable = True  # do not read the whole log at each commit; its readers meet the error
            return None

    def _decoded(self, data: bytes, number: int) -> Decoded:
        where = f"{self.home.uri}/{entry_path(number)}"
        return decode(data, where=where, number=number, resolve=self._require, store=self._pages)

    def _entry(self, number: int) -> Decoded | None:
        """Return one entry, from memory or from the store; None if it does not exist."""
        known = self._memory.get(number)
        if known is not None:
            return known
        path = entry_path(number)
        try:
            data = self.home.read(path)
        except FileMissing:
            return None
        except FileTooLarge as error:
            raise RunLogError(str(error)) from error
        try:
            return self._memory.keep(self._decoded(data, number))
        except RunLogError as error:
            if path not in str(error):  # another file, which this entry refers to
                raise
            raise unreadable_entry(self.home, number, error) from error

    def _newest(self) -> Decoded | None:
        seen = self._memory.newest
        if seen is not None:
            try:
                return self._newest_after(seen)
            except FileMissing:  # the log that was read is gone: the disk may no longer be mounted
                self._memory.forget()
        return self._find_newest()

    def _newest_after(self, seen: Decoded) -> Decoded:
        """Return the newest entry; one request if it is still the one that was seen.

        Raises:
            FileMissing: on a local disk, the entry that was seen no longer exists.
        """
        number = seen.entry.number
        if self._entry(number + 1) is None:
            self.home.local_path(entry_path(number))  # costs no request in a remote store
            return seen
        return self._memory.see(self._require(last_from(self.home, number + 1)))

    def _find_newest(self) -> Decoded | None:
        """Read the newest entry: three requests if HINT is correct, and a few more if it is a few entries behind."""
        hint = self._hint.read()
        number = last_from(self.home, hint) if hint > 0 else 0
        found = self._entry(number) if number > 0 else None
        if found is None and self.home.exists(entry_path(0)):  # HINT is missing, or points past the end
            found = self._require(last_from(self.home, 0))
        return None if found is None else self._memory.see(found)

    def write_hint(self, number: int | None = None) -> None:
        """Write the number of the newest entry to HINT, unless this log has done so before. Best effort.

        Args:
            number: of an entry that is appended meanwhile; left out: the newest one that this log has seen.
        """
        seen = self._memory.newest
        if number is None and seen is not None:
            number = seen.entry.number
        if number is not None:
            self._hint.write(number)
