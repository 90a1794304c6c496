"""Validation on any replica count: each example exactly once.

Full batches run distributed. The remainder runs unpadded on replica 0 alone, because metrics given as `metrics=[…]`
ignore sample weights, so padding would count.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tasks.foundation.dataset.reading_errors import reading_failures
from tasks.foundation.errors import ModelError
from tasks.foundation.model.keras_steps import as_fit_gives
from tasks.foundation.model.metrics import take_metrics
from tasks.foundation.model.returned_metrics import Returned
from tasks.foundation.model.train_step import step_failures
from tasks.foundation.user_code import describe


class Evaluator:
    """The compiled validation loops of one model."""

    def __init__(self, model: keras.Model, strategy: Any, *, reference: str, returned: Returned | None = None) -> None:
        """Nothing is traced yet.

        Args:
            model: with all its variables.
            strategy: in whose scope it was made.
            reference: what the user calls the model, for messages.
            returned: what keeps the values that a test_step of the user's own returns.
        """
        self._model = model
        self._strategy = strategy
        self._reference = reference
        test_step = as_fit_gives(model.test_step) if returned is None else returned.step
        self._returned = returned

        @tf.function(jit_compile=False)  # type: ignore[untyped-decorator]
        def run_batches(iterator: Any, n: Any) -> None:
            for _ in tf.range(n):
                strategy.run(test_step, args=(next(iterator),))

        @tf.function(jit_compile=False)  # type: ignore[untyped-decorator]
        def run_remainder(batch: Any) -> None:
            strategy.run(_on_first_replica, args=(test_step, batch))

        self._run_batches = run_batches
        self._run_remainder = run_remainder

    def evaluate(
        self, *, full: tf.data.Dataset, full_batches: int, remainder: tf.data.Dataset | None
    ) -> dict[str, float]:
        """Metrics over all examples.

        Args:
            full: per-replica batches of static size, `full_batches` times the replica count of them.
            full_batches: global batches in `full`.
            remainder: one batch of what is left, or None.

        Raises:
            ModelError: `test_step` cannot be traced, or an operation of it failed.
        """
        failed = f"{self._reference}: test_step failed on the validation examples"
        with self._strategy.scope(), step_failures(failed), reading_failures():
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
    """Under MirroredStrategy the replica's id is known when tracing; on TPU one program runs on all of them."""
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
