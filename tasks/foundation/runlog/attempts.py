"""The attempts at a run: the records below `attempts/`, and which of them are still alive."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from tasks.foundation.contracts.attempt import AttemptRecord, attempt_path, utc_time
from tasks.foundation.errors import AnotherVersion, FileMissing, RunLogError, StorageError
from tasks.foundation.machine.processes import is_gone
from tasks.foundation.runlog.attempt_packs import is_pack, read_pack
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.transfers import parallel_map

# Three times the longest interval between heartbeats: two may be late or lost.
SILENT_AFTER_SECONDS = 90.0
_READERS = 8

IsGone = Callable[[str], bool]
_Gone = Literal["gone"]
_GONE: _Gone = "gone"


@dataclass(frozen=True, slots=True)
class Attempts:
    """The records of a run.

    Attributes:
        records: all readable records, by start time.
        unreadable: number of files that are not a record, or whose name is not that of their attempt.
        files: paths of the records that are files of their own.
    """

    records: tuple[AttemptRecord, ...]
    unreadable: int
    files: tuple[str, ...] = ()


class AttemptReader:
    """Reads the records of a run. It remembers those of attempts that ended, and reads only the others again."""

    def __init__(self, home: Storage) -> None:
        """Read nothing yet."""
        self._home = home
        self._ended: dict[str, AttemptRecord] = {}
        self._packs: dict[str, tuple[list[AttemptRecord], int]] = {}

    def read(self) -> Attempts:
        """Read the records; for a run without any this is one listing.

        Raises:
            StorageError: the listing fails.
        """
        paths = sorted(self._home.files("attempts"))
        if not paths:
            return Attempts((), 0)
        files = [path for path in paths if not is_pack(path)]
        # Parallel reads hide the latency of remote storage.
        found = parallel_map(self._record, files, workers=_READERS)
        if _GONE in found:  # packed since they were listed, so the pack is in no listing yet
            paths = sorted(self._home.files("attempts"))
        of_packs = parallel_map(self._pack, [path for path in paths if is_pack(path)], workers=_READERS)
        records = [record for record in found if isinstance(record, AttemptRecord)]
        # Seconds of the shut-down may still be added to them; nobody who reads twice needs those.
        self._ended = {attempt_path(record.attempt): record for record in records if record.ended is not None}
        known = {record.attempt: record for packed, _ in of_packs for record in packed}
        known |= {record.attempt: record for record in records}
        in_order = sorted(known.values(), key=lambda record: (utc_time(record.began), record.attempt))
        unreadable = found.count(None) + sum(count for _, count in of_packs)
        return Attempts(tuple(in_order), unreadable, tuple(files))

    def _pack(self, path: str) -> tuple[list[AttemptRecord], int]:
        """The records of a pack, which never changes, and how many cannot be read; an unreadable pack counts as one."""
        if path not in self._packs:
            try:
                found = read_pack(self._home, path)
            except FileMissing:
                return [], 0
            if found is None:
                return [], 1
            self._packs[path] = found
        return self._packs[path]

    def _record(self, path: str) -> "AttemptRecord | _Gone | None":
        return self._ended.get(path) or _read(self._home, path)


def read_attempts(home: Storage) -> Attempts:
    """Read the records of a run once; see `AttemptReader.read`."""
    return AttemptReader(home).read()


def is_alive(record: AttemptRecord, *, now: datetime, gone: IsGone = is_gone) -> bool:
    """Return whether an attempt is still running, as far as its record shows.

    Args:
        record: the record of the attempt.
        now: current time in UTC.
        gone: whether the named process is known to have ended, see `process.is_gone`.
    """
    if record.ended is not None or gone(record.process):
        return False
    # A heartbeat in the future means that a clock was changed, not that the process is alive.
    return abs((now - utc_time(record.alive)).total_seconds()) <= SILENT_AFTER_SECONDS


def _read(home: Storage, path: str) -> "AttemptRecord | _Gone | None":
    try:
        record = AttemptRecord.from_json(home.read(path), where=path, error=RunLogError)
    except FileMissing:  # packed since it was listed
        return _GONE
    except (StorageError, RunLogError, AnotherVersion):
        return None
    return record if path == attempt_path(record.attempt) else None
