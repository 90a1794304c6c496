"""Shards are compared with the manifest before TensorFlow sees them."""

import threading
from pathlib import Path

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.foundation.dataset.manifest import REMEDY
from tasks.foundation.errors import DamagedDataset
from tasks.foundation.storage.checksum import checksum_file

# Files that this process has read: path -> (what they agreed with, when they were last written).
_VERIFIED: dict[Path, tuple[str, int]] = {}
_LOCK = threading.Lock()


def verify(file: Path, record: ShardRecord, *, where: str) -> None:
    """Compare a shard's size and checksum with the manifest; once in a process for each file and content.

    Args:
        file: the shard on this machine.
        record: what the manifest says of it.
        where: its address, for the message.

    Raises:
        DamagedDataset: they differ.
    """
    stamp = (f"{record.size}-{record.crc32c}", file.stat().st_mtime_ns)
    with _LOCK:
        if _VERIFIED.get(file) == stamp:
            return
    found = checksum_file(file)
    if (found.size, found.crc32c) != (record.size, record.crc32c):
        raise DamagedDataset(
            f"{where}: has {found.size} bytes with crc32c {found.crc32c}, its manifest says {record.size} bytes with "
            f"{record.crc32c}; {REMEDY}"
        )
    with _LOCK:
        _VERIFIED[file] = stamp
