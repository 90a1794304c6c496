"""Writes shards to local files, one at a time, and uploads them in parallel."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.foundation.errors import FileMissing, StorageError
from tasks.foundation.storage.base import FileStat, Storage
from tasks.foundation.storage.local_files import temporary_folder
from tasks.foundation.storage.transfers import checksum_file
from tasks.prepare_data.disk_space import disk_errors, require_scratch_space, require_space, scratch_folder


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
            name: the file's name.
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
