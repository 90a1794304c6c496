"""Data files whose bytes are those of the checkpoint before: linked or copied in the store, not written again.

A frozen backbone, or an embedding that no batch touched, is neither written nor uploaded at each commit. On a local
disk the checkpoints share the file by hard links, on Cloud Storage the bucket copies the object. So each checkpoint
still has all of its files, and deleting one takes nothing from another. If the earlier file is deleted meanwhile, the
bytes are written.
"""

import hashlib
from collections.abc import Sequence

import google_crc32c

from tasks.foundation.contracts.checkpoint import FileRecord
from tasks.foundation.errors import StorageError
from tasks.foundation.state.earlier_files import EarlierFiles
from tasks.foundation.storage.base import FileStat, Storage
from tasks.foundation.storage.transfers import as_array


def write_or_share(
    home: Storage,
    folder: str,
    name: str,
    buffers: Sequence[memoryview],
    *,
    earlier: EarlierFiles,
    resting: bool,
) -> FileRecord:
    """Put one data file into a checkpoint's folder, and return its record.

    A checksum of 32 bits is too short to prove that bytes are the same, so the sha256 of both is compared. It is known
    of files that training does not change, and of those that stayed the same once.

    Args:
        home: the run's home.
        folder: of the checkpoint.
        name: of the file.
        buffers: its bytes.
        earlier: the files of the checkpoint before.
        resting: whether training does not update what is in the file.

    Raises:
        StorageError: the store failed, or holds other bytes than were sent.
    """
    path = f"{folder}/{name}"
    like = earlier.of_size(sum(buffer.nbytes for buffer in buffers))
    crc32c = _crc32c(buffers) if like else ""
    like = [found for found in like if found[1].crc32c == crc32c]
    sha256 = _sha256(buffers) if resting or like else None
    for earlier_path, record in like:
        if record.sha256 == sha256 and _share(home, earlier_path, path, record):
            return FileRecord(name=name, size=record.size, crc32c=record.crc32c, sha256=sha256)
    stored = home.write_buffers(path, buffers)
    return FileRecord(name=name, size=stored.size, crc32c=stored.crc32c, sha256=sha256)


def _share(home: Storage, earlier: str, path: str, record: FileRecord) -> bool:
    """Link or copy a file within the store. False if it is gone or damaged; then the bytes are to be written.

    A damaged file is not shared: all checkpoints that share it would be lost with it.
    """
    try:
        home.copy(earlier, path)
        return home.stat(path) == FileStat(size=record.size, crc32c=record.crc32c)
    except StorageError:  # what stays wrong is raised when the bytes are written
        return False


def _crc32c(buffers: Sequence[memoryview]) -> str:
    crc = 0
    for buffer in buffers:
        crc = google_crc32c.extend(crc, as_array(buffer))
    return f"{crc:08x}"


def _sha256(buffers: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()
