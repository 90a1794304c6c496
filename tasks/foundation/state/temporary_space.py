"""Checks that a checkpoint fits into the temporary folder, and explains errors with files there."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from tasks.foundation.accelerator.strategy import DEVICE_LOST_ERRORS
from tasks.foundation.errors import StorageError
from tasks.foundation.model.variables import Leaf

# More than the variables is written there: the sources that AutoGraph generates and a checkpoint's index.
_EXTRA_BYTES = 1 << 20


def require_temporary_space(leaves: Iterable[Leaf]) -> None:
    """Check that a checkpoint fits into the temporary folder, before anything is trained.

    Without this check AutoGraph fails first, and blames the model.

    Raises:
        StorageError: it does not fit, or the folder cannot be read.
    """
    variables = [part for leaf in leaves for part in (leaf.components if leaf.per_replica else leaf.components[:1])]
    # The host state has no fixed size, and is small.
    needed = sum((part.shape.num_elements() or 0) * part.dtype.size for part in variables) + _EXTRA_BYTES
    what_for = f"a checkpoint of this model takes {needed} there when it is restored from a bucket"
    _require_free(needed, subject="the train state", what_for=what_for)


def require_space_to_trace() -> None:
    """Check that AutoGraph can write the sources that it generates; otherwise it blames the user's code.

    Raises:
        StorageError: the temporary folder is full, or cannot be read.
    """
    what_for = f"TensorFlow needs {_EXTRA_BYTES} there to trace a step"
    _require_free(_EXTRA_BYTES, subject="tracing a step", what_for=what_for)


def _require_free(needed: int, *, subject: str, what_for: str) -> None:
    folder = tempfile.gettempdir()
    with temporary_folder_errors(subject):
        free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{folder} has {free} bytes left, and {what_for}; free some space there, or name another folder with "
            "TMPDIR, and run again"
        )


@contextmanager
def temporary_folder_errors(subject: str) -> Iterator[None]:
    """Turn errors of TensorFlow and the system about temporary files into a `StorageError`.

    Args:
        subject: what is being written or read, for the message.

    Raises:
        StorageError: a file could not be written or read.
    """
    try:
        yield
    except DEVICE_LOST_ERRORS:
        raise  # a lost device or host, not a file
    except (tf.errors.OpError, OSError) as fault:
        lines = (fault.message if isinstance(fault, tf.errors.OpError) else str(fault)).splitlines()
        raise StorageError(
            f"{subject}: no files could be written or read in {tempfile.gettempdir()} "
            f"({lines[0] if lines else fault}); free some space there, or name another folder with TMPDIR, and run "
            "again"
        ) from fault
