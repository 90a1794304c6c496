"""From checked examples to shards of equal counts, in an order that the seed decides."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import Storage
from tasks.prepare_data.seeded import positions
from tasks.prepare_data.space import disk_errors, require_scratch_space, require_space

# A block is permuted in memory and becomes so many shards.
_BLOCK_SHARDS = 4


class PartWriter(Protocol):
    """Writes one part of a dataset, `train` or `validation`, as shards of equal counts (the last may be smaller)."""

    def add(self, record: bytes) -> None:
        """Take one example."""

    def finish(self) -> tuple[ShardRecord, ...]:
        """Write what is left; the records of all shards."""


class BlockWriter:
    """For a part of unknown length: each block of four shards is permuted, and written when it is full."""

    def __init__(self, storage: Storage, *, part: str, seed: int, shard_examples: int) -> None:
        """Nothing is written yet.

        Args:
            storage: rooted at the dataset's folder.
            part: `train` or `validation`.
            seed: of the permutations.
            shard_examples: examples in a shard.
        """
        self._storage = storage
        self._part = part
        self._seed = seed
        self._shard_examples = shard_examples
        self._block: list[bytes] = []
        self._blocks = 0
        self._shards: list[ShardRecord] = []

    def add(self, record: bytes) -> None:
        """See `PartWriter`; writes a block of shards now and then."""
        self._block.append(record)
        if len(self._block) == _BLOCK_SHARDS * self._shard_examples:
            self._flush()

    def finish(self) -> tuple[ShardRecord, ...]:
        """See `PartWriter`."""
        self._flush()
        return tuple(self._shards)

    def _flush(self) -> None:
        block, self._block = self._block, []
        order = positions(f"{self._part}/{self._blocks}", self._seed, len(block))
        permuted = [record for _, record in sorted(zip(order, block, strict=True))]
        self._blocks += 1
        for begin in range(0, len(permuted), self._shard_examples):
            name = f"{self._part}-{len(self._shards):05d}.tfrecord"
            chosen = permuted[begin : begin + self._shard_examples]
            self._shards.append(write_shard(self._storage, name, chosen))


def write_shard(storage: Storage, name: str, records: Sequence[bytes]) -> ShardRecord:
    """One TFRecord file, written on this machine and uploaded.

    Args:
        storage: rooted at the dataset's folder.
        name: of the file.
        records: its examples, in order.

    Raises:
        StorageError: there is too little room, or the store has other bytes than were written.
    """
    import tensorflow as tf

    size = sum(map(len, records)) + 16 * len(records)  # each record is framed by 16 bytes
    require_space(storage, size)
    with _temporary_folder(size) as folder:
        file = folder / name
        with disk_errors(folder), tf.io.TFRecordWriter(str(file)) as writer:
            for record in records:
                writer.write(record)
        written = storage.upload(file, name)
        kept = storage.stat(name)
    if kept != written or written.size != size:
        raise StorageError(
            f"{storage.uri}/{name}: {size} bytes were written, the store has {kept.size} with crc32c {kept.crc32c} "
            f"instead of {written.crc32c}; run again"
        )
    return ShardRecord(path=name, examples=len(records), size=written.size, crc32c=written.crc32c)


@contextmanager
def _temporary_folder(size: int) -> Iterator[Path]:
    require_scratch_space(size)
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        yield Path(folder)
