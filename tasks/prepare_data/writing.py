"""From checked examples to shards: seeded permutation in blocks, equal counts, one temporary file at a time."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import Storage
from tasks.prepare_data.seeded import permutation
from tasks.prepare_data.space import disk_errors, require_local_space, require_space

# A block is permuted in memory and becomes so many shards.
_BLOCK_SHARDS = 4


class PartWriter:
    """Writes one part of a dataset, `train` or `validation`, as shards of equal counts (the last may be smaller)."""

    def __init__(self, storage: Storage, *, part: str, seed: int, shard_examples: int, examples: int | None) -> None:
        """Nothing is written yet.

        Args:
            storage: rooted at the dataset's folder.
            part: `train` or `validation`.
            seed: of the permutation.
            shard_examples: examples in a shard.
            examples: in the whole part, where known; then the shards' names tell their number.
        """
        self._storage = storage
        self._part = part
        self._seed = seed
        self._shard_examples = shard_examples
        self._of = "" if examples is None else f"-of-{-(-examples // shard_examples):05d}"
        self._block: list[bytes] = []
        self._blocks = 0
        self._shards: list[ShardRecord] = []

    def add(self, record: bytes) -> None:
        """Take one example; writes a block of shards now and then."""
        self._block.append(record)
        if len(self._block) == _BLOCK_SHARDS * self._shard_examples:
            self._flush()

    def finish(self) -> tuple[ShardRecord, ...]:
        """Write what is left; the records of all shards."""
        self._flush()
        return tuple(self._shards)

    def _flush(self) -> None:
        block, self._block = self._block, []
        order = permutation(f"{self._part}/{self._blocks}", self._seed, len(block))
        self._blocks += 1
        for begin in range(0, len(order), self._shard_examples):
            chosen = order[begin : begin + self._shard_examples]
            name = f"{self._part}-{len(self._shards):05d}{self._of}.tfrecord"
            self._shards.append(_write_shard(self._storage, name, [block[index] for index in chosen]))


def _write_shard(storage: Storage, name: str, records: Sequence[bytes]) -> ShardRecord:
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
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        require_local_space(Path(folder), size)
        yield Path(folder)
