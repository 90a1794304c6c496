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
from tasks.foundation.model.gradient_accumulation import accumulating_step, require_accumulation
from tasks.foundation.model.keras_steps import SEED_REMEDY, called_like_fit, tracing_hints
from tasks.foundation.model.returned_metrics import ReturnedMetrics
from tasks.foundation.model.variables import Leaf, untracked_variables
from tasks.foundation.user_code import describe, determinism_remedy

_LABEL_REMEDY = ". Set data.classes to have labels checked when the data is prepared"
# TensorFlow's message for a label out of range, where deterministic operations compute the loss.
_INDEX = re.compile(r"indices\[.*\] = -?\d+ is not in \[0, ")
_MAX_TEXT = 300
# Lines of TensorFlow's message that locate the error in a graph, and do not describe it.
_LOCATION_PREFIXES = (
    "Graph execution error",
    "Detected at node",
    "File ",
    "<stack traces",
    "[[",
    "Original stack trace",
)


def build_train_step(
    model: keras.Model,
    batch: Sequence[Any],
    accumulate: int,
    *,
    reference: str,
    accelerator: Accelerator,
    returned: ReturnedMetrics | None = None,
) -> Callable[[Any], dict[str, Any]]:
    """Return what one replica does with its batch: `model.train_step`, or the same in micro-batches.

    Args:
        model: with all its variables.
        batch: see `create_variables`.
        accumulate: number of micro-batches per step.
        reference: the function's name in the run file, for messages.
        accelerator: its replicas take the step.
        returned: metrics of the values that a custom train_step returns.

    Raises:
        ModelError: the model's step cannot be split into micro-batches.
    """
    if accumulate == 1:
        return called_like_fit(model.train_step) if returned is None else returned.step
    require_accumulation(model, batch, accumulate, reference=reference, accelerator=accelerator)
    return accumulating_step(model, accumulate)


def run_train_step(step: Callable[[Any], dict[str, Any]], strategy: Any, batch: Any) -> tuple[Any, Any]:
    """Run one train step on every replica; call it inside a traced function.

    Args:
        step: see `build_train_step`.
        strategy: its replicas take the step.
        batch: the distributed batch.

    Returns:
        The sum of the replicas' losses, and the losses of this host's replicas, float32 [local_replicas]; (None, None)
        if the step returns no loss.
    """
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
        ModelError: the step cannot be traced, or uses a variable that is not saved.
    """
    try:
        concrete = function.get_concrete_function(*arguments)
    except BatonError:
        raise
    except (Exception, SystemExit) as fault:
        headline = f"{reference}: train_step cannot be traced: {describe(fault)}"
        raise ModelError(message(headline, hints=hints(fault))) from fault
    missed = untracked_variables(concrete, leaves)
    if missed:
        raise ModelError(
            message(
                f"{reference}: train_step uses variables that no layer, optimizer or metric holds, so a checkpoint "
                f"would miss them: {listed(missed)}",
                hints=["keep them as attributes of a layer or of the model", SEED_REMEDY],
            )
        )
    return concrete


def require_train_step(
    model: keras.Model,
    batch: Sequence[Any],
    *,
    accumulate: int,
    leaves: Iterable[Leaf],
    reference: str,
    accelerator: Accelerator,
) -> None:
    """Check that a model can be trained, before a run starts: a corrected model could not continue the run.

    Args:
        model: with all its variables.
        batch: see `create_variables`.
        accumulate: number of micro-batches per step.
        leaves: the variables that are saved.
        reference: the function's name in the run file, for messages.
        accelerator: the step is traced for its replicas.

    Raises:
        ModelError: see `trace_train_step`.
    """
    strategy = accelerator.strategy
    own = build_train_step(model, batch, accumulate, reference=reference, accelerator=accelerator)
    step = tf.function(lambda *parts: run_train_step(own, strategy, parts)[0], jit_compile=False)
    arguments = tree.map_structure(tf.convert_to_tensor, tuple(batch))
    trace_train_step(step, arguments, leaves=leaves, reference=reference, hints=partial(tracing_hints, model, batch))


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
        text = _describe_op_error(fault)
        is_label = "label" in text.lower() or _INDEX.search(text) is not None
        remedy = _LABEL_REMEDY if is_label else determinism_remedy(text)
        raise ModelError(f"{what}: {type(fault).__name__}: {text}{remedy}") from fault


def _describe_op_error(fault: tf.errors.OpError) -> str:
    """Return the first line of TensorFlow's message that describes the error, shortened."""
    lines = [" ".join(line.split()) for line in str(fault.message).splitlines()]
    descriptions = [
        line for line in lines if line and not line.startswith(_LOCATION_PREFIXES) and "root error(s) found" not in line
    ]
    text = next(iter(descriptions), "no message")
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
