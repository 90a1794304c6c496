"""Writes checked examples to shards of equal counts, in a seeded order or in that of the source.

A whole part of any size is shuffled by scattering its records to their shards through a temporary file. Shards are
written to local files, one at a time, and uploaded in parallel; free disk space is checked before. Permutations use
integer arithmetic only, so machines and NumPy versions agree.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol, Self

import numpy as np

from baton.tasks.foundation.contracts.dataset import ShardRecord
from baton.tasks.foundation.dataset.order import Words, hashes, mix
from baton.tasks.foundation.errors import FileMissing, StorageError
from baton.tasks.foundation.storage.interface import FileStat, Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.local_files import temporary_folder
from baton.tasks.foundation.storage.transfers import checksum_file

_CHUNK = 4096
_ROUNDS = 8


def permuted_positions(purpose: str, seed: int, size: int) -> Iterator[int]:
    """Yield the new position of index 0, 1, 2, …: a permutation of range(size) that is never held in memory.

    A Feistel network permutes the smallest range of 4^k numbers that contains `size`; a number outside of `size` is
    permuted again until it is inside (cycle walking: Black and Rogaway 2002).

    Args:
        purpose: permutations for different purposes are independent.
        size: at most 2^62.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = hashes(f"{purpose}/rounds", seed, 0, _ROUNDS)
    for begin in range(0, size, _CHUNK):
        values = np.arange(begin, min(begin + _CHUNK, size), dtype=np.uint64)
        outside = np.ones(len(values), np.bool_)
        while outside.any():
            values[outside] = _feistel(values[outside], keys, half_bits)
            outside = values >= np.uint64(size)
        yield from values.tolist()


def _feistel(values: Words, keys: Words, half_bits: int) -> Words:
    """Permute range(4^half_bits). Each round is invertible, so the result is a bijection."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return left << bits | right


def require_space(storage: Storage, size: int, *, includes_written_shards: bool = False) -> None:
    """Refuse to write more than fits.

    Args:
        storage: where the data is written; only a local folder reports its free space.
        size: bytes to write.
        includes_written_shards: `size` includes shards that an earlier attempt has already written.

    Raises:
        StorageError: there is too little free space.
    """
    if isinstance(storage, LocalStorage):
        if includes_written_shards:
            with disk_errors(storage.root):
                size -= sum(file.stat().st_size for file in storage.root.glob("*.tfrecord"))
        _require(storage.root, size, "the dataset needs", "set storage to a larger disk")


def require_scratch_space(size: int) -> None:
    """Refuse to write more than fits into the temporary folder.

    Args:
        size: bytes to write.

    Raises:
        StorageError: there is too little free space, or no temporary folder.
    """
    _require(
        scratch_folder(), size, "preparing the dataset needs", "set the environment variable TMPDIR to a larger disk"
    )


def scratch_folder() -> Path:
    """Return the temporary folder of this machine.

    Raises:
        StorageError: there is no writable temporary folder.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as fault:
        raise StorageError(
            f"{fault.strerror}; set the environment variable TMPDIR to a folder with free space"
        ) from fault


@contextmanager
def scratch_file() -> Iterator[IO[bytes]]:
    """Open an empty, unbuffered temporary file. It has no name, so nothing remains of it, even after a kill."""
    with ExitStack() as stack:
        with disk_errors(scratch_folder()):
            file = stack.enter_context(tempfile.TemporaryFile(buffering=0))
        yield file


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Use around file operations in a local folder, TensorFlow's included: raises StorageError if the disk is full."""
    import tensorflow as tf

    try:
        yield
    except (tf.errors.OpError, OSError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else fault.message
        raise StorageError(f"{folder}: writing to its disk failed: {reason}; free some space and run again") from fault


def _require(folder: Path, size: int, needs: str, remedy: str) -> None:
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise StorageError(
            f"{folder}: {needs} {_mib(size)} of disk space, but {_mib(free)} are free; free some space, or {remedy}"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


class ShardUploads:
    """Uploads shards while the next one is written, as many in parallel as the store allows.

    A shard that an earlier attempt left in the store is kept if its bytes are the same.

    Attributes:
        storage: store rooted at the dataset's folder.
    """

    def __init__(self, storage: Storage) -> None:
        """Create an uploader; nothing is written yet.

        Args:
            storage: store rooted at the dataset's folder.
        """
        self.storage = storage
        self._stack = ExitStack()
        self._folder: Path | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._uploading: set[Future[ShardRecord]] = set()
        self._faults: list[BaseException] = []
        self._kept: list[str] = []

    @property
    def kept(self) -> int:
        """Number of shards that the store already had."""
        return len(self._kept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for running uploads, also after an error, so that a retry need not repeat them."""
        self._stack.close()

    def write(self, name: str, records: Sequence[bytes]) -> "Future[ShardRecord]":
        """Write one local TFRecord file, and start its upload; waits while too many uploads are running.

        Args:
            records: its records, in order.

        Returns:
            The shard's record, once the store has the file.

        Raises:
            StorageError: there is too little space, or an earlier upload failed.
        """
        self.check()
        size = sum(map(len, records)) + 16 * len(records)  # TFRecord framing adds 16 bytes per record
        file = self._file(name, records, size)
        if self.storage.transfers == 1:
            future: Future[ShardRecord] = Future()
            future.set_result(self._upload(file, len(records), size))
            return future
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.storage.transfers, thread_name_prefix="baton-upload")
            self._stack.callback(self._pool.shutdown, cancel_futures=True)
        while len(self._uploading) >= self.storage.transfers:
            _, self._uploading = wait(self._uploading, return_when=FIRST_COMPLETED)
            self.check()
        future = self._pool.submit(self._upload, file, len(records), size)
        self._uploading.add(future)
        return future

    def check(self) -> None:
        """Raise the error of a failed upload.

        Raises:
            StorageError: there is too little space, or the store has other bytes than were written.
        """
        if self._faults:
            raise self._faults[0]

    def _file(self, name: str, records: Sequence[bytes], size: int) -> Path:
        import tensorflow as tf

        require_scratch_space(size)
        with disk_errors(scratch_folder()):
            if self._folder is None:
                self._folder = self._stack.enter_context(temporary_folder("baton-preparing-"))
            file = self._folder / name
            with tf.io.TFRecordWriter(str(file)) as writer:
                for record in records:
                    writer.write(record)
        return file

    def _upload(self, file: Path, examples: int, size: int) -> ShardRecord:
        """Upload a local file; delete it in any case."""
        try:
            stored = self._stored(file, size)
            return ShardRecord(path=file.name, examples=examples, size=stored.size, crc32c=stored.crc32c)
        except BaseException as fault:
            self._faults.append(fault)
            raise
        finally:
            file.unlink(missing_ok=True)

    def _stored(self, file: Path, size: int) -> FileStat:
        name = file.name
        with suppress(FileMissing):
            found = self.storage.stat(name)
            if found.size == size and found == checksum_file(file):
                self._kept.append(name)
                return found
        require_space(self.storage, size)
        written = self.storage.upload(file, name)
        stored = self.storage.stat(name)
        if stored != written or written.size != size:
            raise StorageError(
                f"{self.storage.uri}/{name}: {size} bytes were written, but the store has {stored.size} bytes with "
                f"crc32c {stored.crc32c} instead of {written.crc32c}; run again"
            )
        return stored


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
