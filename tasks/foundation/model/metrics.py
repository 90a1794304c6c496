"""A model's metrics as plain numbers."""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tasks.foundation.contracts.run_spec import KeepBest
from tasks.foundation.errors import ModelError
from tasks.foundation.model.returned_metrics import Returned, flat


def take_metrics(model: keras.Model, strategy: Any, returned: Returned | None = None) -> dict[str, float]:
    """Read all metrics by name, nested ones as `outer/inner`, and reset them.

    Args:
        model: whose they are.
        strategy: in whose scope they were made.
        returned: what keeps the values that a step of the user's own returns.
    """
    with strategy.scope():
        values = dict(flat("", model.get_metrics_result()))
        metrics = {name: _float(value) for name, value in (returned.of(values) if returned else values).items()}
        model.reset_metrics()
        if returned is not None:
            returned.reset()
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


def _float(result: Any) -> float:
    # A result may be a variable, which under a strategy has one value only once it is a tensor.
    value = result.value if isinstance(result, keras.Variable) else result
    return float(tf.convert_to_tensor(value))
