"""What goes wrong while TensorFlow reads comes out of it as TensorFlow's own error; here it is turned back."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.foundation.errors import BatonError, DamagedDataset

# TensorFlow carries only the text of an error that was raised in a Python generator.
_KEPT: deque[BatonError] = deque(maxlen=16)


@contextmanager
def kept_failures() -> Iterator[None]:
    """Around what runs inside a tf.data generator: remembers the error for `reading_failures`."""
    try:
        yield
    except BatonError as fault:
        _KEPT.append(fault)
        raise


@contextmanager
def reading_failures() -> Iterator[None]:
    """Around whatever pulls elements out of a dataset of `reader`.

    Raises:
        BatonError: the one that made reading fail, such as DamagedDataset, instead of TensorFlow's error about it.
    """
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as fault:
        text = str(fault)
        for kept in reversed(_KEPT):
            if str(kept) in text:
                raise kept from fault
        # The shard was sound when it was opened first, and is not any more.
        if isinstance(fault, tf.errors.DataLossError):
            raise DamagedDataset(f"a shard changed while it was being read: {fault.message}") from fault
        raise
