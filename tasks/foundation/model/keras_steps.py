"""Calls train and test steps as Keras does, and finds the user's own line behind an operation of a traced one."""

import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import keras
import tensorflow as tf
from keras import tree

from tasks.foundation.errors import ModelError
from tasks.foundation.user_errors import USER_PACKAGE_PREFIX, function_error

P = ParamSpec("P")
R = TypeVar("R")

_X_ONLY = "without y, a custom step receives x itself and not a tuple, as in Keras's fit"
_FLOAT64 = (
    "examples that are yielded, or are in a tf.data.Dataset, keep their dtype, as in fit: give np.float32(x), or "
    "return whole arrays, which become float32"
)
SEED_REMEDY = "pass a keras.random.SeedGenerator that a layer holds to keras.random functions"


def overrides(model: keras.Model, name: str) -> bool:
    """Whether the model overrides a method of `keras.Model`, such as train_step."""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def not_converted(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as `tf.autograph.experimental.do_not_convert` does, and keep its type."""
    marked: Callable[P, R] = tf.autograph.experimental.do_not_convert(function)
    return marked


def called_like_fit(step: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Wrap a `train_step` or `test_step`, so that it receives its batch as in Keras's `fit` and `evaluate`.

    Args:
        step: the model's step.

    Returns:
        A function of (x,), (x, y) or (x, y, sample_weight); it passes (x,) on as x, unless x is several inputs, which
        would look like (x, y). It raises a `ModelError` if the step returns no dict.
    """

    def work(batch: Sequence[Any]) -> dict[str, Any]:
        alone = len(batch) == 1 and not isinstance(batch[0], tuple)
        return _as_logs(step(batch[0] if alone else tuple(batch)), step)

    return work


@not_converted
def _as_logs(returned: Any, step: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """What a step returned.

    Raises:
        ModelError: it is no dict.
    """
    if isinstance(returned, Mapping):
        return dict(returned)
    name = getattr(step, "__name__", "the step")
    kind = "None" if returned is None else f"a {type(returned).__name__}"
    fault = ModelError(
        function_error(step, f"{name} returned {kind}; return a dict of what to log, such as {{'loss': loss}}")
    )
    fault.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph would put its own message around it
    raise fault


def tracing_hints(model: keras.Model, batch: Sequence[Any], fault: BaseException) -> list[str]:
    """Return hints for an error that was raised while tracing a step on this batch."""
    own = overrides(model, "train_step") or overrides(model, "test_step")
    hints = [_X_ONLY] if own and len(batch) == 1 else []
    if "float64" in str(fault) and any(str(part.dtype) == "float64" for part in tree.flatten(tuple(batch))):
        hints.append(_FLOAT64)
    # TensorFlow cannot trace Keras's global seed generator, which each replica's thread creates for itself.
    return [*([SEED_REMEDY] if "seed_generator" in str(fault) else []), *hints]


IN_THE_GRAPH = " in the graph)"


def line_that_made(operation: Any) -> str:
    """Return text such as `, data.py, line 12: x = tf.random.uniform([])`; "" if no line is the user's.

    Args:
        operation: a `tf.Operation` of a traced graph.
    """
    files = {getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if _is_user_module(name)}
    frames = [frame for frame in operation.traceback or () if frame.filename in files]
    return f", {_shown(frames[-1].filename, frames[-1].lineno)}" if frames else ""


def place_of(operation: Any) -> str:
    """The user's line behind an operation; if there is none, its name in the graph, which has the layer's."""
    return line_that_made(operation) or f" ({operation.name}{IN_THE_GRAPH}"


def _shown(file: str, number: int) -> str:
    code = linecache.getline(file, number).strip()
    return f"{Path(file).name}, line {number}" + (f": {code}" if code else "")


def _is_user_module(name: str) -> bool:
    return name.startswith(USER_PACKAGE_PREFIX)
