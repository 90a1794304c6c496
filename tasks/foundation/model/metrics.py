"""A model's metrics as plain numbers."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tasks.foundation.contracts.run_spec import KeepBest
from tasks.foundation.errors import ModelError


def take_metrics(model: keras.Model, strategy: Any) -> dict[str, float]:
    """Read all metrics by name, nested ones as `outer/inner`, and reset them."""
    with strategy.scope():
        metrics = dict(_flat("", model.get_metrics_result()))
        model.reset_metrics()
    return metrics


def require_metric(rule: KeepBest | None, metrics: Iterable[str]) -> None:
    """Refuse to look for the best by a metric that the model does not have.

    Raises:
        ModelError: naming those that it has.
    """
    known = sorted(metrics)
    if rule is not None and rule.metric not in known:
        raise ModelError(
            f"checkpoint.keep_best.metric = {rule.metric!r} is no metric of the model; it has: {', '.join(known)}"
        )


def _flat(prefix: str, values: Any) -> Iterator[tuple[str, float]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flat(f"{prefix}/{key}" if prefix else key, value)
    else:
        # A result may be a variable, which under a strategy has one value only once it is a tensor.
        value = values.value if isinstance(values, keras.Variable) else values
        yield prefix, float(tf.convert_to_tensor(value))
