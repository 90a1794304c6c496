"""Restores Baton's errors that TensorFlow wraps while it reads a dataset."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.foundation.errors import BatonError, DamagedDataset

# TensorFlow keeps only the text of an error that a Python generator raised. It reads in its own threads, so the
# errors are kept here, one list for the process.
_KEPT: deque[BatonError] = deque(maxlen=16)


@contextmanager
def remember_read_errors() -> Iterator[None]:
    """Use around code that runs inside a tf.data generator: keeps the error for `original_read_errors`."""
    try:
        yield
    except BatonError as fault:
        _KEPT.append(fault)
        raise


@contextmanager
def original_read_errors() -> Iterator[None]:
    """Use around iteration over a dataset of `reader`.

    Raises:
        BatonError: the error that made reading fail, such as DamagedDataset, in place of TensorFlow's error.
    """
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as fault:
        text = str(fault)
        for kept in reversed(_KEPT):
            if str(kept) in text:
                raise kept from fault
        # The shard matched the manifest when it was opened, but changed since.
        if isinstance(fault, tf.errors.DataLossError):
            raise DamagedDataset(f"a shard changed while it was being read: {fault.message}") from fault
        raise
