"""Shards are compared with the manifest before TensorFlow sees them; those that lie elsewhere are fetched ahead."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.foundation.dataset.cache import Hold, Piece, disk_is_full
from tasks.foundation.dataset.manifest import REMEDY
from tasks.foundation.dataset.reading_errors import kept_failures
from tasks.foundation.dataset.shard_location import located
from tasks.foundation.dataset.shared_cache import shared_cache
from tasks.foundation.errors import BatonError, DamagedDataset, FileMissing, FileTooShort, StorageError
from tasks.foundation.storage.base import Storage, Stored
from tasks.foundation.storage.checksum import checksum_file
from tasks.foundation.storage.transit_damage import damaged_in_transit, require_damage_in_store

_T = TypeVar("_T")

# Files that this process has read: path -> (what they agreed with, when they were last written).
_VERIFIED: dict[Path, tuple[str, int]] = {}
_LOCK = threading.Lock()


class VerifiedShards:
    """Opens verified shards, and keeps those of the last two plans on this machine.

    TensorFlow asks for the next plan only when it has read the one before, so two are enough. A whole file of this
    machine is used where it is; all else comes through the cache of this process.
    """

    def __init__(self, storage: Storage, *, plans_ahead: int = 1) -> None:
        """Nothing is read yet.

        Args:
            storage: rooted at the dataset's folder.
            plans_ahead: how many plans are fetched while TensorFlow works on one, as far as there is room.
        """
        self._storage = storage
        self._plans_ahead = plans_ahead
        self._used: deque[Hold | None] = deque()
        self._ahead: dict[tuple[Piece, ...], Hold] = {}

    def __enter__(self) -> "VerifiedShards":
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go(0)
        while self._ahead:
            self._ahead.popitem()[1].release()

    def read_ahead(
        self, plans: Iterable[tuple[Sequence[ShardRecord], _T]]
    ) -> Iterator[tuple[list[str], Sequence[ShardRecord], _T]]:
        """`open` for one plan after the other, while those that come next are fetched.

        Args:
            plans: the shards of each, and whatever goes with them; may be without end, and is looked at ahead.

        Returns:
            For each plan the local paths of its shards, the shards, and what goes with them.
        """
        rest = iter(plans)
        coming = deque(islice(rest, 1 + self._plans_ahead))
        while coming:
            records, plan = coming.popleft()
            yield self.open(records, then=[later for later, _ in coming]), records, plan
            coming.extend(islice(rest, 1))

    def open(self, records: Sequence[ShardRecord], then: Sequence[Sequence[ShardRecord]] = ()) -> list[str]:
        """Local paths of shards, once they agree with the manifest; those of the plan before the last are let go.

        Args:
            records: shards of one plan.
            then: those of the plans that will be asked for next. What goes wrong with them is said then.

        Raises:
            DamagedDataset: one is missing or differs from the manifest.
            StorageError: the store failed, or there is not room for the shards of one plan.
        """
        with kept_failures():
            self._let_go(1)
            places = [self._place(record) for record in records]
            fetched = iter(self._fetched(tuple(place for place in places if isinstance(place, Piece)), then))
            paths = []
            for place, record in zip(places, records, strict=True):
                if isinstance(place, Piece):
                    paths.append(str(next(fetched)))
                else:
                    verify(place, record, where=str(place))
                    paths.append(str(place))
        return paths

    def _let_go(self, plans: int) -> None:
        while len(self._used) > plans:
            if (hold := self._used.popleft()) is not None:
                hold.release()

    def _place(self, record: ShardRecord) -> Path | Piece:
        """Where a shard lies on this machine, or what is to be fetched."""
        storage, name = located(self._storage, record)
        try:
            file = storage.local_path(name)
        except FileMissing as fault:
            raise _missing(f"{storage.uri}/{name}", record) from fault
        # The first range of a file elsewhere begins where the file does.
        if file is not None and not record.begin and (not record.is_elsewhere or file.stat().st_size == record.size):
            return file
        return Piece(
            address=f"{storage.uri}/{name}",
            begin=record.begin,
            size=record.size,
            crc32c=record.crc32c,
            fetch=partial(_fetch, storage, name, record),
            transfers=storage.transfers,
        )

    def _fetched(self, pieces: tuple[Piece, ...], then: Sequence[Sequence[ShardRecord]]) -> list[Path]:
        """The files of pieces; those of the plans to come are asked for meanwhile."""
        if not pieces:
            self._used.append(None)
            self._look_ahead(then)
            return []
        ahead = self._ahead.pop(pieces, None)
        self._used.append(ahead or shared_cache().hold(pieces))
        self._look_ahead(then)
        try:
            return self._held()
        except StorageError as fault:
            if ahead is None or not disk_is_full(fault):
                raise
        # When it was read ahead, the plan before the last was in its way, which has been let go since.
        ahead.release()
        self._used[-1] = shared_cache().hold(pieces)
        return self._held()

    def _held(self) -> list[Path]:
        hold = self._used[-1]
        return [] if hold is None else hold.files()

    def _look_ahead(self, plans: Sequence[Sequence[ShardRecord]]) -> None:
        for records in plans:
            try:
                pieces = tuple(place for place in map(self._place, records) if isinstance(place, Piece))
                if not pieces or pieces in self._ahead:
                    continue
                hold = shared_cache().hold_ahead(pieces)
            except BatonError:
                return  # raised when that plan is asked for
            if hold is None:
                return  # what comes still later must not take the room
            self._ahead[pieces] = hold


def verify(file: Path, record: ShardRecord, *, where: str) -> None:
    """Compare a shard's size and checksum with the manifest; once in a process for each file and content.

    Args:
        file: the shard on this machine.
        record: what the manifest says of it.
        where: its address, for the message.

    Raises:
        DamagedDataset: they differ.
    """
    stamp = (f"{record.size}-{record.crc32c}", file.stat().st_mtime_ns)
    with _LOCK:
        if _VERIFIED.get(file) == stamp:
            return
    found = checksum_file(file)
    if not _agrees(found, record):
        raise _damaged(where, found, record)
    with _LOCK:
        _VERIFIED[file] = stamp


def _fetch(storage: Storage, name: str, record: ShardRecord, target: Path) -> None:
    """Download a shard, and once more if other bytes arrived than the manifest says.

    Raises:
        DamagedDataset: it is missing, or differs from the manifest.
        StorageError: the store, or the local disk, refused or failed.
    """
    where = f"{storage.uri}/{name}"
    # Of a shard that Baton wrote all is fetched, so that one that is too short or too long is told as damage.
    size = record.size if record.is_elsewhere else None
    try:
        found = storage.download(name, target, begin=record.begin, size=size)
        if not _agrees(found, record):
            first, found = found, storage.download(name, target, begin=record.begin, size=size)
            if first != found and not _agrees(found, record):
                raise damaged_in_transit(where)
    except FileMissing as fault:
        raise _missing(where, record) from fault
    except FileTooShort as fault:
        raise DamagedDataset(f"{fault}; {_remedy(record)}") from fault
    if not _agrees(found, record):
        _require_damage_in_store(storage, name, record)
        raise _damaged(where, found, record)


def _require_damage_in_store(storage: Storage, name: str, record: ShardRecord) -> None:
    if not record.is_elsewhere:  # of a part of a file the store knows no checksum
        with suppress(FileMissing):
            require_damage_in_store(storage, name, Stored(size=record.size, crc32c=record.crc32c))


def _agrees(found: Stored, record: ShardRecord) -> bool:
    return (found.size, found.crc32c) == (record.size, record.crc32c)


def _missing(where: str, record: ShardRecord) -> DamagedDataset:
    return DamagedDataset(f"{where} is not there; {_remedy(record)}")


def _damaged(where: str, found: Stored, record: ShardRecord) -> DamagedDataset:
    return DamagedDataset(
        f"{where}: has {found.size} bytes with crc32c {found.crc32c}, its manifest says {record.size} bytes with "
        f"{record.crc32c}; {_remedy(record)}"
    )


def _remedy(record: ShardRecord) -> str:
    # Nobody shall delete the folder of files that Baton did not write.
    return "bring that file back as it was, or begin a new run" if record.is_elsewhere else REMEDY
