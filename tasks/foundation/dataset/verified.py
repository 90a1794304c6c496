"""Shards are compared with the manifest before TensorFlow sees them."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tasks.foundation.contracts.dataset import ShardRecord
from tasks.foundation.dataset.failures import kept_failures
from tasks.foundation.dataset.manifest import REMEDY
from tasks.foundation.errors import DamagedDataset, FileMissing
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.checksum import checksum_file

# Files that this process has read: path -> (what they agreed with, when they were last written).
_VERIFIED: dict[Path, tuple[str, int]] = {}
_LOCK = threading.Lock()


class VerifiedShards:
    """Opens verified shards, and keeps those of the last two plans on this machine.

    TensorFlow asks for the next plan only when it has read the one before, so two are enough.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._open: list[ExitStack] = []

    def __enter__(self) -> "VerifiedShards":
        return self

    def __exit__(self, *_: object) -> None:
        self._keep(0)

    def open(self, records: Sequence[ShardRecord]) -> list[str]:
        """Local paths of shards, once they agree with the manifest; those of the plan before the last are let go.

        Args:
            records: shards of one plan.

        Raises:
            DamagedDataset: one is missing or differs from the manifest.
        """
        self._keep(1)
        stack = ExitStack()
        self._open.append(stack)
        paths = []
        with kept_failures():
            for record in records:
                try:
                    file = self._storage.local_path(record.path)
                    if file is None:
                        file = Path(stack.enter_context(TemporaryDirectory(prefix="baton-"))) / Path(record.path).name
                        self._storage.download(record.path, file)
                except FileMissing as fault:
                    raise DamagedDataset(f"{self._storage.uri}/{record.path} is not there; {REMEDY}") from fault
                verify(file, record, where=f"{self._storage.uri}/{record.path}")
                paths.append(str(file))
        return paths

    def _keep(self, plans: int) -> None:
        while len(self._open) > plans:
            self._open.pop(0).close()


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
