"""Writes checked examples to shards of equal counts, in a seeded order, or in that of the source."""

from concurrent.futures import Future
from typing import Protocol

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.prepare_data.seeded_permutation import permuted_positions
from tasks.prepare_data.shard_upload import ShardUploads

# Shards per block; a block is permuted in memory.
_BLOCK_SHARDS = 4


class PartWriter(Protocol):
    """Writes one part of a dataset, `train` or `validation`, as shards of equal counts; the last may be smaller."""

    def add(self, record: bytes) -> None:
        """Add one record."""

    def finish(self) -> tuple[ShardRecord, ...]:
        """Write the remaining records, wait for all uploads, and return the records of all shards."""


class BlockWriter:
    """Writes a part of unknown length: permutes each block of four shards, and writes it when it is full."""

    def __init__(self, uploads: ShardUploads, *, part: str, seed: int | None, shard_examples: int) -> None:
        """Create a writer; nothing is written yet.

        Args:
            uploads: receives the shards.
            part: `train` or `validation`.
            seed: seed of the permutations; None: the order stays.
            shard_examples: examples per shard.
        """
        self._uploads = uploads
        self._part = part
        self._seed = seed
        self._shard_examples = shard_examples
        self._block: list[bytes] = []
        self._blocks = 0
        self._shards: list[Future[ShardRecord]] = []

    def add(self, record: bytes) -> None:
        """See `PartWriter`; writes a block of shards when it is full.

        Raises:
            StorageError: a shard could not be written.
        """
        self._uploads.check()  # report a failed upload now; the next block may be full only hours later
        self._block.append(record)
        if len(self._block) == _BLOCK_SHARDS * self._shard_examples:
            self._flush()

    def finish(self) -> tuple[ShardRecord, ...]:
        """See `PartWriter`."""
        self._flush()
        return tuple(shard.result() for shard in self._shards)

    def _flush(self) -> None:
        block, self._block = self._block, []
        if self._seed is not None:
            order = permuted_positions(f"{self._part}/{self._blocks}", self._seed, len(block))
            block = [record for _, record in sorted(zip(order, block, strict=True))]
        self._blocks += 1
        for begin in range(0, len(block), self._shard_examples):
            name = f"{self._part}-{len(self._shards):05d}.tfrecord"
            chosen = block[begin : begin + self._shard_examples]
            self._shards.append(self._uploads.write(name, chosen))
