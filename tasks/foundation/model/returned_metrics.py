"""What a step of the user's own returns, as metrics: Keras logs it, though no metric of the model holds it.

A value that comes from no metric becomes a running mean over the examples since metrics were last reset, and one that
comes from a metric of another name is taken as it was last: it is a mean already. Metrics that the step neither updates
nor returns are left out, for they would say 0 for ever.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tasks.foundation.accelerator.strategy import OUTER_CAUSES, Accelerator
from tasks.foundation.errors import BatonError, ModelError
from tasks.foundation.messages import message
from tasks.foundation.model.keras_steps import as_fit_gives, has_own, hints_about
from tasks.foundation.model.variables import components
from tasks.foundation.user_code import describe

_LOSS = "loss"


class _Last(keras.metrics.Metric):  # type: ignore[misc]
    """The last value; of several replicas the mean."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.value = self.add_variable((), "zeros", aggregation="mean", name="value")

    def update_state(self, value: Any, sample_weight: Any = None) -> None:  # noqa: ARG002 - as a mean has it
        self.value.assign(value)

    def result(self) -> Any:
        return self.value


class Returned:
    """Metrics of what a step returns.

    Attributes:
        metrics: by name; none of them is the model's.
        left_out: names of the model's metrics that are not to be logged.
        ignored: names of returned values that are no scalars.
    """

    def __init__(self, model: keras.Model, step: Callable[[Any], dict[str, Any]], function: Any, logs: Any) -> None:
        """Compare a traced step with the metrics of its model.

        Args:
            model: with all its variables.
            step: what was traced, a function of a batch.
            function: the concrete function.
            logs: what the step returned there, on one replica.
        """
        self._step = step
        held = {id(outside): id(inside) for outside, inside in function.graph.captures}
        owners = {
            name: {held[handle] for handle in _handles(metric) if handle in held}
            for metric in model.metrics
            for name in names_of(metric)
        }
        of_metrics = set().union(*owners.values())
        self.metrics: dict[str, keras.metrics.Metric] = {}
        ignored = []
        returned = dict(flat("", logs))
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
        """The step on one replica's batch; what it returns is kept."""
        logs = self._step(batch)
        self._keep(logs, batch)
        return logs

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _keep(self, logs: dict[str, Any], batch: Sequence[Any]) -> None:
        examples = tf.shape(tree.flatten(batch)[0])[0]
        for name, value in flat("", logs):
            if name in self.metrics:
                number = tf.reduce_mean(tf.cast(tf.convert_to_tensor(value), tf.float32))
                self.metrics[name].update_state(number, sample_weight=examples)

    def of(self, tracked: dict[str, Any]) -> dict[str, Any]:
        """What to log, given what the model's own metrics say."""
        kept = {name: value for name, value in tracked.items() if name not in self.left_out}
        return {**kept, **{name: metric.result() for name, metric in self.metrics.items()}}

    def reset(self) -> None:
        """Begin anew."""
        for metric in self.metrics.values():
            metric.reset_state()


def returned_by(
    model: keras.Model, name: str, batch: Sequence[Any], *, reference: str, accelerator: Accelerator
) -> Returned | None:
    """What the model's own `train_step` or `test_step` returns, found by tracing it; None if the step is Keras's.

    Args:
        model: with all its variables.
        name: train_step or test_step.
        batch: see `make_variables`.
        reference: what the user calls the model, for messages.
        accelerator: whose replicas the step is traced for.

    Raises:
        ModelError: it cannot be traced.
    """
    if not has_own(model, name):
        return None
    step = as_fit_gives(getattr(model, name))
    seen: list[Any] = []

    def keeping(parts: Sequence[Any]) -> None:
        seen.append(step(parts))

    def of_replicas(*parts: Any) -> None:
        accelerator.strategy.run(keeping, args=(parts,))

    tensors = tree.map_structure(tf.convert_to_tensor, tuple(batch))
    try:
        function = tf.function(of_replicas, jit_compile=False).get_concrete_function(*tensors)
    except (BatonError, *OUTER_CAUSES):
        raise
    except (Exception, SystemExit) as fault:
        told = f"{reference}: {name} cannot be traced: {describe(fault)}"
        raise ModelError(message(told, hints=hints_about(model, batch, fault))) from fault
    with accelerator.strategy.scope():
        return Returned(model, step, function, seen[0])


def flat(prefix: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Values by name, nested ones as `outer/inner`."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from flat(f"{prefix}/{key}" if prefix else str(key), value)
    else:
        yield prefix, values


def names_of(metric: keras.metrics.Metric) -> list[str]:
    """The names under which a metric's results are logged."""
    result = metric.result()
    return [name for name, _ in flat("", result)] if isinstance(result, dict) else [metric.name]


def _handles(metric: keras.metrics.Metric) -> set[int]:
    """Ids of the handles behind a metric's variables; TPUStrategy packs those of all replicas into one more."""
    values = [variable.value for variable in metric.variables]
    handles = [part.handle for value in values for part in components(value)]
    packed = [getattr(value, "_packed_var", None) for value in values]
    return {id(handle) for handle in [*handles, *(each.packed_handle for each in packed if each is not None)]}


def _sources(tensor: Any) -> set[int]:
    """Ids of all tensors of its graph that a tensor is computed from."""
    seen: set[int] = set()
    waiting = [tensor]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            waiting.extend(each.op.inputs)
    return seen


def _is_number(name: str, value: Any) -> bool:
    """Whether it can be logged: a scalar, or the loss of each example, whose mean is the loss."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        return False
    is_number = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
    return bool(is_number and (tensor.shape.rank == 0 or name == _LOSS))
