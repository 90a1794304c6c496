"""Validation with each example exactly once, on any number of replicas.

Full batches run on all replicas. The remainder runs unpadded on replica 0 alone: metrics from `metrics=[…]` ignore
sample weights, so padding would count.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tasks.foundation.dataset.reading_errors import original_read_errors
from tasks.foundation.errors import ModelError
from tasks.foundation.model.keras_steps import called_like_fit
from tasks.foundation.model.metrics import take_metrics
from tasks.foundation.model.returned_metrics import ReturnedMetrics
from tasks.foundation.model.train_step import op_errors_as_model_error
from tasks.foundation.user_code import describe


class Evaluator:
    """The compiled validation loops of one model."""

    def __init__(
        self, model: keras.Model, strategy: Any, *, reference: str, returned: ReturnedMetrics | None = None
    ) -> None:
        """Prepare the loops; nothing is traced yet.

        Args:
            model: a built and compiled model.
            strategy: the strategy in whose scope it was built.
            reference: the user's name of the model, `model.py:build_model`, for messages.
            returned: accumulates the values that the user's own test_step returns, if it has one.
        """
        self._model = model
        self._strategy = strategy
        self._reference = reference
        test_step = called_like_fit(model.test_step) if returned is None else returned.step
        self._returned = returned

        def run_batches(iterator: Any, n: Any) -> None:
            for _ in tf.range(n):
                strategy.run(test_step, args=(next(iterator),))

        def run_remainder(batch: Any) -> None:
            strategy.run(_on_first_replica, args=(test_step, batch))

        self._run_batches = tf.function(run_batches, jit_compile=False)
        self._run_remainder = tf.function(run_remainder, jit_compile=False)

    def evaluate(
        self, *, full: tf.data.Dataset, full_batches: int, remainder: tf.data.Dataset | None
    ) -> dict[str, float]:
        """Metrics over all examples.

        Args:
            full: per-replica batches of static size: `full_batches` times the number of replicas.
            full_batches: number of global batches in `full`.
            remainder: one smaller batch with the other examples, or None.

        Raises:
            ModelError: `test_step` cannot be traced, or one of its operations failed.
        """
        failed = f"{self._reference}: test_step failed on the validation examples"
        with self._strategy.scope(), op_errors_as_model_error(failed), original_read_errors():
            self._model.reset_metrics()
            if self._returned is not None:
                self._returned.reset()
            if full_batches:
                iterator = iter(self._strategy.distribute_datasets_from_function(lambda _: full))
                n = tf.constant(full_batches, tf.int64)
                self._traced(self._run_batches, iterator, n)(iterator, n)
            for batch in remainder or ():
                self._traced(self._run_remainder, batch)(batch)
        return take_metrics(self._model, self._strategy, self._returned)

    def _traced(self, function: Any, *arguments: Any) -> Any:
        try:
            function.get_concrete_function(*arguments)
        except (Exception, SystemExit) as fault:
            raise ModelError(f"{self._reference}: test_step cannot be traced: {describe(fault)}") from fault
        return function


def _on_first_replica(test_step: Callable[[Any], Any], batch: Any) -> None:
    """Run `test_step` on replica 0 only.

    MirroredStrategy traces each replica with its id. On a TPU all replicas run one program, which needs a condition.
    """
    context = tf.distribute.get_replica_context()
    known = tf.get_static_value(context.replica_id_in_sync_group)
    if known is not None:
        if known == 0:
            test_step(batch)
        return

    def run() -> Any:
        test_step(batch)
        return tf.constant(0)

    tf.cond(tf.equal(context.replica_id_in_sync_group, 0), run, lambda: tf.constant(0))
