"""Errors of operations in a transform, which TensorFlow raises in the training loop."""

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from tasks.foundation.contracts.data_spec import DataSpec
from tasks.foundation.messages import listed
from tasks.foundation.model.train_step import op_errors_as_model_error

# TensorFlow names the operation that waited for the batch, and not the dataset's.
_NEXT_BATCH = "IteratorGetNext"


@contextmanager
def transform_errors(data: DataSpec, where: str) -> Iterator[None]:
    """Use around running the training loop: names the transforms if an operation failed while a batch was made.

    Args:
        data: of the run file.
        where: the steps, for the message.

    Raises:
        ModelError: an operation of a transform failed.
    """
    try:
        yield
    except tf.errors.OpError as fault:
        if not data.transforms or _NEXT_BATCH not in str(fault):
            raise
        with op_errors_as_model_error(f"{listed(data.transforms)} failed {where}"):
            raise
