"""A model's metrics, and what its own step or `compute_metrics` returns, as numbers with names.

The result of a metric may be one number, several (`F1Score()` has one for each class), or a dict of both. A row and an
evaluation have one number for each name, so several become `f1_score/0`, `f1_score/1` and so on. What decides, such as
`checkpoint.keep_best` and a callback's monitor, needs one number.

Keras logs what a step returns, although no metric may hold it. A value that no metric computes becomes a running mean
over the examples since the last reset. A value that is computed from metrics only is computed anew from their sums, so
it is the same on any number of replicas; one that is computed from metrics and a batch is kept as it was last. Metrics
that the step neither updates nor returns are left out; they would stay 0.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras import tree

from baton.tasks.foundation.contracts.run_spec import KeepBest
from baton.tasks.foundation.errors import BatonError, ModelError
from baton.tasks.foundation.machine.devices import DEVICE_LOST_ERRORS
from baton.tasks.foundation.model.keras_steps import (
    SCALED_LOSSES,
    called_like_fit,
    each_metric,
    is_of_keras,
    not_converted,
    overrides,
    python_state_put_back,
    reset_metrics,
    tracing_hints,
)
from baton.tasks.foundation.model.randomness import StepDraws, exact_draws
from baton.tasks.foundation.model.sums import fix_sum_order
from baton.tasks.foundation.model.variables import handle_ids, with_inner_optimizers
from baton.tasks.foundation.text import listed
from baton.tasks.foundation.user_traceback import user_error

# A result with more numbers, such as the confusion matrix of many classes, is no curve.
MOST_VALUES = 64
_LOSS = "loss"
_READ, _GIVEN = "ReadVariableOp", "Placeholder"


class _Last(keras.metrics.Metric):  # type: ignore[misc]
    """The last value; the mean over replicas."""

    def __init__(self, name: str, shape: tuple[int, ...] = ()) -> None:
        super().__init__(name=name, dtype="float32")
        self.value = self.add_variable(shape, "zeros", aggregation="mean", name="value")

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        del sample_weight  # the last value has no weight
        self.value.assign(value)

    def result(self) -> Any:
        return self.value


class _Means(keras.metrics.Metric):  # type: ignore[misc]
    """The mean of each element."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__(name=name, dtype="float32")
        self.total = self.add_variable(shape, "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, value: Any, sample_weight: Any) -> None:
        weight = tf.cast(sample_weight, self.dtype)
        self.total.assign_add(value * weight)
        self.count.assign_add(weight)

    def result(self) -> Any:
        return tf.math.divide_no_nan(self.total.value, self.count.value)


class ReturnedMetrics:
    """Metrics of the values that a step returns.

    Attributes:
        metrics: by name; none of them belongs to the model.
        left_out: names of the model's metrics that are not logged.
        ignored: names of returned values that are not logged.
    """

    def __init__(
        self,
        model: keras.Model,
        step: Callable[[Any], dict[str, Any]],
        function: Any,
        logs: Any,
        *,
        logs_of_other_batch: Callable[[], dict[str, Any]],
    ) -> None:
        """Compare a traced step with the model's metrics.

        Args:
            function: the concrete function that was traced from it.
            logs: what the step returned while tracing, on one replica.
            logs_of_other_batch: the same for another number of examples; empty if the step takes none.
        """
        self._step = step
        # Keras keeps compiled metrics in one metric, whose result is a dict of theirs.
        self._groups = frozenset(metric.name for metric in model.metrics if isinstance(metric.result(), dict))
        held = {id(outside): inside for outside, inside in function.graph.captures}
        variables = {
            id(held[handle]): each
            for metric in model.metrics
            for each in metric.variables
            for handle in handle_ids(each.value)
            if handle in held
        }
        owners = {
            name: {id(held[handle]) for each in metric.variables for handle in handle_ids(each.value) if handle in held}
            for metric in model.metrics
            for name in metric_names(metric)
        }
        self.metrics: dict[str, keras.metrics.Metric] = {}
        self._derived: dict[str, Callable[[], Any]] = {}
        ignored = []
        returned = dict(self._named(logs))
        others: Mapping[str, Any] | None = None
        for name, value in returned.items():
            sources = _sources(value) & variables.keys() if tf.is_symbolic_tensor(value) else set()
            if sources & owners.get(name, set()):
                continue
            shape = _shape(name, value)
            derived = _derived(value, variables) if sources and shape is not None else None
            if shape and derived is None:
                others = dict(self._named(logs_of_other_batch())) if others is None else others
                # One number an example is no curve.
                shape = shape if name in others and _shape(name, others[name]) == shape else None
            if shape is None:
                ignored.append(name)
            elif derived is not None:
                self._derived[name] = derived
            elif sources:
                self.metrics[name] = _Last(name, shape)
            else:
                self.metrics[name] = _Means(name, shape) if shape else keras.metrics.Mean(name=name, dtype="float32")
        self._names = tuple(name for name in returned if name in self.metrics or name in self._derived)
        self.left_out = frozenset(name for name, handles in owners.items() if not handles and name not in returned)
        self.ignored = tuple(ignored)

    def step(self, batch: Sequence[Any]) -> dict[str, Any]:
        """Run the step on one replica's batch, and record what it returns."""
        logs = self._step(batch)
        self.keep(logs, batch)
        return logs

    @not_converted
    def keep(self, logs: dict[str, Any], batch: Sequence[Any]) -> None:
        """Record what the step has returned for one replica's batch."""
        examples = tf.shape(tree.flatten(batch)[0])[0]
        for name, value in self._named(logs):
            if name in self.metrics:
                number = tf.cast(SCALED_LOSSES.undivided(tf.convert_to_tensor(value)), tf.float32)
                number = tf.reduce_mean(number) if name == _LOSS else number
                self.metrics[name].update_state(number, sample_weight=examples)

    def _named(self, logs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield what the step returns by name; the metrics of a group by their own names, as Keras logs them."""
        for key, value in logs.items():
            yield from flatten_metrics("" if key in self._groups and isinstance(value, dict) else str(key), value)

    def of(self, tracked: dict[str, Any]) -> dict[str, Any]:
        """Return the values to log, given the values of the model's own metrics."""
        kept = {name: value for name, value in tracked.items() if name not in self.left_out}
        own = {
            name: self._derived[name]() if name in self._derived else self.metrics[name].result()
            for name in self._names
        }
        return {**kept, **own}

    def reset(self) -> None:
        """Reset all metrics."""
        for metric in self.metrics.values():
            metric.reset_state()


def returns_own_values(model: keras.Model, name: str) -> bool:
    """Whether what a model's `train_step` or `test_step` returns may differ from the results of its metrics."""
    return overrides(model, name) or overrides(model, "compute_metrics")


def trace_returned_metrics(
    model: keras.Model, name: str, batch: Sequence[Any], *, reference: str, draws: StepDraws
) -> ReturnedMetrics | None:
    """Trace `train_step` or `test_step` to find what it returns; None if those are Keras's own results.

    Args:
        name: train_step or test_step.
        batch: see `create_variables`.
        reference: the function's name in the run file, for messages.
        draws: seeds of the step's random operations; it is traced for their replicas.

    Raises:
        ModelError: the step cannot be traced.
    """
    if not returns_own_values(model, name):
        return None
    step, strategy = called_like_fit(getattr(model, name)), draws.accelerator.strategy
    tensors = tree.map_structure(tf.convert_to_tensor, tuple(batch))

    def traced(arguments: Any) -> tuple[Any, dict[str, Any]]:
        """The concrete function of a batch, and what the step has returned on the first replica."""
        seen: list[Any] = []

        def record(parts: Sequence[Any]) -> None:
            seen.append(step(parts))

        def on_replicas(*parts: Any) -> None:
            with exact_draws(draws):
                strategy.run(record, args=(parts,))

        return tf.function(on_replicas, jit_compile=False).get_concrete_function(*arguments), seen[0]

    def logs_of_other_batch() -> dict[str, Any]:
        fewer = len(tree.flatten(tensors)[0]) // 2
        try:
            return traced(tree.map_structure(lambda each: each[:fewer] if fewer else tf.repeat(each, 2, 0), tensors))[1]
        except DEVICE_LOST_ERRORS:
            raise
        except (Exception, SystemExit):  # noqa: BLE001 - user code may raise anything if it takes no other batch
            return {}

    try:
        function, logs = traced(tensors)
    except (BatonError, *DEVICE_LOST_ERRORS):
        raise
    except (Exception, SystemExit) as fault:
        what = f"{reference}: {name} cannot be traced:"
        raise ModelError(user_error(what, fault, hints=tracing_hints(model, batch, fault))) from fault
    with strategy.scope():
        return ReturnedMetrics(model, step, function, logs, logs_of_other_batch=logs_of_other_batch)


def flatten_metrics(prefix: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield values by name, nested ones as `outer/inner`."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from flatten_metrics(f"{prefix}/{key}" if prefix else str(key), value)
    else:
        yield prefix, values


def metric_names(metric: keras.metrics.Metric) -> list[str]:
    """Return the names under which a metric's results are logged."""
    result = metric.result()
    return [name for name, _ in flatten_metrics("", result)] if isinstance(result, dict) else [metric.name]


def as_numbers(value: Any) -> Any:
    """Return a value as a tensor of numbers; None if it is none, such as a text."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        return None
    return tensor if tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool else None


def _shape(name: str, value: Any) -> tuple[int, ...] | None:
    """The shape that is logged of a value: () for a number; None if the value cannot be logged."""
    tensor = as_numbers(value)
    if tensor is None or name == _LOSS:  # the mean of a loss per example is the loss
        return None if tensor is None else ()
    known = tensor.shape.is_fully_defined() and 0 < tensor.shape.num_elements() <= MOST_VALUES
    return tuple(tensor.shape.as_list()) if known else None


def _sources(tensor: Any) -> set[int]:
    """Ids of all graph tensors that a tensor is computed from."""
    seen: set[int] = set()
    waiting = [tensor]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            waiting.extend(each.op.inputs)
    return seen


def _derived(value: Any, variables: Mapping[int, keras.Variable]) -> Callable[[], Any] | None:
    """A function that computes a value of a traced step anew; None if it needs more than the variables of metrics.

    Args:
        value: the value in the step's graph.
        variables: variables of metrics, by the id of their handle in that graph.
    """
    reads: dict[str, keras.Variable] = {}
    nodes: dict[str, Any] = {}
    waiting = [value.op]
    while waiting:
        op = waiting.pop()
        if op.name in nodes:
            continue
        node = nodes[op.name] = tf.compat.v1.NodeDef(name=op.name)
        if op.type == _READ and id(op.inputs[0]) in variables:
            reads[op.name] = variables[id(op.inputs[0])]
            node.op = _GIVEN
            node.attr["dtype"].type = op.outputs[0].dtype.as_datatype_enum
        elif op.op_def.is_stateful or op.type == _GIVEN:
            return None
        else:
            # Without its place, and without what the step does before: the sums are complete then.
            node.op = op.type
            node.input.extend(tensor.name for tensor in op.inputs)
            for key in (key for key in op.node_def.attr if not key.startswith("_")):
                node.attr[key].CopyFrom(op.node_def.attr[key])
            waiting.extend(tensor.op for tensor in op.inputs)
    calls = any(attribute.HasField("func") for node in nodes.values() for attribute in node.attr.values())
    library = value.graph.as_graph_def().library if calls else None
    whole = tf.compat.v1.GraphDef(node=nodes.values(), library=library)

    def compute(*sums: Any) -> Any:
        given = {f"{name}:0": each for name, each in zip(reads, sums, strict=True)}
        return tf.graph_util.import_graph_def(whole, input_map=given, return_elements=[value.name])[0]

    function = tf.function(compute, jit_compile=False)
    return lambda: function(*(tf.convert_to_tensor(variable.value) for variable in reads.values()))


@dataclass(slots=True)
class Results:
    """The results of all metrics at one moment.

    Attributes:
        numbers: what is logged, by name.
        shapes: shapes of the results with several numbers, by name. They are in `numbers` as `name/0`, `name/1`.
        left_out: what the results are that are not logged, by name, such as "a str".
    """

    numbers: dict[str, float] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, result: Any) -> None:
        """Add one result."""
        # A result may be a variable; under a strategy only its tensor has a single value.
        tensor = as_numbers(result.value if isinstance(result, keras.Variable) else result)
        if tensor is None:
            self.left_out[name] = "None" if result is None else f"a {type(result).__name__}"
        else:
            self.add_array(name, np.asarray(tensor.numpy(), np.float64))

    def add_array(self, name: str, array: npt.NDArray[np.float64]) -> None:
        """Add one result, an array of any shape."""
        if array.size == 1:
            self.numbers[name] = array.item()
        elif not 0 < array.size <= MOST_VALUES:
            self.left_out[name] = f"{array.size:,} numbers"
        else:
            self.shapes[name] = array.shape
            self.numbers |= {"/".join([name, *map(str, index)]): float(value) for index, value in np.ndenumerate(array)}

    def require_number(self, name: str, asked_by: str, *, prefix: str = "") -> None:
        """Refuse the name of a metric whose result is no single number; other names pass.

        Args:
            name: of a metric.
            asked_by: who needs it, for the message.
            prefix: what it calls metrics by, such as `val_`.

        Raises:
            ModelError: names the shape, or what else the result is.
        """
        remedy = 'make its result one number, for instance with average="macro"'
        if name in self.shapes:
            shape = self.shapes[name]
            raise ModelError(
                f"{asked_by} is a metric of shape {shape_words(shape)}, and one number decides; {remedy}, or name one "
                f"of {_names_of_elements(prefix + name, shape)}"
            )
        if name in self.left_out:
            raise ModelError(f"{asked_by} is a metric whose result is {self.left_out[name]}; {remedy}")

    def words(self) -> list[str]:
        """What a user should know of results that are no single numbers, a line each."""
        lines = [
            f"metric {name} has shape {shape_words(shape)}, and is logged as {_names_of_elements(name, shape)}"
            for name, shape in self.shapes.items()
        ]
        if self.left_out:
            what = listed([f"{name} ({words})" for name, words in self.left_out.items()])
            lines.append(f"not logged, because a result needs 1 to {MOST_VALUES} numbers: {what}")
        return lines


def read_results(model: keras.Model, strategy: Any, returned: ReturnedMetrics | None = None) -> Results:
    """Read all metrics. For arguments see `take_metrics`."""
    results = Results()
    with strategy.scope(), python_state_put_back(model):
        values = dict(flatten_metrics("", model.get_metrics_result()))
        for name, value in (returned.of(values) if returned else values).items():
            results.add(name, value)
    return results


def take_metrics(model: keras.Model, strategy: Any, returned: ReturnedMetrics | None = None) -> dict[str, float]:
    """Read all metrics by name, nested ones as `outer/inner`, and reset them.

    Args:
        strategy: the strategy in whose scope the metrics were created.
        returned: metrics of the values that a custom step returns.
    """
    numbers = read_results(model, strategy, returned).numbers
    with strategy.scope():
        reset_metrics(model)
        if returned is not None:
            returned.reset()
    return numbers


class RowMetrics:
    """Takes the metrics of one row after the other as `take_metrics` does, with one call of TensorFlow for a row.

    Keras's own metrics are computed in a graph for that, as `fit` computes them. A metric of the user's may keep state
    in Python, which a graph would freeze; and the hosts of a run must agree on the order of their collectives.
    """

    def __init__(self, model: keras.Model, strategy: Any, returned: ReturnedMetrics | None, *, hosts: int) -> None:
        """For arguments see `take_metrics`; `hosts` share the strategy."""
        self._model, self._strategy, self._returned = model, strategy, returned
        self._in_graph = hosts == 1 and returned is None and _are_of_keras(model)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._function: Any = None

    def take(self) -> dict[str, float]:
        """Read all metrics and reset them."""
        if not self._in_graph:
            return take_metrics(self._model, self._strategy, self._returned)
        with self._strategy.scope():
            if self._function is None:
                work = not_converted(self._numbers_then_reset)
                self._function = tf.function(work, jit_compile=False).get_concrete_function()
                fix_sum_order(self._function, self._strategy)
            numbers = self._function().numpy()
        results = Results()
        for name, shape in self._shapes.items():
            own, numbers = np.split(numbers, [math.prod(shape)])
            results.add_array(name, own.reshape(shape))
        return results.numbers

    def _numbers_then_reset(self) -> Any:
        """All results, one after the other, float64 [n]."""
        values = flatten_metrics("", self._model.get_metrics_result())
        found = {name: tf.convert_to_tensor(value) for name, value in values}
        self._shapes = {name: tuple(each.shape.as_list()) for name, each in found.items()}
        numbers = tf.concat([tf.reshape(tf.cast(each, tf.float64), [-1]) for each in found.values()], axis=0)
        with tf.control_dependencies([numbers]):
            self._model.reset_metrics()
        return numbers


def _are_of_keras(model: keras.Model) -> bool:
    """Whether a model has metrics, all of them Keras's own."""
    metrics = list(each_metric(model))
    return bool(metrics) and all(map(is_of_keras, metrics)) and not overrides(model, "get_metrics_result")


def require_metric(rule: KeepBest | None, results: Results) -> None:
    """Refuse `checkpoint.keep_best` if the model does not have its metric, or if that is no single number.

    Raises:
        ModelError: lists the model's metrics, or names the metric's shape.
    """
    if rule is None or rule.metric in results.numbers:
        return
    asked_by = f"checkpoint.keep_best.metric = {rule.metric!r}"
    results.require_number(rule.metric, asked_by)
    raise ModelError(f"{asked_by} is not a metric of the model; it has: {', '.join(sorted(results.numbers))}")


def shape_words(shape: tuple[int, ...]) -> str:
    """`(3)`, `(2, 4)`."""
    return f"({', '.join(map(str, shape))})"


def _names_of_elements(name: str, shape: tuple[int, ...]) -> str:
    first, last = (0 for _ in shape), (size - 1 for size in shape)
    return " to ".join("/".join([name, *map(str, index)]) for index in (first, last))


def learning_rate_of(model: Any) -> float | None:
    """Return the learning rate of a model's optimizer at its current iteration: the one that the next step uses.

    Only variables and Keras's own schedules are read: a schedule of the user's may keep state, which an additional call
    could change.

    Returns:
        The learning rate; None if the model has no optimizer, or another kind of schedule, or a `MultiOptimizer`,
        whose optimizers have one each.
    """
    optimizer, rate = _rate_of(model)
    if isinstance(rate, keras.Variable):
        return float(rate.numpy())
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    if optimizer is None or not is_schedule or not is_of_keras(rate):
        return None
    # Keras gives a schedule the batches, `iterations` are the updates: with accumulated gradients they are fewer.
    return float(rate(optimizer._iterations))


def unsettable_rate(model: keras.Model) -> str:
    """Return what a model's optimizer has in place of a learning rate that can be set; "" if it can be.

    A schedule or a function decides at each step itself, and Keras refuses to assign to it.
    """
    optimizer, rate = _rate_of(model)
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return "a MultiOptimizer"
    if rate is None or isinstance(rate, keras.Variable):
        return ""
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    name = type(rate).__name__ if is_schedule else getattr(rate, "__name__", type(rate).__name__)
    return f"{type(optimizer).__name__} with the {'schedule' if is_schedule else 'function'} {name}"


def _rate_of(model: Any) -> tuple[Any, Any]:
    """The compiled optimizer, and its learning rate: a variable, a schedule or a function; None if there is none."""
    optimizer: Any = getattr(model, "optimizer", None)
    # Loss scaling wraps the optimizer.
    optimizer = next(each for each in with_inner_optimizers(optimizer) if not hasattr(each, "inner_optimizer"))
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return optimizer, None  # its own rate is 0, and not used
    # Keras has no public way to tell a schedule from a variable.
    return optimizer, getattr(optimizer, "_learning_rate", None)
