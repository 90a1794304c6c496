"""Is there room? Asked before writing, where the answer can be had."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage


def require_space(storage: Storage, size: int) -> None:
    """Refuse to begin what will not fit.

    Args:
        storage: where it will be written; only a local folder tells how much room it has.
        size: bytes.

    Raises:
        StorageError: too little is free.
    """
    if isinstance(storage, LocalStorage):
        require_local_space(storage.root, size)


def require_local_space(folder: Path, size: int) -> None:
    """The same for a folder of this machine, which need not be there yet."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise StorageError(
            f"{folder}: the dataset needs {_mib(size)} of disk and {_mib(free)} are free; free some, or set storage "
            "to a larger disk"
        )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Around TensorFlow's writing to a local folder: a full disk becomes a StorageError."""
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as fault:
        raise StorageError(f"{folder}: cannot write there: {fault.message}; free some space and run again") from fault


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
