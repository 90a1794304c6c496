"""Verifies shards against the manifest before TensorFlow reads them, and downloads remote shards ahead.

TensorFlow asks for a shard in the middle of its pipeline and wraps what that raises in an error of its own;
`original_read_errors` gives Baton's error back.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.foundation.dataset.cache import FileRange, Pin, disk_is_full, shared_cache
from tasks.foundation.dataset.content_digest import REMEDY, locate_shard
from tasks.foundation.errors import BatonError, DamagedDataset, FileMissing, StorageError
from tasks.foundation.storage.base import FileStat, Storage
from tasks.foundation.storage.transfers import checksum_file, damage_of

# TensorFlow keeps only the text of an error that a Python generator raised. It reads in its own threads, so the
# errors are kept here, one list for the process.
_KEPT: deque[BatonError] = deque(maxlen=16)


@contextmanager
def remember_read_errors() -> Iterator[None]:
    """Use around code that runs inside a tf.data generator: keeps the error for `original_read_errors`."""
    try:
        yield
    except BatonError as fault:
        _KEPT.append(fault)
        raise


@contextmanager
def original_read_errors() -> Iterator[None]:
    """Use around iteration over a dataset of `reader`.

    Raises:
        BatonError: the error that made reading fail, such as DamagedDataset, in place of TensorFlow's error.
    """
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as fault:
        text = str(fault)
        for kept in reversed(_KEPT):
            if str(kept) in text:
                raise kept from fault
        # The shard matched the manifest when it was opened, but changed since.
        if isinstance(fault, tf.errors.DataLossError):
            raise DamagedDataset(f"a shard changed while it was being read: {fault.message}") from fault
        raise


_T = TypeVar("_T")

# Files that this process has verified: path -> (size and checksum, modification time). Shared by all readers of the
# process, so that each epoch does not read every file twice.
_VERIFIED: dict[Path, tuple[str, int]] = {}
_LOCK = threading.Lock()


class VerifiedShards:
    """Opens verified shards, and keeps those of the last two plans on this machine.

    Two plans are enough: TensorFlow asks for the next plan only after it has read the current one. A complete local
    file is used in place; everything else comes through the cache of the process.
    """

    def __init__(self, storage: Storage, *, plans_ahead: int = 1) -> None:
        """Create a reader; nothing is read yet.

        Args:
            storage: store rooted at the dataset's folder.
            plans_ahead: plans to download while TensorFlow reads the current one, if there is room.
        """
        self._storage = storage
        self._plans_ahead = plans_ahead
        self._used: deque[Pin | None] = deque()
        self._ahead: dict[tuple[FileRange, ...], Pin] = {}

    def __enter__(self) -> "VerifiedShards":
        return self

    def __exit__(self, *_: object) -> None:
        self._release_old(0)
        while self._ahead:
            self._ahead.popitem()[1].release()

    def read_ahead(
        self, plans: Iterable[tuple[Sequence[ShardRecord], _T]]
    ) -> Iterator[tuple[list[str], Sequence[ShardRecord], _T]]:
        """Call `open` for each plan, while the shards of the next plans are downloaded.

        Args:
            plans: the shards of each plan, with any value; may be infinite, and is consumed ahead.

        Returns:
            For each plan: the local paths of its shards, the shards, and the value.
        """
        rest = iter(plans)
        coming = deque(islice(rest, 1 + self._plans_ahead))
        while coming:
            records, plan = coming.popleft()
            yield self.open(records, upcoming=[later for later, _ in coming]), records, plan
            coming.extend(islice(rest, 1))

    def open(self, records: Sequence[ShardRecord], upcoming: Sequence[Sequence[ShardRecord]] = ()) -> list[str]:
        """Return local paths of verified shards, and release those of the plan before the last.

        Args:
            records: shards of one plan.
            upcoming: shards of the next plans. Errors with these are raised when they are opened.

        Raises:
            DamagedDataset: a shard is missing or differs from the manifest.
            StorageError: the store failed, or the shards of one plan do not fit.
        """
        with remember_read_errors():
            self._release_old(1)
            locations = [self._locate(record) for record in records]
            ranges = tuple(location for location in locations if isinstance(location, FileRange))
            fetched = iter(self._local_files(ranges, upcoming))
            paths = []
            for location, record in zip(locations, records, strict=True):
                if isinstance(location, FileRange):
                    paths.append(str(next(fetched)))
                else:
                    verify(location, record, where=str(location))
                    paths.append(str(location))
        return paths

    def _release_old(self, plans: int) -> None:
        while len(self._used) > plans:
            if (pin := self._used.popleft()) is not None:
                pin.release()

    def _locate(self, record: ShardRecord) -> Path | FileRange:
        """Return the shard's local file, or the range to download."""
        storage, name = locate_shard(self._storage, record)
        try:
            file = storage.local_path(name)
        except FileMissing as fault:
            raise _missing(f"{storage.uri}/{name}", record) from fault
        # A range at offset 0 is a complete file only if the sizes agree.
        if file is not None and not record.begin and (not record.is_external or file.stat().st_size == record.size):
            return file
        return FileRange(
            address=f"{storage.uri}/{name}",
            begin=record.begin,
            size=record.size,
            crc32c=record.crc32c,
            fetch=partial(_fetch, storage, name, record),
            transfers=storage.transfers,
        )

    def _local_files(self, ranges: tuple[FileRange, ...], upcoming: Sequence[Sequence[ShardRecord]]) -> list[Path]:
        """Return the local files of ranges; ranges of the next plans are requested meanwhile."""
        if not ranges:
            self._used.append(None)
            self._prefetch(upcoming)
            return []
        ahead = self._ahead.pop(ranges, None)
        self._used.append(ahead or shared_cache().pin(ranges))
        self._prefetch(upcoming)
        try:
            return self._files_in_use()
        except StorageError as fault:
            if ahead is None or not disk_is_full(fault):
                raise
        # The disk was full when this was read ahead; the plan before the last has been released since.
        ahead.release()
        self._used[-1] = shared_cache().pin(ranges)
        return self._files_in_use()

    def _files_in_use(self) -> list[Path]:
        pin = self._used[-1]
        return [] if pin is None else pin.files()

    def _prefetch(self, plans: Sequence[Sequence[ShardRecord]]) -> None:
        for records in plans:
            try:
                ranges = tuple(location for location in map(self._locate, records) if isinstance(location, FileRange))
                if not ranges or ranges in self._ahead:
                    continue
                pin = shared_cache().prefetch(ranges)
            except BatonError:
                return  # raised when that plan is opened
            if pin is None:
                return  # later plans must not take the room
            self._ahead[ranges] = pin


def verify(file: Path, record: ShardRecord, *, where: str) -> None:
    """Compare a shard's size and checksum with the manifest, once per process for each file and content.

    Args:
        file: the local shard.
        record: the manifest's entry for it.
        where: its address, for messages.

    Raises:
        DamagedDataset: the shard differs from the manifest.
    """
    stamp = (f"{record.size}-{record.crc32c}", file.stat().st_mtime_ns)
    with _LOCK:
        if _VERIFIED.get(file) == stamp:
            return
    size = file.stat().st_size
    if size != record.size:  # known without reading, however large the file is
        raise DamagedDataset(f"{where} has {size} bytes, its manifest says {record.size}; {_remedy(record)}")
    found = checksum_file(file)
    if not _agrees(found, record):
        raise _damaged(where, found, record)
    with _LOCK:
        _VERIFIED[file] = stamp


def _fetch(storage: Storage, name: str, record: ShardRecord, target: Path) -> None:
    """Download a shard; download it once more if the bytes differ from the manifest.

    Raises:
        DamagedDataset: the shard is missing, or differs from the manifest.
        StorageError: the store or the local disk failed.
    """
    # A shard that Baton wrote is fetched whole, so that one of another length counts as damaged.
    size, end = (record.size, record.begin + record.size) if record.is_external else (None, None)
    expected = FileStat(size=record.size, crc32c=record.crc32c)
    damage = damage_of(
        storage, name, expected, lambda: storage.download(name, target, begin=record.begin, size=size), part_end=end
    )
    if damage is not None:
        raise DamagedDataset(f"{damage}; {_remedy(record)}")


def _agrees(found: FileStat, record: ShardRecord) -> bool:
    return (found.size, found.crc32c) == (record.size, record.crc32c)


def _missing(where: str, record: ShardRecord) -> DamagedDataset:
    return DamagedDataset(f"{where} is missing; {_remedy(record)}")


def _damaged(where: str, found: FileStat, record: ShardRecord) -> DamagedDataset:
    return DamagedDataset(
        f"{where} has {found.size} bytes and crc32c {found.crc32c}, its manifest says {record.size} and "
        f"{record.crc32c}; {_remedy(record)}"
    )


def _remedy(record: ShardRecord) -> str:
    # Never advise deleting a folder with files that Baton did not write.
    return "restore the original file, or start a new run" if record.is_external else REMEDY
