"""The trainer: model, compiled loop, data and state of one process, kept from one segment to the next.

The compiled loop replaces `model.fit`, whose `steps_per_execution` crashes under MirroredStrategy. It calls Keras's own
`model.train_step`, so compiled losses, metrics, custom `train_step`s, clipping and mixed precision work.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from baton.tasks.foundation.checkpoint.cadence import CommitCadence
from baton.tasks.foundation.checkpoint.restore import restore_warm_state
from baton.tasks.foundation.checkpoint.snapshot import snapshot_bytes
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Evaluation, LoggedValues, MetricRow, TracedStep
from baton.tasks.foundation.contracts.placement import per_replica_batch_size
from baton.tasks.foundation.contracts.run_spec import is_row_due
from baton.tasks.foundation.dataset.manifest import zero_examples
from baton.tasks.foundation.dataset.model_inputs import ModelInputs, apply_class_weight, map_class_weight
from baton.tasks.foundation.dataset.read import WorkerFiles, decoded_bytes, fits_into_memory, training_dataset
from baton.tasks.foundation.dataset.shards import original_read_errors
from baton.tasks.foundation.dataset.transforms import transform_errors
from baton.tasks.foundation.errors import NonFinite
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.devices import DEVICE_LOST_ERRORS, Accelerator, align_function_numbers
from baton.tasks.foundation.model.keras_steps import SCALED_LOSSES, not_converted, tracing_hints
from baton.tasks.foundation.model.metrics import RowMetrics, learning_rate_of, returns_own_values
from baton.tasks.foundation.model.randomness import CLOCK, StepDraws, stateful_operations
from baton.tasks.foundation.model.step import (
    Step,
    build_train_step,
    op_errors_as_model_error,
    outputs_keras_mask,
    run_train_step,
    trace_train_step,
    uses_xla,
)
from baton.tasks.foundation.model.sums import fix_sum_order
from baton.tasks.foundation.model.variables import describe_placement
from baton.tasks.foundation.state.train_state import TrainState
from baton.tasks.foundation.state.warm_state import PROCESS_STATE, HeldValues, Recipe, WarmState, peek_results
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.telemetry.events import Note, Silent, Sink, StatefulOperations
from baton.tasks.foundation.telemetry.formatting import size_words
from baton.tasks.train_segment.callbacks import Callbacks, LossWatch, callbacks_of
from baton.tasks.train_segment.fingerprint import (
    compare_with_log,
    nondeterminism_warnings,
    pipeline_digests,
    step_notes,
    traced_step,
)
from baton.tasks.train_segment.host_stats import HostPace, InnerLoop

NOT_FOUND = -1
# What hosts with TensorFlow servers read until they get the next plan: a minute or more, and few megabytes of plans.
_PLANNED_EXAMPLES = 1 << 20


def make_loop(step: Step, draws: StepDraws) -> Any:
    """Make a `tf.function` of (iterator, n) that runs n training steps.

    The iterator and n, an int64 scalar, are arguments, so that it is traced once. It carries no per-replica value.

    Args:
        step: one training step, see `build_train_step`.
        draws: seeds of the step's random operations.

    Returns:
        A function that returns three values. `first_bad`, int64 scalar: index in [0, n) of the first step with a loss
        that is not finite, or `NOT_FOUND`. `waited`, float64 scalar: seconds that this host waited for batches.
        `losses`, float32 [local_replicas]: the loss of each of this host's replicas since metrics were reset; NaN if
        the step returns none.
    """
    accelerator, strategy = draws.accelerator, draws.accelerator.strategy
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
            loss, of_replicas = run_train_step(step, batch, draws)
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


def training_batches(
    recipe: Recipe,
    inputs: ModelInputs,
    accelerator: Accelerator,
    *,
    storage: Storage,
    batch: int,
    telemetry: Sink,
    planned: int | None = None,
) -> Any:
    """Return a distributed iterator over batches from global batch `batch` on.

    Args:
        recipe: what is trained, on which dataset.
        inputs: the transforms of the examples.
        accelerator: whose replicas take the batches.
        batch: index of the first global batch: step + skipped batches.
        telemetry: receives a warning if the examples do not fit into memory.
        planned: how many batches TensorFlow servers get a plan of; None: this process reads, without end.
    """
    spec = recipe.spec
    in_memory = spec.data.cache == "memory" and _fits(recipe, storage, telemetry)
    worker = None if planned is None else WorkerFiles(root=storage.uri, batches=planned)

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
            worker=worker,
        )
        dataset = map_class_weight(dataset, spec.train.class_weight)
        if context.num_input_pipelines == 1 and worker is None:
            return dataset
        # It has no end. Unless TensorFlow knows that, the hosts ask each other before each batch whether all have one:
        # a collective, in which a host waits for the input of another one. The step is traced with open sizes of
        # batches, as with that question. Servers get the next plan before one ends.
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        return (dataset if worker is not None else dataset.map(_with_open_size)).apply(endless)

    return iter(accelerator.strategy.distribute_datasets_from_function(per_replica_batches))


@not_converted
def _with_open_size(*batch: Any) -> Any:
    """The batch, with an unknown first dimension."""
    return tf.nest.map_structure(
        lambda value: tf.raw_ops.PlaceholderWithDefault(input=value, shape=[None, *value.shape[1:]]), batch
    )


def _fits(recipe: Recipe, storage: Storage, telemetry: Sink) -> bool:
    if fits_into_memory(storage, recipe.dataset):
        return True
    size = size_words(decoded_bytes(storage, recipe.dataset))
    text = f"data.cache: memory: the decoded examples take {size}, more than half of the free memory; reading records"
    telemetry.emit(Note(text=text, warning=True))
    return False


class Trainer:
    """Trains from one state to the next. After an exception its state is unknown, and it must not be used again.

    Attributes:
        recipe: what it was built from.
        accelerator: the process's.
        warm: the state of this process, with what it holds.
        state: the train state.
        callbacks: of the user; None if the run file names none.
        cadence: how often to commit within a segment.
        pace: what this host needs for a step, compared with the others.
        staging_seconds: duration of the last staging; decides whether a commit fits into a grace period.
        traced: the step as it was traced; None until `compile`.
    """

    def __init__(self, recipe: Recipe, warm: WarmState, *, storage: Storage) -> None:
        spec = recipe.spec
        self.recipe = recipe
        self.warm = warm
        self.state: TrainState = warm.state
        self.accelerator = accelerator = warm.state.accelerator
        self._storage = storage
        self._per_replica = per_replica_batch_size(
            spec.train.global_batch_size, accelerator.replicas, spec.train.accumulate
        )
        batch = apply_class_weight(zero_examples(warm.inputs.train, self._per_replica), spec.train.class_weight)
        warm.seed_as_built()
        if self.state.returned is None and returns_own_values(self.state.model, "train_step"):
            if self.state.step > 0:
                warm.forget_content()  # its checkpoint may have means that nothing has read so far
            self.state.add_returned(batch, reference=spec.model.build)
        self.callbacks = callbacks_of(warm) if spec.train.callbacks else None
        # Splitting a step into micro-batches is checked by calling the model, which may draw, and uses its metrics.
        leaves = self.state.model_leaves if spec.train.accumulate > 1 else ()
        held = HeldValues(leaf for leaf in leaves if not leaf.path.startswith("optimizer/"))
        step = build_train_step(
            self.state.model,
            batch,
            spec.train.accumulate,
            reference=spec.model.build,
            draws=self.state.draws,
            returned=self.state.returned,
        )
        self._hints = partial(tracing_hints, self.state.model, batch)
        self._masked = spec.train.accumulate > 1 and outputs_keras_mask(self.state.model, batch)
        held.put_back()
        step = tf.function(step, jit_compile=True) if uses_xla(self.state.model, accelerator) else step
        self._loop = make_loop(step, self.state.draws)
        self._row_metrics = RowMetrics(
            self.state.model, accelerator.strategy, self.state.returned, hosts=accelerator.hosts
        )
        self.staging_seconds: float | None = None
        self.cadence = CommitCadence(spec.checkpoint, state_bytes=snapshot_bytes(self.state))
        self.pace = HostPace(accelerator)
        self._recalled = -1  # number of the restore whose callbacks' state was recalled
        self._iterator: Any = None
        self._next_batch: int | None = None
        self._planned_end = math.inf  # the batch at which the plan of TensorFlow servers ends
        self.traced: TracedStep | None = None
        self._draws: StepDraws | None = None  # if the traced step uses them
        self._watch: LossWatch | None = None
        self._watched_restores = 0

    @property
    def loss_watch(self) -> LossWatch | None:
        """Has the losses before the state in memory; None if they must be read from the log."""
        return self._watch if self._watched_restores == self.warm.restores else None

    def keep_watch(self, watch: LossWatch) -> None:
        """Keep the losses before the state in memory, for the next segment. A restore drops them."""
        self._watch, self._watched_restores = watch, self.warm.restores

    def needs_evaluation(self, start: CheckpointRef) -> bool:
        """Whether callbacks are due at a checkpoint, and read its evaluation in the log."""
        if self.callbacks is None or not self.callbacks.need_evaluation(start):
            return False
        return self._evaluation_of(start) is None or not self.callbacks.have_row

    def restore(self, home: Storage, ref: CheckpointRef) -> bool:
        """Restore a checkpoint on every host. Returns False, and reads nothing, if its state is in memory already."""
        restored = restore_warm_state(self.warm, home, ref)
        # An evaluation may have restored it.
        if self.callbacks is not None and self._recalled != self.warm.restores:
            self.callbacks.recall()
        self._recalled = self.warm.restores
        return restored

    def begin(self, log: RunLog, start: CheckpointRef) -> str | None:
        """Call the callbacks that are due at the checkpoint in memory.

        Returns:
            Why they end the run; None if they do not.

        Raises:
            ModelError: a callback raised.
        """
        if self.callbacks is None:
            return None
        # Callbacks change the state, so another start from this checkpoint must restore it.
        self.warm.forget_content()
        if not self.callbacks.begin(log, start, self._evaluation_of(start)):
            self.warm.set_content(start)
        return self._agreed_end(self.callbacks)

    def seek(self, batch: int, telemetry: Sink, *, steps: int = 1) -> None:
        """Move the data stream to a batch index, from which `steps` batches can be read; nothing if it is there."""
        if self._next_batch != batch or batch + steps > self._planned_end:
            planned = None
            if self.accelerator.has_servers:
                planned = max(steps, _PLANNED_EXAMPLES // self.recipe.spec.train.global_batch_size)
                self._planned_end = batch + planned
            self._iterator = training_batches(
                self.recipe,
                self.warm.inputs,
                self.accelerator,
                storage=self._storage,
                batch=batch,
                telemetry=telemetry,
                planned=planned,
            )
            self._next_batch = batch

    def compile(self, log: RunLog, base: int, telemetry: Sink, *, accept: Sequence[str] = ()) -> None:
        """Trace the loop, and refuse a model with state that would not be saved.

        Args:
            log: the run's; it may have the fingerprint of a step that another process traced.
            base: number of the log entry that training starts from.
            telemetry: receives warnings about what can make a resumed run differ.
            accept: identity keys whose change is accepted.

        Raises:
            ModelError: the step cannot be traced, or uses a variable, or other state, that is not in the tree.
            IdentityChanged: it computes with other values than the process before.
        """
        if self.traced is not None:
            return
        head = log.entry(base).head
        self.warm.require_recorded_contents(head.identity, home=log.home.uri)
        reference = self.recipe.spec.model.build
        arguments = (self._iterator, tf.constant(1, tf.int64))
        # What Python code draws while it is traced becomes part of the graph, which must be the same in every process.
        self.warm.seed_as_built()
        if uses_xla(self.state.model, self.accelerator):
            align_function_numbers()
        with SCALED_LOSSES.recorded():
            function = trace_train_step(
                self._loop,
                arguments,
                leaves=self.state.leaves,
                draws=self.state.draws,
                reference=reference,
                hints=self._hints,
            )
        fix_sum_order(function, self.accelerator.strategy)
        self._draws = self.state.draws if self.state.draws.are_used_by(function.graph) else None
        for words in nondeterminism_warnings(function, intra_op_threads=self.accelerator.environment.intra_op_threads):
            telemetry.emit(Note(text=f"{reference}: {words}", warning=True))
        operations = stateful_operations(function)
        if operations:
            telemetry.emit(StatefulOperations(reference=reference, operations=operations))
        for note in step_notes(self.state, SCALED_LOSSES.count, reference=reference, masked=self._masked):
            telemetry.emit(note)
        if self.accelerator.kind != "cpu":
            telemetry.emit(Note(text=describe_placement(leaf.variable for leaf in self.state.leaves)))
        head = log.entry(base).head
        traced = traced_step(
            function,
            environment=self.accelerator.environment,
            identity=dict(head.identity),
        )
        same: dict[str, Any] = {"train step as traced": [traced.step.fingerprint, traced.step.contents]}
        if self.accelerator.hosts > 1:
            same["first examples as the model gets them"] = pipeline_digests(
                self.recipe, self.warm.inputs, self._storage
            )
        self.accelerator.require_same(same)
        # Every host compares, so that none waits for one that refuses.
        sink = telemetry if self.accelerator.is_chief else Silent()
        refusal = compare_with_log(log, base, traced, reference=reference, accept=accept, telemetry=sink)
        if refusal is not None:
            raise refusal
        self.traced = traced.step

    def run(self, steps: int, *, segment: int) -> InnerLoop:
        """Train `steps` steps.

        Args:
            steps: number of steps.
            segment: number of the segment, for messages.

        Returns:
            What the loop did on this host.

        Raises:
            ModelError: an operation of the step failed; names the range of steps.
            NonFinite: the loss is NaN or infinite; names the step.
        """
        before = self.state.step
        # Unknown until the steps are done.
        self.warm.forget_content()
        if self._next_batch is not None:
            self.seek(self._next_batch, Silent(), steps=steps)
        batch, self._next_batch = self._next_batch, None
        if self._draws is not None:
            self._draws.begin_training(before)
        where = f"between step {before} and step {before + steps}, in segment {segment}"
        with (
            op_errors_as_model_error(f"{self.recipe.spec.model.build}: train_step failed {where}"),
            transform_errors(self.recipe.spec.data, where),
            original_read_errors(),
        ):
            bad, waited, of_replicas = self._loop(self._iterator, tf.constant(steps, tf.int64))
            first_bad, waited, losses = int(bad.numpy()), float(waited.numpy()), of_replicas.numpy().tolist()
        if first_bad != NOT_FOUND:
            raise NonFinite(
                f"the loss is not finite at step {before + first_bad + 1}, in segment {segment}, which is not "
                "committed. Lower the learning rate, clip gradients, or look at the data of that step",
                step=before + first_bad + 1,
            )
        self.state.step = before + steps
        self._next_batch = None if batch is None else batch + steps
        finite = tuple(losses) if all(map(math.isfinite, losses)) else ()
        return InnerLoop(steps=steps, input_wait_seconds=waited, losses=finite)

    def read_metrics(self) -> MetricRow:
        """Read the metrics since the last row, and reset them. Call it at absolute steps only."""
        metrics = self._row_metrics.take()
        rate = learning_rate_of(self.state.model)
        return MetricRow(step=self.state.step, metrics=metrics, learning_rate=rate)

    def read_partial_row(self, telemetry: Sink) -> MetricRow | None:
        """Read the metrics since the last row, and change nothing; None if the last row was read at this step.

        These metrics are only shown, so an error in the code of one is a note. With several hosts, all of them call it.
        """
        state = self.state
        if is_row_due(self.recipe.spec, state.step):
            return None
        try:
            results = peek_results(state)
            return MetricRow(step=state.step, metrics=results.numbers, learning_rate=learning_rate_of(state.model))
        except DEVICE_LOST_ERRORS:
            raise
        except Exception as fault:  # noqa: BLE001 - a metric of the user's may raise anything
            text = f"the metrics since the last row cannot be shown: {type(fault).__name__}: {fault}"
            telemetry.emit(Note(text=text, warning=True))
            return None

    def take_row(self, row: MetricRow) -> bool:
        """Call the callbacks that are due at a row that has just been read.

        Returns:
            Whether they end the run here.

        Raises:
            ModelError: a callback raised.
        """
        if self.callbacks is None:
            return False
        self.callbacks.take_row(row)
        return self._agreed_end(self.callbacks) is not None

    def take_logged(self) -> tuple[LoggedValues, ...]:
        """Take what callbacks have added to `logs` since the last call."""
        return () if self.callbacks is None else self.callbacks.take_added()

    def end_training(self) -> None:
        """Call `on_train_end` of the callbacks. The state in memory may differ from its checkpoint afterwards.

        Raises:
            ModelError: a callback raised.
        """
        if self.callbacks is not None:
            self.warm.forget_content()
            self.callbacks.end_training()

    def _evaluation_of(self, start: CheckpointRef) -> Evaluation | None:
        """The evaluation of a checkpoint by this process, if it is the newest one."""
        newest = self.warm.evaluation
        return newest if newest is not None and newest.checkpoint.path == start.path else None

    def _agreed_end(self, callbacks: Callbacks) -> str | None:
        """Why the chief's callbacks end the run. Callbacks of other hosts may depend on local clocks or files."""
        if not self.accelerator.broadcast_from_chief(callbacks.ended is not None):
            return None
        return callbacks.ended or "the chief's callbacks set model.stop_training"


def take_trainer(recipe: Recipe, *, storage: Storage, accelerator: Accelerator) -> Trainer:
    """Take out the process's state and its trainer if they fit, or build them: compiling a loop can take minutes.

    Only a segment that succeeds puts them back, with `put_back_trainer`.
    """
    warm = PROCESS_STATE.take(recipe, storage=storage, accelerator=accelerator)
    trainer = warm.companion(Trainer)
    if trainer is not None and trainer.recipe == recipe:
        return trainer
    if trainer is not None or (warm.attributes_changed and not warm.as_built()):
        # Another trainer has used it, or Python code that a new process does not run in this order.
        del warm, trainer
        warm = PROCESS_STATE.take(recipe, storage=storage, accelerator=accelerator)
    return Trainer(recipe, warm, storage=storage)


def put_back_trainer(trainer: Trainer) -> None:
    """Keep a trainer whose state is known to be valid."""
    trainer.warm.keep_companion(trainer)
    PROCESS_STATE.keep(trainer.warm)
