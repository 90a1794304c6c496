"""Calls train and test steps as Keras does, scales their losses, and finds the user's line behind an operation.

Keras sums the replicas' gradients. Its own losses divide by the number of replicas before, so the sum is the mean over
the global batch. Its own `train_step` multiplies again what it logs. One of the user's logs half of the loss on two
replicas: here it is logged undivided. A loss that such a step computes itself is not divided, and its gradients are the
number of replicas times the mean.

A metric's variables are in each checkpoint, but what its code keeps in Python attributes is not: a cut run would log
other rows. So attributes that change while a step is traced, or metrics are read or reset, are put back, and named.
"""

import copy
import linecache
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.losses import loss

from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.text import listed
from baton.tasks.foundation.user_traceback import USER_PACKAGE_PREFIX, function_error

_LOGGER = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

_X_ONLY = "without y, a custom step receives x itself and not a tuple, as in Keras's fit"
_FLOAT64 = (
    "examples that are yielded, or are in a tf.data.Dataset, keep their dtype, as in fit: give np.float32(x), or "
    "return whole arrays, which become float32"
)
SEED_REMEDY = "pass a keras.random.SeedGenerator that a layer holds to keras.random functions"
IN_THE_GRAPH = " in the graph)"
_SCALE, _UNSCALE = "scale_loss_for_distribution", "unscale_loss_for_distribution"


def overrides(model: keras.Model, name: str) -> bool:
    """Whether the model overrides a method of `keras.Model`, such as train_step."""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def is_of_keras(value: object) -> bool:
    """Whether the class of a layer, a metric or a schedule is Keras's own."""
    return type(value).__module__.startswith("keras.")


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

    return with_python_state_put_back(getattr(step, "__self__", None), work)


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


# The Python attributes of metrics of the user's, as they were after their first reset.
_AttributesOf = WeakKeyDictionary[keras.metrics.Metric, dict[str, Any]]
_as_built: _AttributesOf = WeakKeyDictionary()
_named: set[tuple[str, str]] = set()


def each_metric(model: Any) -> Iterator[Any]:
    """Yield each metric of a model, with those that others hold."""
    for outer in getattr(model, "metrics", ()):
        yield from (outer, *getattr(outer, "metrics", ()))


def reset_metrics(model: keras.Model) -> None:
    """Reset all metrics of a model. Python attributes that this changes become what the first reset made of them."""
    before = _python_state(model)
    model.reset_metrics()
    _put_back(before, _as_built)


@contextmanager
def python_state_put_back(model: keras.Model) -> Iterator[None]:
    """Put back what the block, which reads metrics, changes in Python attributes of theirs."""
    before = _python_state(model)
    yield
    _put_back(before)


def with_python_state_put_back(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a step so that what it changes in Python attributes of metrics, while it is traced, is put back."""

    def work(batch: Any) -> Any:
        before = _python_state(model)
        logs = step(batch)
        _put_back(before)
        return logs

    return work


@not_converted
def _python_state(model: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The metrics of the user's, each with its attributes. Keras's own keep nothing in them."""
    return [(each, _copied(vars(each))) for each in each_metric(model) if not is_of_keras(each)]


@not_converted
def _put_back(before: Sequence[tuple[Any, dict[str, Any]]], wanted: _AttributesOf | None = None) -> None:
    """Put back attributes that have changed since, and name them once per process. What else has changed one stays.

    Args:
        before: the attributes then.
        wanted: what to set them to, by metric; the attributes of a new one are added to it. None: as before.
    """
    for metric, old in before:
        now = vars(metric)
        new = _copied(now)
        target = old if wanted is None else wanted.setdefault(metric, new)
        names = [name for name in {**old, **new} if _differ(old, new, name) and _differ(target, new, name)]
        # What a traced step has set belongs to its graph. TensorFlow raises if it is read outside.
        names = [name for name in names if not tf.is_symbolic_tensor(now.get(name))]
        for name in names:
            # Around Keras's own `__setattr__`, which only keeps track of variables.
            now.pop(name, None)
        now |= _copied({name: target[name] for name in names if name in target})
        of = f"metric {metric.name} ({type(metric).__name__})"
        unknown = [name for name in names if (of, name) not in _named]
        _named.update((of, name) for name in unknown)
        if unknown:
            _LOGGER.warning(
                "%s: its code changes %s in Python, which no checkpoint holds, so a cut run would log other values; it "
                "is put back after each row and evaluation. Keep it in a variable that reset_state leaves as it is: "
                "self.add_variable(shape=(), initializer='zeros', name=...)",
                of,
                listed([f"self.{name}" for name in unknown]),
            )


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    known = name in one, name in other
    return known[0] != known[1] or (all(known) and _compared(one[name]) != _compared(other[name]))


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the values that hold nothing but numbers, texts, tensors and arrays."""
    found = {}
    for name, value in attributes.items():
        if _compared(value) is not None:
            # Keras's lists and dicts hold their tracker, and so the metric's variables.
            plain = (kind(value) for kind in (list, dict, set) if isinstance(value, kind) and is_of_keras(value))
            found[name] = copy.deepcopy(next(plain, value))
    return found


def _compared(value: Any) -> Any:
    """A value as it is compared; None if it holds anything but numbers, texts, tensors and arrays."""
    if isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value):
        value = value.numpy()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), repr(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Mapping):
        parts = [_compared(each) for item in value.items() for each in item]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        parts = [_compared(each) for each in value]
    else:
        return None
    if isinstance(value, set | frozenset):
        parts.sort(key=repr)
    return None if None in parts else (type(value).__name__, parts)


def tracing_hints(model: keras.Model, batch: Sequence[Any], fault: BaseException) -> list[str]:
    """Return hints for an error that was raised while tracing a step on this batch."""
    own = overrides(model, "train_step") or overrides(model, "test_step")
    hints = [_X_ONLY] if own and len(batch) == 1 else []
    if "float64" in str(fault) and any(str(part.dtype) == "float64" for part in tree.flatten(tuple(batch))):
        hints.append(_FLOAT64)
    # TensorFlow cannot trace Keras's global seed generator, which each replica's thread creates for itself.
    return [*([SEED_REMEDY] if "seed_generator" in str(fault) else []), *hints]


def in_while_loop(within: Any = None) -> bool:
    """Whether what is being traced is in the body of a loop; with a graph, whether that loop is within it."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not within:
        if type(graph).__name__ == "WhileBodyFuncGraph":
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


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


class ScaledLosses:
    """The losses that Keras divided by the number of replicas while steps were traced.

    Several threads may trace at once: TensorFlow traces each replica in one of its own.
    """

    def __init__(self) -> None:
        self.count = 0
        self._users = 0
        self._lock = threading.Lock()
        self._undivided: dict[Any, Any] = {}  # by reference of a tensor
        self._originals: list[tuple[Any, str, Callable[..., Any]]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record losses within the block; outermost, the count begins at 0."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self.count = 0
                self._replace(loss, _SCALE, self._scale)
                self._replace(loss, _UNSCALE, self._unscale)
                self._replace(keras.metrics.Mean, "update_state", self._update)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    while self._originals:
                        setattr(*self._originals.pop())
                    self._undivided.clear()

    def undivided(self, tensor: Any) -> Any:
        """Return a tensor as it would be if the losses that it is computed from were not divided."""
        known = self._undivided
        if not known or not tf.is_symbolic_tensor(tensor):
            return tensor
        waiting = [tensor]
        while waiting:
            each = waiting[-1]
            missing = [] if each.ref() in known else [given for given in each.op.inputs if given.ref() not in known]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if each.ref() not in known:
                known.update(self._again(each.op))
        return known[tensor.ref()]

    def _again(self, op: Any) -> dict[Any, Any]:
        """The outputs of an operation with undivided inputs, by reference of its outputs."""
        inputs = [self._undivided[given.ref()] for given in op.inputs]
        changed = any(one is not other for one, other in zip(inputs, op.inputs, strict=True))
        if changed and not op.op_def.is_stateful:
            attributes = {key: op.node_def.attr[key] for key in op.node_def.attr if not key.startswith("_")}
            dtypes = [output.dtype for output in op.outputs]
            op_again = op.graph.create_op(op.type, inputs, dtypes, attrs=attributes, op_def=op.op_def)
            return {old.ref(): new for old, new in zip(op.outputs, op_again.outputs, strict=True)}
        return {output.ref(): output for output in op.outputs}

    def _replace(self, holder: Any, name: str, work: Callable[..., Any]) -> None:
        original = getattr(holder, name)
        self._originals.append((holder, name, original))
        setattr(holder, name, not_converted(lambda *arguments, **settings: work(original, *arguments, **settings)))

    def _scale(self, original: Callable[..., Any], value: Any) -> Any:
        self.count += 1
        divided = original(value)
        if divided is not value and tf.is_symbolic_tensor(divided):
            self._undivided[divided.ref()] = tf.convert_to_tensor(value)
        return divided

    def _unscale(self, original: Callable[..., Any], value: Any) -> Any:
        multiplied = original(value)
        if multiplied is not value and tf.is_symbolic_tensor(multiplied):
            self._undivided[multiplied.ref()] = multiplied
        return multiplied

    def _update(self, original: Callable[..., Any], metric: Any, values: Any, *arguments: Any, **settings: Any) -> Any:
        return original(metric, self.undivided(values), *arguments, **settings)


SCALED_LOSSES = ScaledLosses()  # one for the process, like the functions that it replaces


def summed_gradients_words(model: keras.Model, divided: int, *, reference: str, replicas: int) -> str:
    """What to tell the user of a step whose gradients are summed where Keras's own would average; "" if they are not.

    Args:
        model: its train step was traced.
        divided: number of losses that Keras divided meanwhile.
        replicas: number of replicas that took part.
    """
    own = next((name for name in ("train_step", "compute_loss") if overrides(model, name)), None)
    if replicas == 1 or divided or own is None:
        return ""
    logged = f", and Keras's train_step logs {replicas} times the loss" if own == "compute_loss" else ""
    return (
        f"{reference}: {own} computes its loss itself, and the gradients of the {replicas} replicas are summed, "
        f"as in Keras's fit: they are {replicas} times the mean that Keras's own step gives{logged}. To get the mean, "
        "divide the loss by tf.distribute.get_strategy().num_replicas_in_sync, or use a loss of keras.losses, which "
        "does so"
    )
