"""Old records of attempts, many in one file, so that a run that goes on for weeks does not read each of them again.

`attempts/closed/<digest>.json` holds the bytes of records whose attempts are over, and never changes. It is written
before the records that it holds are deleted, so a crash leaves both, and nothing is lost. A record outside of it counts
more: a process that wakes up after days writes its own again.
"""

import hashlib
import logging
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, Literal

from tasks.foundation.contracts.attempt import AttemptRecord, attempt_path, utc_time
from tasks.foundation.contracts.base import Contract
from tasks.foundation.errors import FileAlreadyThere, FileMissing, RunLogError, StorageError
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.best_effort_delete import discard
from tasks.foundation.storage.parallel import parallel_map

_LOGGER = logging.getLogger(__name__)
_FOLDER: Final = "attempts/closed/"
# Nobody writes to a record any more after this time, unless a process slept for it.
_CLOSED_AFTER: Final = timedelta(days=1)
# Fewer are not worth a file.
_LEAST_RECORDS: Final = 64


class AttemptPack(Contract):
    """Records of attempts that are over."""

    schema_version: Literal[1] = 1
    records: tuple[str, ...]  # as they were in their files, also what a newer version has added


def is_pack(path: str) -> bool:
    """Whether a file below `attempts/` is a pack."""
    return path.startswith(_FOLDER)


def read_pack(home: Storage, path: str) -> list[AttemptRecord] | None:
    """Return the records of a pack; None if it cannot be read.

    Raises:
        FileMissing: it is not there.
    """
    try:
        data = home.read(path)
        if path != _path(data):
            return None
        pack = AttemptPack.from_json(data, where=path, error=RunLogError)
        return [AttemptRecord.from_json(text.encode(), where=path, error=RunLogError) for text in pack.records]
    except FileMissing:
        raise
    except (StorageError, RunLogError):
        return None


def pack_beside(home: Storage, records: Sequence[AttemptRecord], loose: Sequence[str], *, now: datetime) -> None:
    """Pack old records in another thread, if there are enough of them. Best effort; a later process tries again.

    Args:
        home: the run's.
        records: of the run.
        loose: paths of the records that are files of their own.
        now: current time in UTC.
    """
    paths = packable(records, loose, now=now)
    if paths:
        threading.Thread(target=pack, args=(home, paths), name="baton-attempt-packs", daemon=True).start()


def packable(records: Sequence[AttemptRecord], loose: Sequence[str], *, now: datetime) -> list[str]:
    """Return the paths of the records to pack; none if they are few."""
    files = set(loose)
    old = [attempt_path(record.attempt) for record in records if now - utc_time(record.alive) > _CLOSED_AFTER]
    paths = [path for path in old if path in files]
    return paths if len(paths) >= _LEAST_RECORDS else []


def pack(home: Storage, paths: Sequence[str]) -> None:
    """Write one pack of these records, and delete their files."""
    try:
        texts = [data.decode() for data in parallel_map(home.read, paths, workers=home.transfers)]
        data = AttemptPack(records=tuple(texts)).to_json()
        try:
            home.create(_path(data), data)
        except FileAlreadyThere:
            if home.read(_path(data)) != data:
                return
    except (StorageError, UnicodeDecodeError) as fault:  # another process may be packing them
        _LOGGER.debug("%s: records of attempts are not packed: %s", home.uri, fault)
        return
    for path in paths:
        discard(home, path)


def _path(data: bytes) -> str:
    return f"{_FOLDER}{hashlib.sha256(data).hexdigest()[:32]}.json"
