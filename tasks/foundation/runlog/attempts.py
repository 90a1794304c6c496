"""Who has worked on a run: the records below `attempts/`, and which of them still live."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from tasks.foundation.contracts.attempt import AttemptRecord, attempt_path, utc_time
from tasks.foundation.errors import AnotherVersion, RunLogError, StorageError
from tasks.foundation.process import is_gone
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.download import side_by_side

# Three times the longest interval between signs of life: two may be late or lost.
SILENT_AFTER_SECONDS = 90.0
_READERS = 8

Gone = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Attempts:
    """All that can be read."""

    records: tuple[AttemptRecord, ...]  # by when they began
    unreadable: int  # files that are no record, or not of the attempt that they are named for


def read_attempts(home: Storage) -> Attempts:
    """The records of a run. A run without any costs one listing.

    Raises:
        StorageError: the store refuses the listing.
    """
    paths = sorted(home.files("attempts"))
    if not paths:
        return Attempts((), 0)
    # A store far away answers many questions as fast as one.
    found = side_by_side(lambda path: _read(home, path), paths, workers=_READERS)
    records = [record for record in found if record is not None]
    records.sort(key=lambda record: (utc_time(record.began), record.attempt))
    return Attempts(tuple(records), len(found) - len(records))


def is_alive(record: AttemptRecord, *, now: datetime, gone: Gone = is_gone) -> bool:
    """Whether an attempt is still at work, as far as can be told.

    Args:
        record: the attempt.
        now: the time of day, UTC.
        gone: whether the process of a name is known to have ended; see foundation/process.py.
    """
    if record.ended is not None or gone(record.process):
        return False
    # A sign from the future tells of a clock that was set, not of life.
    return abs((now - utc_time(record.alive)).total_seconds()) <= SILENT_AFTER_SECONDS


def _read(home: Storage, path: str) -> AttemptRecord | None:
    try:
        record = AttemptRecord.from_json(home.read(path), where=path, error=RunLogError)
    except (StorageError, RunLogError, AnotherVersion):
        return None
    return record if path == attempt_path(record.attempt) else None
