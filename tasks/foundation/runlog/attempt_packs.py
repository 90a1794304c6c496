"""Old records of attempts, many in one file, so that a run that goes on for weeks does not read each of them again.

`attempts/closed/<digest>.json` holds the bytes of records whose attempts are over, and never changes. It is written
before the records that it holds are deleted, so a crash leaves both, and nothing is lost. A record outside of it counts
more: a process that wakes up after days writes its own again.
"""

import hashlib
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final, Literal

from tasks.foundation.contracts.attempt import AttemptRecord, attempt_path, utc_time
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.home_files import most_bytes
from tasks.foundation.errors import AnotherVersion, FileAlreadyThere, FileMissing, RunLogError, StorageError
from tasks.foundation.storage.base import Storage, discard
from tasks.foundation.storage.transfers import parallel_map

_LOGGER = logging.getLogger(__name__)
_FOLDER: Final = "attempts/closed/"
# Nobody writes to a record any more after this time, unless a process slept for it.
_CLOSED_AFTER: Final = timedelta(days=1)
# Fewer are not worth a file. Of 10,000 records, about 100 packs and 100 files are left.
_LEAST_RECORDS: Final = 100
# More are packed by the next process, so that the first one in an old home does not work for long.
_MOST_RECORDS: Final = 1000
# A line of JSON becomes a text in JSON, where quotes and line ends take twice the bytes.
_JSON_IN_JSON: Final = 2


class AttemptPack(Contract):
    """Records of attempts that are over."""

    format: Literal[1] = 1
    records: tuple[str, ...]  # as they were in their files, also what a newer version has added


def is_pack(path: str) -> bool:
    """Whether a file below `attempts/` is a pack."""
    return path.startswith(_FOLDER)


def read_pack(home: Storage, path: str) -> tuple[list[AttemptRecord], int] | None:
    """Return the records of a pack, and how many of them cannot be read; None if the pack cannot be read.

    Raises:
        FileMissing: it is not there.
    """
    texts = _texts(home, path)
    if texts is None:
        return None
    records = []
    for text in texts:
        with suppress(RunLogError, AnotherVersion):
            records.append(AttemptRecord.from_json(text.encode(), where=path, error=RunLogError))
    return records, len(texts) - len(records)


def _texts(home: Storage, path: str) -> tuple[str, ...] | None:
    """The records of a pack as they were in their files; None if the pack cannot be read."""
    try:
        data = home.read(path)
        if path != _path(data):
            return None
        return AttemptPack.from_json(data, where=path, error=RunLogError).records
    except FileMissing:
        raise
    except (StorageError, RunLogError, AnotherVersion):
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
    return paths[:_MOST_RECORDS] if len(paths) >= _LEAST_RECORDS else []


def pack(home: Storage, paths: Sequence[str]) -> None:
    """Write one pack of these records, except those that are in a pack already, and delete their files."""
    try:
        texts = _texts_of_one_pack(parallel_map(home.read, paths, workers=home.transfers))
        paths = paths[: len(texts)]
        # A process that died between the two steps has left both.
        known = {text for path in home.files("attempts") if is_pack(path) for text in _texts(home, path) or ()}
        new = tuple(text for text in texts if text not in known)
        if new:
            data = AttemptPack(records=new).to_json()
            with suppress(FileAlreadyThere):
                home.create(_path(data), data)
            if home.read(_path(data)) != data:
                return
    except (StorageError, UnicodeDecodeError) as fault:  # another process may be packing them
        _LOGGER.debug("%s: records of attempts are not packed: %s", home.uri, fault)
        return
    parallel_map(lambda path: discard(home, path), paths, workers=home.transfers)


def _texts_of_one_pack(records: Sequence[bytes]) -> list[str]:
    """The first records, as many as fit into a pack; the next process packs the others."""
    room, texts = most_bytes(f"{_FOLDER}x.json") // _JSON_IN_JSON, []
    for data in records:
        room -= len(data)
        if room < 0:
            break
        texts.append(data.decode())
    return texts


def _path(data: bytes) -> str:
    return f"{_FOLDER}{hashlib.sha256(data).hexdigest()[:32]}.json"
