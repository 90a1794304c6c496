"""The compiled training loop.

An own loop and not `model.fit`: steps are counted absolutely, nothing is read or reset at the cuts, and
`fit(steps_per_execution=…)` crashes under MirroredStrategy. `model.train_step` is Keras's own, so compiled losses,
metrics, custom `train_step`s, clipping and mixed precision hold.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.messages import listed
from tasks.foundation.model.train_step import take_step

NOT_FOUND = -1
_CLOCK = "baton_clock"

# Kernels whose state no checkpoint holds: they draw from TensorFlow's own random state, or run Python code.
_STATEFUL = frozenset(
    {
        "AllCandidateSampler",
        "EagerPyFunc",
        "FixedUnigramCandidateSampler",
        "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "PyFunc",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "ThreadUnsafeUnigramCandidateSampler",
        "TruncatedNormal",
        "UniformCandidateSampler",
    }
)

# Kernels that add up floats in the order in which threads come: also where operations are to be deterministic.
_SUMMED_IN_ANY_ORDER = frozenset({"Bincount", "DenseBincount", "RaggedBincount", "SparseBincount"})


def make_loop(step: Callable[[Any], dict[str, Any]], accelerator: Accelerator) -> Any:
    """A `tf.function` of (iterator, n) that runs n steps, each as `stepping.step_of` gives it.

    It returns three values. An int64 scalar: the index, in [0, n), of the first step after which the running loss was
    not finite, or `NOT_FOUND`. A float64 scalar: seconds that this host waited for its next batches. And float32
    [local_replicas]: the loss since metrics were reset of each replica that this host feeds, NaN if the step tells
    none. Nothing per-replica is carried by the loop; the iterator and n (int64 scalar) are arguments, so that it is
    traced once.
    """
    strategy = accelerator.strategy
    # TensorFlow refuses its own clock where operations are to be deterministic, which it is not asked for on TPUs.
    own_clock = accelerator.environment.deterministic and accelerator.kind != "tpu"
    now = _python_time if own_clock else tf.timestamp

    @tf.function(jit_compile=False)  # type: ignore[untyped-decorator]
    def run_steps(iterator: Any, n: Any) -> Any:
        first_bad = tf.constant(NOT_FOUND, tf.int64)
        waited = tf.constant(0.0, tf.float64)
        losses = tf.fill([len(accelerator.local_replicas)], math.nan)
        for index in tf.range(n):
            batch, seconds = _next_batch(iterator, strategy, now)
            waited += seconds
            loss, of_replicas = take_step(step, strategy, batch)
            if loss is not None:
                losses = of_replicas
                bad = tf.logical_not(tf.reduce_all(tf.math.is_finite(loss)))
                first_bad = tf.where(tf.logical_and(first_bad == NOT_FOUND, bad), index, first_bad)
        return first_bad, waited, losses

    return run_steps


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _next_batch(iterator: Any, strategy: Any, now: Callable[[], Any]) -> tuple[Any, Any]:
    """The next batch, and the seconds until it was there; measured by the host that feeds the devices."""
    begun = now()
    with tf.control_dependencies([begun]):
        batch = next(iterator)
    arrived = [part for value in tf.nest.flatten(batch) for part in strategy.experimental_local_results(value)]
    with tf.control_dependencies(arrived):
        # TensorFlow's own clock is the time of day, which can be set back.
        return batch, tf.maximum(now() - begun, 0.0)


def _python_time() -> Any:
    """Python's clock, float64 scalar, read anew each time."""
    seconds = tf.numpy_function(time.monotonic, [], tf.float64, name=_CLOCK)
    return tf.ensure_shape(seconds, [])


def may_differ_words(function: Any, *, intra_op_threads: int) -> tuple[str, ...]:
    """Why a resumed or repeated run of a traced function can differ: a sentence for each reason.

    Args:
        function: concrete.
        intra_op_threads: how many threads one operation may use.
    """
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    words = []
    unsaved = sorted({node.name for node in nodes if node.op in _STATEFUL and _CLOCK not in node.name})
    if unsaved:
        words.append(
            f"{listed(unsaved)} draw from TensorFlow's own random state or run Python code, and no checkpoint holds "
            "the state of either: a resumed run can differ. Draw with keras.random and a SeedGenerator, or with "
            "tf.random.Generator; keep what Python code remembers in variables"
        )
    unordered = sorted({node.name for node in nodes if _sums_in_any_order(node)})
    if unordered and intra_op_threads > 1:
        words.append(
            f"{listed(unordered)}: a weighted bincount adds up floats in the order in which its {intra_op_threads} "
            "threads end, which train.deterministic does not change: two runs can differ. Use "
            "tf.math.unsorted_segment_sum, or set accelerator.intra_op_threads: 1"
        )
    return tuple(words)


def _sums_in_any_order(node: Any) -> bool:
    return node.op in _SUMMED_IN_ANY_ORDER and tf.as_dtype(node.attr["T"].type).is_floating


def steps_within(seconds: float, steps_per_second: float) -> int:
    """How many steps an inner loop may have to last about so many seconds; at least 1."""
    return max(1, int(seconds * steps_per_second))
