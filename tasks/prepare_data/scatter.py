"""Shuffles a whole part of any size: scatters its records to their shards through a temporary file."""

import os
from concurrent.futures import Future
from typing import IO

import numpy as np

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.foundation.errors import StorageError
from tasks.prepare_data.disk_space import disk_errors, scratch_folder
from tasks.prepare_data.seeded_permutation import permuted_positions
from tasks.prepare_data.shard_upload import ShardUploads

# Records are buffered up to this size, so that each shard's records are written in few large writes.
_WAITING_BYTES = 64 << 20
_POSITION_BYTES = 8


class ScatterWriter:
    """Writes a part of known length: example i goes to position p(i) of the part; p is a seeded permutation.

    The temporary file has a region per shard, which fills in source order; a shard's records are sorted when its region
    is read back. One open file serves any number of shards, and memory holds the buffered records and one shard at
    most.
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
        """Create a writer; nothing is written yet.

        Args:
            uploads: receives the shards.
            scratch: an empty local file; `scratch_bytes` is its final size.
            part: `train` or `validation`.
            seed: seed of the permutation.
            shard_examples: examples per shard.
            examples: number of examples in the whole part, the most that may be added.
            record_bytes: length of every record, in bytes; records of the same features have the same length.
        """
        self._uploads = uploads
        self._scratch = scratch
        self._part = part
        self._examples = examples
        self._shard_examples = shard_examples
        self._record_bytes = record_bytes
        self._region_bytes = shard_examples * (_POSITION_BYTES + record_bytes)
        self._positions = permuted_positions(part, seed, examples)
        self._count = -(-examples // shard_examples)
        self._waiting = [bytearray() for _ in range(self._count)]
        self._waiting_bytes = 0
        self._scattered = [0] * self._count

    def add(self, record: bytes) -> None:
        """See `PartWriter`; writes to the temporary file when the buffer is full.

        Raises:
            ValueError: the record has another length than `record_bytes`.
            StorageError: the temporary file cannot be written.
        """
        if len(record) != self._record_bytes:
            raise ValueError(f"a record has {len(record)} bytes, but record_bytes={self._record_bytes}")
        position = next(self._positions)
        self._waiting[position // self._shard_examples] += position.to_bytes(_POSITION_BYTES, "little") + record
        self._waiting_bytes += _POSITION_BYTES + len(record)
        if self._waiting_bytes > _WAITING_BYTES:
            self._scatter()

    def finish(self) -> tuple[ShardRecord, ...]:
        """See `PartWriter`; writes all shards.

        Raises:
            StorageError: a shard could not be written, or the temporary file could not be read.
        """
        # Last shard first, so that the temporary file shrinks with each, which frees space for the shards.
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
        """Return the records of the last remaining shard, in order, and free their memory and file space."""
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
                f"{scratch_folder()}: shard {shard} of {self._part} has {len(rows)} of {last - first} examples when "
                "read back from a temporary file; check the disk, and run again"
            )
        return [rows["record"][index].tobytes() for index in order]


def scratch_bytes(examples: int, record_bytes: int) -> int:
    """Return the final size of a part's temporary file; 0 if memory can buffer all its records."""
    size = examples * (_POSITION_BYTES + record_bytes)
    return 0 if size <= _WAITING_BYTES else size


def _read_at(file: IO[bytes], offset: int, size: int) -> bytes:
    # A buffered reader reads until it has everything; one system call reads 2 GiB at most.
    with open(file.fileno(), "rb", closefd=False) as reader:
        reader.seek(offset)
        return reader.read(size)


def _write_at(file: IO[bytes], offset: int, data: bytearray) -> None:
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += os.pwrite(file.fileno(), view[done:], offset + done)
