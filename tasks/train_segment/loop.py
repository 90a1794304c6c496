"""The compiled training loop, the batches that it reads, and what comes before each inner loop.

It replaces `model.fit`: steps are counted absolutely, nothing is read or reset where a run is cut, and
`fit(steps_per_execution=…)` crashes under MirroredStrategy. It calls Keras's own `model.train_step`, so compiled
losses, metrics, custom `train_step`s, clipping and mixed precision work.

All hosts decide together what comes next. Clocks and signals differ between them, and a host that ran one step more
than the others would wait for them forever.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from tasks.foundation.contracts.log_entry import StopReason
from tasks.foundation.dataset.model_inputs import ModelInputs, map_class_weight
from tasks.foundation.dataset.read import decoded_bytes, fits_into_memory, training_dataset
from tasks.foundation.machine.devices import Accelerator
from tasks.foundation.machine.hosts import Hosts
from tasks.foundation.machine.stops import first_reason, number_of
from tasks.foundation.messages import listed
from tasks.foundation.model.keras_steps import not_converted, summed_gradients_words
from tasks.foundation.model.metrics import MOST_VALUES, read_results
from tasks.foundation.model.randomness import CLOCK, StepDraws, nodes_of, stateful_operations
from tasks.foundation.model.step import compile_words, run_train_step
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.state.warm_state import Recipe
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.telemetry.formatting import size_words

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDecision:
    """The decision of one host, or of all hosts once they agree.

    Attributes:
        stop: why to stop now; None to continue.
        grace_left: seconds until this machine may end; infinite if no end is announced.
        segment_is_over: whether the segment's seconds are used up.
        commit_is_due: whether to commit first.
        steps: number of steps of the inner loop.
        save_failed: whether a save beside the training failed.
    """

    stop: StopReason | None
    grace_left: float
    segment_is_over: bool
    commit_is_due: bool
    steps: int
    save_failed: bool = False

    def agreed(self, hosts: Hosts) -> "LoopDecision":
        """The decision of all hosts: a stop of any host, the shortest grace period, otherwise the chief's decision."""
        values = [
            number_of(self.stop),
            self.grace_left,
            self.segment_is_over,
            self.commit_is_due,
            self.steps,
            self.save_failed,
        ]
        of_hosts = hosts.gather_from_hosts(values)
        _, _, over, due, steps, failed = of_hosts[0].tolist()
        return LoopDecision(
            stop=first_reason(of_hosts[:, 0].tolist()),
            grace_left=float(of_hosts[:, 1].min()),
            segment_is_over=bool(over),
            commit_is_due=bool(due),
            steps=int(steps),
            save_failed=bool(failed),
        )


def training_batches(
    recipe: Recipe, inputs: ModelInputs, accelerator: Accelerator, *, storage: Storage, batch: int, telemetry: Sink
) -> Any:
    """Return a distributed iterator over batches from global batch `batch` on.

    Args:
        recipe: what is trained, on which dataset.
        inputs: the transforms of the examples.
        accelerator: whose replicas take the batches.
        storage: the storage root.
        batch: index of the first global batch: step + skipped batches.
        telemetry: receives a warning if the examples do not fit into memory.
    """
    spec = recipe.spec
    in_memory = spec.data.cache == "memory" and _fits(recipe, storage, telemetry)

    def per_replica_batches(context: Any) -> "tf.data.Dataset":
        dataset = training_dataset(
            storage,
            recipe.dataset,
            seed=spec.train.seed,
            global_batch_size=spec.train.global_batch_size,
            window_shards=spec.data.window_shards,
            first_batch=batch,
            host=context.input_pipeline_id,
            hosts=context.num_input_pipelines,
            local_replicas=accelerator.replicas // context.num_input_pipelines,
            drop_remainder=spec.train.drop_remainder,
            shuffle=spec.data.shuffle,
            functions=inputs.training_functions,
            in_memory=in_memory,
        )
        return map_class_weight(dataset, spec.train.class_weight)

    return iter(accelerator.strategy.distribute_datasets_from_function(per_replica_batches))


def _fits(recipe: Recipe, storage: Storage, telemetry: Sink) -> bool:
    if fits_into_memory(storage, recipe.dataset):
        return True
    size = size_words(decoded_bytes(storage, recipe.dataset))
    text = f"data.cache: memory: the decoded examples take {size}, more than half of the free memory; reading records"
    telemetry.emit(Note(text=text, warning=True))
    return False


def step_notes(state: TrainState, divided: int, *, reference: str, masked: bool) -> Iterator[Note]:
    """Yield notes about a train step that has just been traced.

    Args:
        state: whose model's step it is.
        divided: number of losses that Keras divided by the number of replicas while it was traced.
        reference: the function's name in the run file.
        masked: whether a Keras mask reaches the loss of micro-batches.
    """
    summed = summed_gradients_words(state.model, divided, reference=reference, replicas=state.accelerator.replicas)
    if summed and state.step == 0:  # once in a run
        yield Note(text=summed)
    for words in compile_words(state.model, state.accelerator):
        yield Note(text=f"{reference}: {words}")
    ignored = () if state.returned is None else state.returned.ignored
    if ignored:
        yield Note(
            text=f"{reference}: train_step returns {listed(ignored)}, which are not logged: each is no number, has "
            f"one for each example, or more than {MOST_VALUES}; return their means",
            warning=True,
        )
    for words in read_results(state.model, state.accelerator.strategy, state.returned).words():
        yield Note(text=f"{reference}: {words}")
    if masked:
        yield Note(
            text=f"{reference}: a Keras mask reaches the loss, which is then a mean over what the mask keeps of each "
            "micro-batch (train.accumulate), and not of the whole batch",
            warning=True,
        )
