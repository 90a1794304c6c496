"""The last validation examples, where they fill no batch: with a fixed batch size nothing can be made of them."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import tree

from tasks.foundation.accelerator.strategy import OUTER_CAUSES, Accelerator
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import message
from tasks.foundation.model.build import trace_test_step
from tasks.foundation.user_code import describe

_HINTS = (
    "leave the batch size of the model open: keras.Input without batch_size and batch_shape",
    "or choose train.global_batch_size and data.validation_fraction so that no smaller batch is left",
)


def require_remainder(
    model: keras.Model, batch: Sequence[Any], *, examples: int, reference: str, accelerator: Accelerator
) -> None:
    """See that a model can be evaluated on a smaller batch, before anything is trained in vain.

    Args:
        model: with all its variables.
        batch: of the size of what is left, of NumPy arrays.
        examples: validation examples, for the message.
        reference: what the user calls the model, for messages.
        accelerator: whose replicas the step is traced for.

    Raises:
        ModelError: `test_step` cannot be traced with it.
    """
    left = len(tree.flatten(tuple(batch))[0])
    try:
        trace_test_step(model, batch, accelerator)
    except OUTER_CAUSES:
        raise
    except (Exception, SystemExit) as fault:
        told = (
            f"{reference}: it cannot be evaluated: the {examples} validation examples end with a batch of {left}, "
            f"which test_step does not take: {describe(fault)}"
        )
        raise ModelError(message(told, hints=_HINTS)) from fault
