"""The compiled training loop.

It replaces `model.fit`: steps are counted absolutely, nothing is read or reset where a run is cut, and
`fit(steps_per_execution=…)` crashes under MirroredStrategy. It calls Keras's own `model.train_step`, so compiled
losses, metrics, custom `train_step`s, clipping and mixed precision work.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.messages import listed
from tasks.foundation.model.keras_steps import not_converted
from tasks.foundation.model.random_operations import CLOCK, nodes_of, stateful_operations
from tasks.foundation.model.step_draws import StepDraws
from tasks.foundation.model.train_step import run_train_step

NOT_FOUND = -1

# Kernels that add floats in the order in which their threads finish, even with deterministic operations turned on.
_UNORDERED_SUMS = frozenset({"Bincount", "DenseBincount", "RaggedBincount", "SparseBincount"})


def make_loop(step: Callable[[Any], dict[str, Any]], accelerator: Accelerator, draws: StepDraws | None = None) -> Any:
    """Make a `tf.function` of (iterator, n) that runs n training steps.

    The iterator and n, an int64 scalar, are arguments, so that it is traced once. It carries no per-replica value.

    Args:
        step: one training step, see `build_train_step`.
        accelerator: the process's.
        draws: seeds of the step's random operations.

    Returns:
        A function that returns three values. `first_bad`, int64 scalar: index in [0, n) of the first step with a loss
        that is not finite, or `NOT_FOUND`. `waited`, float64 scalar: seconds that this host waited for batches.
        `losses`, float32 [local_replicas]: the loss of each of this host's replicas since metrics were reset; NaN if
        the step returns none.
    """
    strategy = accelerator.strategy
    # With deterministic operations, which TPUs do not have, TensorFlow refuses its own clock.
    own_clock = accelerator.environment.deterministic and accelerator.kind != "tpu"
    now = _python_time if own_clock else partial(tf.timestamp, name=CLOCK)

    def run_steps(iterator: Any, n: Any) -> Any:
        first_bad = tf.constant(NOT_FOUND, tf.int64)
        waited = tf.constant(0.0, tf.float64)
        losses = tf.fill([len(accelerator.local_replicas)], math.nan)
        for index in tf.range(n):
            batch, seconds = _next_batch(iterator, strategy, now)
            waited += seconds
            loss, of_replicas = run_train_step(step, strategy, batch, draws)
            if loss is not None:
                losses = of_replicas
                bad = tf.logical_not(tf.reduce_all(tf.math.is_finite(loss)))
                first_bad = tf.where(tf.logical_and(first_bad == NOT_FOUND, bad), index, first_bad)
        return first_bad, waited, losses

    return tf.function(run_steps, jit_compile=False)


@not_converted
def _next_batch(iterator: Any, strategy: Any, now: Callable[[], Any]) -> tuple[Any, Any]:
    """The next batch, and the seconds that this host waited for it."""
    begun = now()
    with tf.control_dependencies([begun]):
        batch = next(iterator)
    arrived = [part for value in tf.nest.flatten(batch) for part in strategy.experimental_local_results(value)]
    with tf.control_dependencies(arrived):
        # TensorFlow's own clock is the time of day, which can go back.
        return batch, tf.maximum(now() - begun, 0.0)


def _python_time() -> Any:
    """Seconds of Python's monotonic clock, float64 scalar; read each time the operation runs."""
    seconds = tf.numpy_function(time.monotonic, [], tf.float64, name=CLOCK)
    return tf.ensure_shape(seconds, [])


def nondeterminism_warnings(function: Any, *, intra_op_threads: int) -> tuple[str, ...]:
    """Why a resumed or repeated run can differ: one message for each reason.

    Args:
        function: the traced loop, a concrete function.
        intra_op_threads: number of threads that one operation may use.
    """
    words = []
    unsaved = stateful_operations(function)
    if unsaved:
        words.append(
            f"{listed(unsaved)} draw from TensorFlow's own random state or run Python code, and no checkpoint holds "
            "that state: a resumed run can differ. Draw with keras.random and a SeedGenerator, or with "
            "tf.random.Generator; keep the state of Python code in variables"
        )
    unordered = sorted({node.name for node in nodes_of(function) if _sums_in_any_order(node)})
    if unordered and intra_op_threads > 1:
        words.append(
            f"{listed(unordered)}: a weighted bincount adds floats in the order in which its {intra_op_threads} "
            "threads finish, also with train.deterministic: two runs can differ. Use "
            "tf.math.unsorted_segment_sum, or set accelerator.intra_op_threads: 1"
        )
    return tuple(words)


def _sums_in_any_order(node: Any) -> bool:
    return node.op in _UNORDERED_SUMS and tf.as_dtype(node.attr["T"].type).is_floating


def steps_within(seconds: float, steps_per_second: float) -> int:
    """Number of steps that take about `seconds`; at least 1."""
    return max(1, int(seconds * steps_per_second))
