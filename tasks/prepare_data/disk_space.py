"""Checks free disk space before writing, and reports full disks as errors."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage


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
