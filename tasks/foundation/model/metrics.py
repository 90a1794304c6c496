"""A model's metrics as Python floats."""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tasks.foundation.contracts.run_spec import KeepBest
from tasks.foundation.errors import ModelError
from tasks.foundation.model.returned_metrics import ReturnedMetrics, flatten_metrics


def take_metrics(model: keras.Model, strategy: Any, returned: ReturnedMetrics | None = None) -> dict[str, float]:
    """Read all metrics by name, nested ones as `outer/inner`, and reset them.

    Args:
        model: the model.
        strategy: the strategy in whose scope the metrics were created.
        returned: metrics of the values that a custom step returns.
    """
    with strategy.scope():
        values = dict(flatten_metrics("", model.get_metrics_result()))
        metrics = {name: _float(value) for name, value in (returned.of(values) if returned else values).items()}
        model.reset_metrics()
        if returned is not None:
            returned.reset()
    return metrics


def require_metric(rule: KeepBest | None, metrics: Iterable[str]) -> None:
    """Refuse `checkpoint.keep_best` if the model does not have its metric.

    Raises:
        ModelError: lists the model's metrics.
    """
    known = sorted(metrics)
    if rule is not None and rule.metric not in known:
        raise ModelError(
            f"checkpoint.keep_best.metric = {rule.metric!r} is not a metric of the model; it has: {', '.join(known)}"
        )


def _float(result: Any) -> float:
    # A result may be a variable; under a strategy only its tensor has a single value.
    value = result.value if isinstance(result, keras.Variable) else result
    return float(tf.convert_to_tensor(value))
