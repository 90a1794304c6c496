"""One permutation of a whole part, however large: records are scattered to their shards through a scratch file."""

import os
from concurrent.futures import Future
from typing import IO

import numpy as np

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.foundation.errors import StorageError
from tasks.prepare_data.disk_space import disk_errors, scratch_folder
from tasks.prepare_data.seeded_permutation import positions
from tasks.prepare_data.shard_upload import ShardUploads

# Records wait in memory until so many are together: each shard's share of them is then one write.
_WAITING_BYTES = 64 << 20
_POSITION_BYTES = 8


class ScatterWriter:
    """For a part of known length: example i goes to position p(i) of the part, p a seeded permutation.

    The scratch file holds a region for each shard, which fills in the order of the source; a shard is put into its
    own order when its region is read back. One open file serves any number of shards, and at most the waiting records
    and one shard are in memory.
    """

    def __init__(
        self,
        uploads: ShardUploads,
        scratch: IO[bytes],
        *,
        part: str,
        seed: int,
        shard_examples: int,
        examples: int,
        record_bytes: int,
    ) -> None:
        """Nothing is written yet.

        Args:
            uploads: take the shards.
            scratch: an empty file on this machine; see `scratch_bytes` for how large it becomes.
            part: `train` or `validation`.
            seed: of the permutation.
            shard_examples: examples in a shard.
            examples: in the whole part; no more may be added.
            record_bytes: length of every record; examples of one kind have records of one length.
        """
        self._uploads = uploads
        self._scratch = scratch
        self._part = part
        self._examples = examples
        self._shard_examples = shard_examples
        self._record_bytes = record_bytes
        self._region_bytes = shard_examples * (_POSITION_BYTES + record_bytes)
        self._positions = positions(part, seed, examples)
        self._count = -(-examples // shard_examples)
        self._waiting = [bytearray() for _ in range(self._count)]
        self._waiting_bytes = 0
        self._scattered = [0] * self._count

    def add(self, record: bytes) -> None:
        """See `PartWriter`; writes to the scratch file now and then.

        Raises:
            ValueError: the record has another length than was said.
            StorageError: the scratch file cannot be written.
        """
        if len(record) != self._record_bytes:
            raise ValueError(f"a record has {len(record)} bytes, record_bytes={self._record_bytes} were said")
        position = next(self._positions)
        self._waiting[position // self._shard_examples] += position.to_bytes(_POSITION_BYTES, "little") + record
        self._waiting_bytes += _POSITION_BYTES + len(record)
        if self._waiting_bytes > _WAITING_BYTES:
            self._scatter()

    def finish(self) -> tuple[ShardRecord, ...]:
        """See `PartWriter`; writes all shards.

        Raises:
            StorageError: a shard could not be written, or the scratch file could not be read.
        """
        # From the end, so that the scratch file is cut shorter with each: the room it took is free for the shards.
        written = [self._write(shard) for shard in reversed(range(self._count))]
        return tuple(shard.result() for shard in reversed(written))

    def _scatter(self) -> None:
        with disk_errors(scratch_folder()):
            for shard, records in enumerate(self._waiting):
                _write_at(self._scratch, shard * self._region_bytes + self._scattered[shard], records)
                self._scattered[shard] += len(records)
                records.clear()
        self._waiting_bytes = 0

    def _write(self, shard: int) -> "Future[ShardRecord]":
        name = f"{self._part}-{shard:05d}-of-{self._count:05d}.tfrecord"
        return self._uploads.write(name, self._take(shard))

    def _take(self, shard: int) -> list[bytes]:
        """The records of the last shard that is left, in order; they are gone from memory and scratch file."""
        begin, size = shard * self._region_bytes, self._scattered[shard]
        with disk_errors(scratch_folder()):
            region = _read_at(self._scratch, begin, size) + self._waiting.pop()
            if size:
                self._scratch.truncate(begin)
        rows = np.frombuffer(region, [("position", "<u8"), ("record", f"V{self._record_bytes}")])
        order = np.argsort(rows["position"])
        first = shard * self._shard_examples
        last = min(first + self._shard_examples, self._examples)
        if not np.array_equal(rows["position"][order], np.arange(first, last)):
            raise StorageError(
                f"{scratch_folder()}: shard {shard} of {self._part} has {len(rows)} of {last - first} examples after "
                "their way through a temporary file; see whether the disk is sound, and run again"
            )
        return [rows["record"][index].tobytes() for index in order]


def scratch_bytes(examples: int, record_bytes: int) -> int:
    """How large the scratch file of a part becomes; 0 if all its records can wait in memory."""
    size = examples * (_POSITION_BYTES + record_bytes)
    return 0 if size <= _WAITING_BYTES else size


def _read_at(file: IO[bytes], offset: int, size: int) -> bytes:
    # A buffered reader goes on until it has all; one call of the system reads 2 GiB at most.
    with open(file.fileno(), "rb", closefd=False) as reader:
        reader.seek(offset)
        return reader.read(size)


def _write_at(file: IO[bytes], offset: int, data: bytearray) -> None:
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += os.pwrite(file.fileno(), view[done:], offset + done)
