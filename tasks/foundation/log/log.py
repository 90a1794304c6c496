"""The log of a run in `log/`: create-only entries, numbered without gaps.

Modelled on Delta Lake's transaction log: optimistic concurrency with put-if-absent, without leases or clocks. Entries
never change, so a process reads none twice: it remembers those that it used last, and asks only for what comes next.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Literal, TypeVar

from baton.tasks.foundation.contracts.log_entry import Body, Commit, Entry, Head, Retire, StoredEntry, Totals
from baton.tasks.foundation.errors import BatonError, FileAlreadyThere, FileMissing, FileTooLarge, RunLogError
from baton.tasks.foundation.log.files import (
    BLOCK_ENTRIES,
    Decoded,
    Hint,
    decode,
    disappeared_log,
    encode,
    entries_of_block,
    entry_path,
    last_from,
    missing_entry,
    require_whole,
    stored_entry,
    unreadable_entry,
)
from baton.tasks.foundation.log.fold import fold, totals_after, totals_of
from baton.tasks.foundation.storage.interface import Storage, best_effort
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE, parallel_map

_REMEMBERED = 512
_REMEMBERED_BYTES = 32 << 20  # of their files


class EntryMemory:
    """The entries that were used last, and the newest one that was found. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, Decoded] = OrderedDict()
        self._bytes = 0
        self.newest: Decoded | None = None

    def get(self, number: int) -> Decoded | None:
        """Return an entry; None if it is not remembered."""
        with self._lock:
            known = self._entries.get(number)
            if known is not None:
                self._entries.move_to_end(number)
            return known

    def keep(self, one: Decoded) -> Decoded:
        """Keep an entry; return the one that is kept."""
        number = one.entry.number
        with self._lock:
            if number not in self._entries:
                self._entries[number] = one
                self._bytes += one.size
            one = self._entries[number]
            self._entries.move_to_end(number)
            while len(self._entries) > _REMEMBERED or (self._bytes > _REMEMBERED_BYTES and len(self._entries) > 1):
                self._bytes -= self._entries.popitem(last=False)[1].size
            return one

    def see(self, newest: Decoded) -> Decoded:
        """Keep the newest entry that was found."""
        with self._lock:
            if self.newest is None or newest.entry.number > self.newest.entry.number:
                self.newest = newest
            return newest

    def forget(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0
            self.newest = None


_READ_TOGETHER = 64

_Read = TypeVar("_Read")
Decide = Callable[[Head | None], Body | None]


class RunLog:
    """The log of the run in `home`.

    It remembers entries, because they never change, and the newest one that it has seen. So a process that keeps its
    log asks the store only for what comes next. Safe to use from several threads.

    Attributes:
        home: the run's.
        is_swept: whether garbage of earlier attempts is gone, see `checkpoint/retention.py`.
    """

    def __init__(self, home: Storage) -> None:
        self.home = home
        self._read_whole: set[str] = set()
        self._memory = EntryMemory()
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

    def note_read(self, path: str) -> None:
        """Note that this process has read a committed checkpoint whole, and every byte is as it was written."""
        self._read_whole.add(path)

    def reads_to_log(self, head: Head, also: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the retained checkpoints that this process has read whole, and that the head does not say it of.

        Reading back what is being written does not count: the bytes that come back may be those of a cache.

        Args:
            also: what another process has read.
        """
        read = self._read_whole.union(also)
        return tuple(each.ref.path for each in head.checkpoints if not each.read and each.ref.path in read)

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

    def entry_and_size(self, number: int) -> tuple[Entry | StoredEntry, int]:
        """Return one entry, and the bytes of its file; see `entry`.

        If the entry that it names for its identity or environment cannot be read, only what its file says.
        """
        try:
            found = self._require(number)
        except RunLogError as fault:
            if entry_path(number) in str(fault):
                raise
            stored = self._stored(number)
            if stored is None:
                raise
            return stored, self.home.stat(entry_path(number)).size
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
            blocks: whether blocks of entries are read, see `files.py`, and also written where they are missing.

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
        before = self.entry(entry.number - 1) if entry.number else None
        data = encode(entry.model_copy(update={"totals": self._totals_up_to(entry, before)}))
        written = self._decoded(data, entry.number)
        path = entry_path(entry.number)
        if self.home.transfers == 1:
            self.require_still_there()
            self.home.create(path, data)
        else:
            # Side by side, because each request to a remote store takes long. If the log has disappeared, the new
            # entry stays: deleting one could never be safe, and without those before it, nobody continues it.
            steps: list[Callable[[], None]] = [lambda: self.home.create(path, data), self.require_still_there]
            parallel_map(lambda step: step(), steps, workers=len(steps))
        PROCESS_DEADLINE.mark_written()  # its data may lie in a bucket, and the home on a disk
        return self._memory.see(self._memory.keep(written)).entry

    def _totals_up_to(self, entry: Entry, before: Entry | None) -> Totals | None:
        """The totals of a new entry; None if they cannot be had, because no commit fails for them."""
        totals = totals_after(before, entry.body, time=entry.time)
        if totals is not None or self._totals_unreadable:
            return totals
        with best_effort(
            self.home, "the totals of the run could not be added up", then="baton status and others read the whole log"
        ):
            return totals_of([*self.read_all(self.entry, entry.number), entry])
        self._totals_unreadable = True  # do not read the whole log at each commit; its readers meet the error
        return None

    def _decoded(self, data: bytes, number: int) -> Decoded:
        where = f"{self.home.uri}/{entry_path(number)}"
        return decode(data, where=where, number=number, resolve=self._require)

    def _entry(self, number: int) -> Decoded | None:
        """Return one entry, from memory or from the store; None if it does not exist."""
        known = self._memory.get(number)
        if known is None:
            found = self._read_file(number, self._decoded)
            known = None if found is None else self._memory.keep(found)
        return known

    def _stored(self, number: int) -> StoredEntry | None:
        where = f"{self.home.uri}/{entry_path(number)}"
        return self._read_file(number, lambda data, _: stored_entry(data, where=where, number=number))

    def _read_file(self, number: int, parse: Callable[[bytes, int], _Read]) -> _Read | None:
        """Parse the file of an entry; None if it does not exist."""
        path = entry_path(number)
        try:
            data = self.home.read(path)
        except FileMissing:
            return None
        except FileTooLarge as error:
            raise RunLogError(str(error)) from error
        try:
            return parse(data, number)
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
        found = self._find(self._entry)
        return None if found is None else self._memory.see(found)

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

    def newest_stored(self) -> StoredEntry | None:
        """Return what the file of the newest entry says, for lists of many runs; None if there is no run.

        The entry that has its identity is not read. This remembers nothing.
        """
        return self._find(self._stored)

    def _find(self, read: Callable[[int], _Read | None]) -> _Read | None:
        """Read the newest entry: three requests if HINT is correct, and a few more if it is a few entries behind."""
        hint = self._hint.read()
        number = last_from(self.home, hint) if hint > 0 else 0
        found = read(number) if number > 0 else None
        if found is None and self.home.exists(entry_path(0)):  # HINT is missing, or points past the end
            number = last_from(self.home, 0)
            found = read(number)
            if found is None:
                raise missing_entry(f"{self.home.uri}/{entry_path(number)}")
        return found

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
