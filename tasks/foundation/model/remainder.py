"""Checks that a model can be evaluated on the last, smaller validation batch; a fixed batch size prevents it."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import tree

from tasks.foundation.accelerator.strategy import DEVICE_LOST_ERRORS, Accelerator
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import message
from tasks.foundation.model.build import trace_test_step
from tasks.foundation.user_code import describe

_HINTS = (
    "do not fix the model's batch size: use keras.Input without batch_size and batch_shape",
    "or choose train.global_batch_size and data.validation_fraction so that no smaller batch is left",
)


def require_remainder(
    model: keras.Model, batch: Sequence[Any], *, examples: int, reference: str, accelerator: Accelerator
) -> None:
    """Check that a model can be evaluated on a smaller batch, before training starts.

    Args:
        model: with all its variables.
        batch: the last batch, of NumPy arrays.
        examples: number of validation examples, for the message.
        reference: the function's name in the run file, for messages.
        accelerator: the step is traced for its replicas.

    Raises:
        ModelError: `test_step` cannot be traced with the batch.
    """
    left = len(tree.flatten(tuple(batch))[0])
    try:
        trace_test_step(model, batch, accelerator)
    except DEVICE_LOST_ERRORS:
        raise
    except (Exception, SystemExit) as fault:
        headline = (
            f"{reference}: it cannot be evaluated: the {examples} validation examples end with a batch of {left}, "
            f"which test_step does not take: {describe(fault)}"
        )
        raise ModelError(message(headline, hints=_HINTS)) from fault
