"""What `compile` says about how a step runs, above all `jit_compile=True`: one program of XLA, as in `fit`.

`auto` means what it means in Keras: no XLA on a machine that has only CPUs, with deterministic operations, or within a
distribution strategy. A TPU compiles every step with XLA, whatever `compile` says. Evaluations are not compiled.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tasks.foundation.accelerator.strategy import DEVICE_LOST_ERRORS, Accelerator
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import message
from tasks.foundation.model.step_draws import StepDraws
from tasks.foundation.model.traced_draws import exact_draws
from tasks.foundation.model.variables import layers_of
from tasks.foundation.user_errors import user_error

Step = Callable[[Any], dict[str, Any]]

# Keras ignores jit_compile=True with deterministic operations, because XLA lacks some of them. Baton's are
# deterministic by default, so it compiles, and refuses a step that has one of these.
_KERAS_WARNING = "Model doesn't support `jit_compile=True`"
_REMEDY = "remove jit_compile=True from compile()"


@contextmanager
def jit_compile_kept() -> Iterator[None]:
    """Use around the user's function: hides Keras's warning that it ignores `jit_compile=True`, because it is used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_KERAS_WARNING)
        yield


def asks_for_xla(model: keras.Model) -> bool:
    """Whether `compile` was called with `jit_compile=True`, or Keras's `auto` chooses XLA here."""
    asked = getattr(getattr(model, "_compile_config", None), "config", {}).get("jit_compile")
    return bool(not model.run_eagerly and (asked is True or model.jit_compile))


def why_not_xla(model: keras.Model, accelerator: Accelerator) -> str:
    """Why a step for which `jit_compile=True` asks cannot be compiled with XLA; empty if it can."""
    unsupported = sorted(layer.name for layer in layers_of(model) if not getattr(layer, "supports_jit", True))
    if unsupported:
        return f"XLA does not support layer {unsupported[0]}"
    if accelerator.replicas > 1 and accelerator.kind != "tpu":
        return f"{accelerator.replicas} replicas add up their gradients in the middle of the step, outside of XLA"
    return ""


def uses_xla(model: keras.Model, accelerator: Accelerator) -> bool:
    """Whether the train step is compiled with `xla_step`."""
    return accelerator.kind != "tpu" and asks_for_xla(model) and not why_not_xla(model, accelerator)


def compile_words(model: keras.Model, accelerator: Accelerator) -> tuple[str, ...]:
    """Say what becomes of the settings of `compile` that are about how a step runs; nothing about defaults."""
    words = []
    unused = ["run_eagerly=True"] if model.run_eagerly else []
    if model.steps_per_execution != 1:
        unused.append(f"steps_per_execution={model.steps_per_execution}")
    if unused:
        words.append(f"compiled with {', '.join(unused)}, which is not used: steps run inside one compiled loop")
    if accelerator.kind != "tpu" and asks_for_xla(model):
        why = why_not_xla(model, accelerator)
        words.append(
            f"compiled with jit_compile=True, which is not used: {why}"
            if why
            else "XLA compiles the train step (jit_compile=True), which takes a while before the first step"
        )
    return tuple(words)


def xla_step(step: Step) -> Step:
    """Return a train step of one replica that XLA compiles as a whole when it first runs.

    Args:
        step: see `build_train_step`.
    """
    compiled: Step = tf.function(step, jit_compile=True)
    return compiled


def flat_xla_function(
    step: Callable[..., Any], arguments: Sequence[Any], *, autograph: bool = True
) -> tuple[Any, list[tf.TensorSpec]]:
    """Return a step as a function whose XLA program can be read, and the flat arguments to read it with.

    `experimental_get_compiler_ir` accepts only tensors as arguments, no dicts of them.

    Args:
        step: Python function of as many arguments as `arguments` has.
        arguments: `tf.TensorSpec`s of static shapes, or structures of them.
        autograph: as in `tf.function`.
    """
    structure = tuple(arguments)
    function = tf.function(
        lambda *tensors: step(*tree.pack_sequence_as(structure, list(tensors))), jit_compile=True, autograph=autograph
    )
    return function, tree.flatten(structure)


def require_xla_step(
    model: keras.Model,
    step: Step,
    batch: Sequence[Any],
    *,
    reference: str,
    accelerator: Accelerator,
    draws: StepDraws | None = None,
) -> None:
    """Check, before a run starts, that XLA can compile the step, if `jit_compile=True` asks for it.

    Args:
        model: with all its variables.
        step: see `build_train_step`.
        batch: see `create_variables`.
        reference: the function's name in the run file, for messages.
        accelerator: the step is compiled for its replicas.
        draws: seeds of the step's random operations.

    Raises:
        ModelError: there are several replicas, or an operation cannot be compiled.
    """
    if accelerator.kind == "tpu" or not asks_for_xla(model):
        return
    why = why_not_xla(model, accelerator)
    if why and accelerator.replicas > 1:
        raise ModelError(
            message(
                f"{reference}: compiled with jit_compile=True, which cannot be used: {why}",
                hints=[f"{_REMEDY}, or train on one replica (accelerator.replicas: 1)"],
            )
        )
    if why:
        return
    parts = tree.map_structure(tf.convert_to_tensor, tuple(batch))
    specs = tree.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), parts)
    function, flat = flat_xla_function(lambda *given: step(given), specs)
    try:
        with exact_draws(draws):
            function.experimental_get_compiler_ir(*flat)(stage="hlo")
    except DEVICE_LOST_ERRORS:
        raise
    except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as fault:
        what = f"{reference}: XLA cannot compile its train_step (jit_compile=True):"
        raise ModelError(user_error(what, fault, hints=[f"{_REMEDY}, or use operations that XLA supports"])) from fault
