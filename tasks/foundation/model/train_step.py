"""Train steps and what goes wrong in them: one piece for the stage that begins a run and for the one that trains."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tasks.foundation.accelerator.strategy import OUTER_CAUSES, Accelerator
from tasks.foundation.errors import BatonError, InvalidInput, ModelError, StepFailed
from tasks.foundation.messages import listed, message
from tasks.foundation.model.gradient_accumulation import accumulating_step, require_accumulation
from tasks.foundation.model.keras_steps import SEED_REMEDY, as_fit_gives, hints_about
from tasks.foundation.model.returned_metrics import Returned
from tasks.foundation.model.variables import Leaf, uncovered
from tasks.foundation.user_code import describe, determinism_remedy

_LABEL_REMEDY = ". Set data.classes to have labels checked when the data is prepared"
# What a label out of range is called where losses are computed by deterministic operations.
_INDEX = re.compile(r"indices\[.*\] = -?\d+ is not in \[0, ")
_LONGEST_TEXT = 300
# Lines of TensorFlow's message that say where in its graph, and not what.
_WHERE = ("Graph execution error", "Detected at node", "File ", "<stack traces", "[[", "Original stack trace")


def step_of(
    model: keras.Model,
    batch: Sequence[Any],
    accumulate: int,
    *,
    reference: str,
    accelerator: Accelerator,
    returned: Returned | None = None,
) -> Callable[[Any], dict[str, Any]]:
    """What one replica does with its batch: `model.train_step`, or the same in so many micro-batches.

    Args:
        model: with all its variables.
        batch: see `make_variables`.
        accumulate: micro-batches that it is cut into.
        reference: what the user calls the model, for messages.
        accelerator: whose replicas take the step.
        returned: what keeps the values that a train_step of the user's own returns.

    Raises:
        ModelError: the model's step cannot be cut into micro-batches.
    """
    if accumulate == 1:
        return as_fit_gives(model.train_step) if returned is None else returned.step
    require_accumulation(model, batch, accumulate, reference=reference, accelerator=accelerator)
    return accumulating_step(model, accumulate)


def take_step(step: Callable[[Any], dict[str, Any]], strategy: Any, batch: Any) -> tuple[Any, Any]:
    """One train step on every replica, to be traced.

    Args:
        step: see `step_of`.
        strategy: whose replicas take it.
        batch: what they share.

    Returns:
        The sum of the replicas' losses, and those of this host's replicas, float32 [local_replicas]; (None, None) if
        the step tells no loss.
    """
    logs = strategy.run(step, args=(batch,))
    if "loss" not in logs:
        return None, None
    # A step of the user's may tell a loss of each example.
    local = strategy.experimental_local_results(logs["loss"])
    of_replicas = [tf.reduce_mean(tf.cast(loss, tf.float32)) for loss in local]
    return strategy.reduce(tf.distribute.ReduceOp.SUM, logs["loss"], axis=None), tf.stack(of_replicas)


def trace_step(
    function: Any,
    arguments: Sequence[Any],
    *,
    leaves: Iterable[Leaf],
    reference: str,
    hints: Callable[[BaseException], list[str]],
) -> Any:
    """Trace a `tf.function` that trains, and refuse a model with state that would not be saved.

    Args:
        function: calls `take_step`. It is traced and not called, so no variable changes.
        arguments: of the function.
        leaves: what will be saved.
        reference: what the user calls the model, for messages.
        hints: what else to say of a step that cannot be traced, see `hints_about`.

    Returns:
        The concrete function.

    Raises:
        ModelError: the step cannot be traced, or uses a variable that is not among the leaves.
    """
    try:
        concrete = function.get_concrete_function(*arguments)
    except BatonError:
        raise
    except (Exception, SystemExit) as fault:
        told = f"{reference}: train_step cannot be traced: {describe(fault)}"
        raise ModelError(message(told, hints=hints(fault))) from fault
    missed = uncovered(concrete, leaves)
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
    """See that a model can be trained, before a run is begun that the corrected model could not continue.

    Args:
        model: with all its variables.
        batch: see `make_variables`.
        accumulate: micro-batches that it is cut into.
        leaves: what will be saved.
        reference: what the user calls the model, for messages.
        accelerator: whose replicas the step is traced for.

    Raises:
        ModelError: see `trace_step`.
    """
    strategy = accelerator.strategy
    own = step_of(model, batch, accumulate, reference=reference, accelerator=accelerator)
    step = tf.function(lambda *parts: take_step(own, strategy, parts)[0], jit_compile=False)
    arguments = tree.map_structure(tf.convert_to_tensor, tuple(batch))
    trace_step(step, arguments, leaves=leaves, reference=reference, hints=partial(hints_about, model, batch))


@contextmanager
def once_training_has_begun() -> Iterator[None]:
    """Around steps, callbacks and evaluations: what is wrong with them is no input that was refused in time.

    Raises:
        StepFailed: the user's model, callbacks or data could not be used.
    """
    try:
        yield
    except InvalidInput as fault:
        raise StepFailed(str(fault)) from fault


@contextmanager
def step_failures(what: str) -> Iterator[None]:
    """Around running traced steps, and around `reading_failures`: what is wrong with the data is said by that.

    Args:
        what: what failed and where.

    Raises:
        ModelError: an operation failed, for instance on a label that the model does not have.
    """
    try:
        yield
    except OUTER_CAUSES:
        raise  # the machine's doing and not the model's
    except tf.errors.OpError as fault:
        text = _what_it_says(fault)
        is_label = "label" in text.lower() or _INDEX.search(text) is not None
        remedy = _LABEL_REMEDY if is_label else determinism_remedy(text)
        raise ModelError(f"{what}: {type(fault).__name__}: {text}{remedy}") from fault


def _what_it_says(fault: tf.errors.OpError) -> str:
    """The first line of TensorFlow's message that is about the matter, not too long."""
    lines = [" ".join(line.split()) for line in str(fault.message).splitlines()]
    telling = [line for line in lines if line and not line.startswith(_WHERE) and "root error(s) found" not in line]
    text = next(iter(telling), "no message")
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
