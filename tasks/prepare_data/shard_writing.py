"""From checked examples to shards of equal counts, in an order that the seed decides."""

from concurrent.futures import Future
from typing import Protocol

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.prepare_data.seeded_permutation import positions
from tasks.prepare_data.shard_upload import ShardUploads

# A block is permuted in memory and becomes so many shards.
_BLOCK_SHARDS = 4


class PartWriter(Protocol):
    """Writes one part of a dataset, `train` or `validation`, as shards of equal counts (the last may be smaller)."""

    def add(self, record: bytes) -> None:
        """Take one example."""

    def finish(self) -> tuple[ShardRecord, ...]:
        """Write what is left, and wait for all uploads; the records of all shards."""


class BlockWriter:
    """For a part of unknown length: each block of four shards is permuted, and written when it is full."""

    def __init__(self, uploads: ShardUploads, *, part: str, seed: int, shard_examples: int) -> None:
        """Nothing is written yet.

        Args:
            uploads: take the shards.
            part: `train` or `validation`.
            seed: of the permutations.
            shard_examples: examples in a shard.
        """
        self._uploads = uploads
        self._part = part
        self._seed = seed
        self._shard_examples = shard_examples
        self._block: list[bytes] = []
        self._blocks = 0
        self._shards: list[Future[ShardRecord]] = []

    def add(self, record: bytes) -> None:
        """See `PartWriter`; writes a block of shards now and then.

        Raises:
            StorageError: a shard could not be written.
        """
        self._uploads.check()  # until the next block is full, hours may pass
        self._block.append(record)
        if len(self._block) == _BLOCK_SHARDS * self._shard_examples:
            self._flush()

    def finish(self) -> tuple[ShardRecord, ...]:
        """See `PartWriter`."""
        self._flush()
        return tuple(shard.result() for shard in self._shards)

    def _flush(self) -> None:
        block, self._block = self._block, []
        order = positions(f"{self._part}/{self._blocks}", self._seed, len(block))
        permuted = [record for _, record in sorted(zip(order, block, strict=True))]
        self._blocks += 1
        for begin in range(0, len(permuted), self._shard_examples):
            name = f"{self._part}-{len(self._shards):05d}.tfrecord"
            chosen = permuted[begin : begin + self._shard_examples]
            self._shards.append(self._uploads.write(name, chosen))
