"""Is there room? Asked before writing, where the answer can be had."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage


def require_space(storage: Storage, size: int, *, shards_there_count: bool = False) -> None:
    """Refuse to begin what will not fit.

    Args:
        storage: where it will be written; only a local folder tells how much room it has.
        size: bytes.
        shards_there_count: of the bytes, those are there already that an earlier try left in shards.

    Raises:
        StorageError: too little is free.
    """
    if isinstance(storage, LocalStorage):
        if shards_there_count:
            with disk_errors(storage.root):
                size -= sum(file.stat().st_size for file in storage.root.glob("*.tfrecord"))
        _require(storage.root, size, "the dataset needs", "set storage to a larger disk")


def require_scratch_space(size: int) -> None:
    """The same for this machine's temporary folder.

    Args:
        size: bytes.

    Raises:
        StorageError: too little is free, or there is no temporary folder.
    """
    _require(
        scratch_folder(), size, "preparing the dataset needs", "set the environment variable TMPDIR to a larger disk"
    )


def scratch_folder() -> Path:
    """This machine's temporary folder.

    Raises:
        StorageError: there is none that can be written to.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as fault:
        raise StorageError(f"{fault.strerror}; set the environment variable TMPDIR to a folder with room") from fault


@contextmanager
def scratch_file() -> Iterator[IO[bytes]]:
    """An empty file of this machine, unbuffered. It has no name, so that even a kill leaves nothing of it."""
    with ExitStack() as stack:
        with disk_errors(scratch_folder()):
            file = stack.enter_context(tempfile.TemporaryFile(buffering=0))
        yield file


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Around the use of files in a local folder, by TensorFlow too: a full disk becomes a StorageError."""
    import tensorflow as tf

    try:
        yield
    except (tf.errors.OpError, OSError) as fault:
        told = fault.strerror if isinstance(fault, OSError) else fault.message
        raise StorageError(f"{folder}: its disk failed: {told}; free some space and run again") from fault


def _require(folder: Path, size: int, needs: str, remedy: str) -> None:
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise StorageError(f"{folder}: {needs} {_mib(size)} of disk and {_mib(free)} are free; free some, or {remedy}")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
