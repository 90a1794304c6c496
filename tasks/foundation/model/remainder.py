"""Checks that a model can be evaluated on the last, smaller batch of a set; a fixed batch size prevents it."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import tree

from tasks.foundation.accelerator.strategy import DEVICE_LOST_ERRORS, Accelerator
from tasks.foundation.contracts.evaluation_sets import SetName
from tasks.foundation.errors import ModelError
from tasks.foundation.model.build import trace_test_step
from tasks.foundation.model.step_draws import StepDraws
from tasks.foundation.user_errors import user_error

_HINTS = (
    "do not fix the model's batch size: use keras.Input without batch_size and batch_shape",
    "or choose train.global_batch_size and data.validation_fraction so that no smaller batch is left",
)
_HINT_OF_TEST = "or choose train.global_batch_size and the number of test examples so that no smaller batch is left"


def require_remainder(
    model: keras.Model,
    batch: Sequence[Any],
    *,
    examples: int,
    reference: str,
    accelerator: Accelerator,
    on: SetName = "validation",
    draws: StepDraws | None = None,
) -> None:
    """Check that a model can be evaluated on a smaller batch, before training starts.

    Args:
        model: with all its variables.
        batch: the last batch, of NumPy arrays.
        examples: number of examples of the set, for the message.
        reference: the function's name in the run file, for messages.
        accelerator: the step is traced for its replicas.
        on: the set, for the message.
        draws: seeds of the step's random operations.

    Raises:
        ModelError: `test_step` cannot be traced with the batch.
    """
    left = len(tree.flatten(tuple(batch))[0])
    try:
        trace_test_step(model, batch, accelerator, draws)
    except DEVICE_LOST_ERRORS:
        raise
    except (Exception, SystemExit) as fault:
        what = (
            f"{reference}: it cannot be evaluated: the {examples} {on} examples end with a batch of {left}, "
            "which test_step does not take:"
        )
        hints = _HINTS if on == "validation" else (_HINTS[0], _HINT_OF_TEST)
        raise ModelError(user_error(what, fault, hints=hints)) from fault
