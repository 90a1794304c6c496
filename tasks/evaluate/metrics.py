"""The metrics of a model as an evaluation adds them up."""

from collections.abc import Sequence
from typing import Any

import keras

from tasks.foundation.model.keras_steps import called_like_fit
from tasks.foundation.model.metrics import take_metrics
from tasks.foundation.model.returned_metrics import ReturnedMetrics


class Metrics:
    """Runs the model's `test_step`; the result is its metrics by name."""

    is_idle = False

    def __init__(self, model: keras.Model, strategy: Any, returned: ReturnedMetrics | None = None) -> None:
        """Prepare it; nothing is traced yet.

        Args:
            model: a built and compiled model.
            strategy: the strategy in whose scope it was built.
            returned: accumulates the values that the user's own test_step returns, if it has one.
        """
        self._model = model
        self._strategy = strategy
        self._returned = returned
        self._step = called_like_fit(model.test_step) if returned is None else returned.step

    def step(self, batch: Sequence[Any]) -> Any:
        """Update the metrics with one replica's batch."""
        return self._step(batch)

    def reset(self) -> None:
        """Reset all metrics."""
        self._model.reset_metrics()
        if self._returned is not None:
            self._returned.reset()

    def take(self) -> dict[str, float]:
        """Read all metrics, and reset them."""
        return take_metrics(self._model, self._strategy, self._returned)
