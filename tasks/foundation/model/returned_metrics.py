"""Metrics of what a custom step returns: Keras logs these values, although no metric of the model holds them.

A value that no metric computes becomes a running mean over the examples since the last reset. A value that comes from a
metric of another name is used as it is, because it is a mean already. Metrics that the step neither updates nor returns
are left out; they would stay 0.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tasks.foundation.accelerator.strategy import DEVICE_LOST_ERRORS, Accelerator
from tasks.foundation.errors import BatonError, ModelError
from tasks.foundation.model.keras_steps import called_like_fit, not_converted, overrides, tracing_hints
from tasks.foundation.model.step_draws import StepDraws
from tasks.foundation.model.traced_draws import exact_draws
from tasks.foundation.model.variables import handle_ids
from tasks.foundation.user_errors import user_error

_LOSS = "loss"


class _Last(keras.metrics.Metric):  # type: ignore[misc]
    """The last value; the mean over replicas."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.value = self.add_variable((), "zeros", aggregation="mean", name="value")

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        del sample_weight  # the last value has no weight
        self.value.assign(value)

    def result(self) -> Any:
        return self.value


class ReturnedMetrics:
    """Metrics of the values that a step returns.

    Attributes:
        metrics: by name; none of them belongs to the model.
        left_out: names of the model's metrics that are not logged.
        ignored: names of returned values that are not scalars.
    """

    def __init__(self, model: keras.Model, step: Callable[[Any], dict[str, Any]], function: Any, logs: Any) -> None:
        """Compare a traced step with the model's metrics.

        Args:
            model: with all its variables.
            step: the step, a function of a batch.
            function: the concrete function that was traced from it.
            logs: what the step returned while tracing, on one replica.
        """
        self._step = step
        # Keras keeps compiled metrics in one metric, whose result is a dict of theirs.
        self._groups = frozenset(metric.name for metric in model.metrics if isinstance(metric.result(), dict))
        held = {id(outside): id(inside) for outside, inside in function.graph.captures}
        owners = {
            name: {held[handle] for each in metric.variables for handle in handle_ids(each.value) if handle in held}
            for metric in model.metrics
            for name in metric_names(metric)
        }
        of_metrics = set().union(*owners.values())
        self.metrics: dict[str, keras.metrics.Metric] = {}
        ignored = []
        returned = dict(self._named(logs))
        for name, value in returned.items():
            sources = _sources(value) & of_metrics if tf.is_symbolic_tensor(value) else set()
            if sources & owners.get(name, set()):
                continue
            if not _is_number(name, value):
                ignored.append(name)
            else:
                self.metrics[name] = _Last(name) if sources else keras.metrics.Mean(name=name, dtype="float32")
        self.left_out = frozenset(name for name, handles in owners.items() if not handles and name not in returned)
        self.ignored = tuple(ignored)

    def step(self, batch: Sequence[Any]) -> dict[str, Any]:
        """Run the step on one replica's batch, and record what it returns."""
        logs = self._step(batch)
        self._keep(logs, batch)
        return logs

    @not_converted
    def _keep(self, logs: dict[str, Any], batch: Sequence[Any]) -> None:
        examples = tf.shape(tree.flatten(batch)[0])[0]
        for name, value in self._named(logs):
            if name in self.metrics:
                number = tf.reduce_mean(tf.cast(tf.convert_to_tensor(value), tf.float32))
                self.metrics[name].update_state(number, sample_weight=examples)

    def _named(self, logs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield what the step returns by name; the metrics of a group by their own names, as Keras logs them."""
        for key, value in logs.items():
            yield from flatten_metrics("" if key in self._groups and isinstance(value, dict) else str(key), value)

    def of(self, tracked: dict[str, Any]) -> dict[str, Any]:
        """Return the values to log, given the values of the model's own metrics."""
        kept = {name: value for name, value in tracked.items() if name not in self.left_out}
        return {**kept, **{name: metric.result() for name, metric in self.metrics.items()}}

    def reset(self) -> None:
        """Reset all metrics."""
        for metric in self.metrics.values():
            metric.reset_state()


def trace_returned_metrics(
    model: keras.Model,
    name: str,
    batch: Sequence[Any],
    *,
    reference: str,
    accelerator: Accelerator,
    draws: StepDraws | None = None,
) -> ReturnedMetrics | None:
    """Trace a custom `train_step` or `test_step` to find what it returns; None if the step is Keras's own.

    Args:
        model: with all its variables.
        name: train_step or test_step.
        batch: see `create_variables`.
        reference: the function's name in the run file, for messages.
        accelerator: the step is traced for its replicas.
        draws: seeds of the step's random operations.

    Raises:
        ModelError: the step cannot be traced.
    """
    if not overrides(model, name):
        return None
    step = called_like_fit(getattr(model, name))
    seen: list[Any] = []

    def record(parts: Sequence[Any]) -> None:
        seen.append(step(parts))

    def on_replicas(*parts: Any) -> None:
        with exact_draws(draws):
            accelerator.strategy.run(record, args=(parts,))

    tensors = tree.map_structure(tf.convert_to_tensor, tuple(batch))
    try:
        function = tf.function(on_replicas, jit_compile=False).get_concrete_function(*tensors)
    except (BatonError, *DEVICE_LOST_ERRORS):
        raise
    except (Exception, SystemExit) as fault:
        what = f"{reference}: {name} cannot be traced:"
        raise ModelError(user_error(what, fault, hints=tracing_hints(model, batch, fault))) from fault
    with accelerator.strategy.scope():
        return ReturnedMetrics(model, step, function, seen[0])


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


def _is_number(name: str, value: Any) -> bool:
    """Whether the value can be logged: a scalar, or a loss per example, whose mean is the loss."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        return False
    is_number = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
    return bool(is_number and (tensor.shape.rank == 0 or name == _LOSS))
