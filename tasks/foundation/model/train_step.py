"""Builds and traces train steps, and reports their errors; used when a run starts and when it trains."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tasks.foundation.accelerator.strategy import DEVICE_LOST_ERRORS, Accelerator
from tasks.foundation.errors import BatonError, InvalidInput, ModelError, StepFailed
from tasks.foundation.messages import listed, message
from tasks.foundation.model.compile_settings import require_xla_step
from tasks.foundation.model.gradient_accumulation import accumulating_step, require_accumulation
from tasks.foundation.model.hidden_state import require_no_hidden_state
from tasks.foundation.model.keras_steps import SEED_REMEDY, called_like_fit, tracing_hints
from tasks.foundation.model.random_operations import require_exact_draws
from tasks.foundation.model.returned_metrics import ReturnedMetrics
from tasks.foundation.model.step_draws import StepDraws, saved_or_drawn
from tasks.foundation.model.traced_draws import exact_draws
from tasks.foundation.model.variables import Leaf, untracked_variables
from tasks.foundation.user_errors import describe, user_error

_LABEL_REMEDY = ". Set data.classes to have labels checked when the data is prepared"
# TensorFlow's message for a label out of range, where deterministic operations compute the loss.
_INDEX = re.compile(r"indices\[.*\] = -?\d+ is not in \[0, ")


def build_train_step(
    model: keras.Model,
    batch: Sequence[Any],
    accumulate: int,
    *,
    reference: str,
    accelerator: Accelerator,
    returned: ReturnedMetrics | None = None,
    draws: StepDraws | None = None,
) -> Callable[[Any], dict[str, Any]]:
    """Return what one replica does with its batch: `model.train_step`, or the same in micro-batches.

    Args:
        model: with all its variables.
        batch: see `create_variables`.
        accumulate: number of micro-batches per step.
        reference: the function's name in the run file, for messages.
        accelerator: its replicas take the step.
        returned: metrics of the values that a step of the user's returns.
        draws: seeds of the step's random operations.

    Raises:
        ModelError: the model's step cannot be split into micro-batches.
    """
    if accumulate == 1:
        step = called_like_fit(model.train_step) if returned is None else returned.step
    else:
        require_accumulation(model, batch, accumulate, reference=reference, accelerator=accelerator)
        step = accumulating_step(model, accumulate, returned)
    return step if draws is None else draws.counted(step)


def run_train_step(
    step: Callable[[Any], dict[str, Any]], strategy: Any, batch: Any, draws: StepDraws | None = None
) -> tuple[Any, Any]:
    """Run one train step on every replica; call it inside a traced function.

    Args:
        step: see `build_train_step`.
        strategy: its replicas take the step.
        batch: the distributed batch.
        draws: seeds of the step's random operations.

    Returns:
        The sum of the replicas' losses, and the losses of this host's replicas, float32 [local_replicas]; (None, None)
        if the step returns no loss.
    """
    with exact_draws(draws):
        logs = strategy.run(step, args=(batch,))
    if "loss" not in logs:
        return None, None
    # A custom step may return a loss per example.
    local = strategy.experimental_local_results(logs["loss"])
    of_replicas = [tf.reduce_mean(tf.cast(loss, tf.float32)) for loss in local]
    return strategy.reduce(tf.distribute.ReduceOp.SUM, logs["loss"], axis=None), tf.stack(of_replicas)


def trace_train_step(
    function: Any,
    arguments: Sequence[Any],
    *,
    leaves: Iterable[Leaf],
    reference: str,
    hints: Callable[[BaseException], list[str]],
) -> Any:
    """Trace a `tf.function` that trains, and refuse a model with state that a checkpoint would miss.

    Args:
        function: calls `run_train_step`. It is only traced, so no variable changes.
        arguments: arguments of the function.
        leaves: the variables that are saved.
        reference: the function's name in the run file, for messages.
        hints: returns hints for a tracing error, see `tracing_hints`.

    Returns:
        The concrete function.

    Raises:
        ModelError: the step cannot be traced, or uses a variable, or other state, that is not saved.
    """
    try:
        concrete = function.get_concrete_function(*arguments)
    except BatonError:
        raise
    except (Exception, SystemExit) as fault:
        raise ModelError(user_error(f"{reference}: train_step cannot be traced:", fault, hints=hints(fault))) from fault
    missed = untracked_variables(concrete, leaves)
    if missed:
        raise ModelError(
            message(
                f"{reference}: train_step uses variables that no layer, optimizer or metric holds, so a checkpoint "
                f"would miss them: {listed(missed)}",
                hints=["keep them as attributes of a layer or of the model", SEED_REMEDY],
            )
        )
    require_no_hidden_state(concrete, f"{reference}: train_step")
    return concrete


def require_train_step(
    model: keras.Model,
    batch: Sequence[Any],
    *,
    accumulate: int,
    leaves: Iterable[Leaf],
    reference: str,
    accelerator: Accelerator,
    draws: StepDraws | None = None,
) -> None:
    """Check that a model can be trained, before a run starts: a corrected model could not continue the run.

    Args:
        model: with all its variables.
        batch: see `create_variables`.
        accumulate: number of micro-batches per step.
        leaves: the variables that are saved.
        reference: the function's name in the run file, for messages.
        accelerator: the step is traced for its replicas.
        draws: seeds of the step's random operations.

    Raises:
        ModelError: see `trace_train_step`, `require_exact_draws` and `require_xla_step`.
    """
    strategy = accelerator.strategy
    own = build_train_step(model, batch, accumulate, reference=reference, accelerator=accelerator, draws=draws)
    step = tf.function(lambda *parts: run_train_step(own, strategy, parts, draws)[0], jit_compile=False)
    arguments = tree.map_structure(tf.convert_to_tensor, tuple(batch))
    hints = partial(tracing_hints, model, batch)
    concrete = trace_train_step(step, arguments, leaves=saved_or_drawn(leaves, draws), reference=reference, hints=hints)
    require_exact_draws(concrete, draws, f"{reference}: train_step")
    require_xla_step(model, own, batch, reference=reference, accelerator=accelerator, draws=draws)


@contextmanager
def invalid_input_as_step_failed() -> Iterator[None]:
    """Use around steps, callbacks and evaluations: after training has started, bad input is a failed step.

    Raises:
        StepFailed: the user's model, callbacks or data cannot be used.
    """
    try:
        yield
    except InvalidInput as fault:
        raise StepFailed(str(fault)) from fault


@contextmanager
def op_errors_as_model_error(what: str) -> Iterator[None]:
    """Use around running traced steps, outside of `original_read_errors`, which reports errors in the data.

    Args:
        what: what failed and where, for the message.

    Raises:
        ModelError: an operation failed, for instance on a label that the model does not have.
    """
    try:
        yield
    except DEVICE_LOST_ERRORS:
        raise  # a problem of the machine, not of the model
    except tf.errors.OpError as fault:
        text = describe(fault)
        is_label = "label" in text.lower() or _INDEX.search(text) is not None
        raise ModelError(user_error(f"{what}:", fault, end=_LABEL_REMEDY if is_label else "")) from fault
