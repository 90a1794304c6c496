"""The trainer: model, compiled loop, data and state of one process."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.accelerator.tpu_padding import padding, padding_words
from tasks.foundation.checkpoint.restore import restore_checkpoint
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.segment import MetricRow, TracedStep
from tasks.foundation.dataset.class_weight import apply_class_weight, map_class_weight
from tasks.foundation.dataset.reader import load_manifest, training_dataset, zero_batch
from tasks.foundation.dataset.reading_errors import original_read_errors
from tasks.foundation.errors import NonFinite
from tasks.foundation.messages import listed
from tasks.foundation.model.build import ignored_compile_settings
from tasks.foundation.model.gradient_accumulation import outputs_keras_mask
from tasks.foundation.model.keras_steps import tracing_hints
from tasks.foundation.model.metrics import take_metrics
from tasks.foundation.model.train_step import build_train_step, op_errors_as_model_error, trace_train_step
from tasks.foundation.model.variable_placement import describe_placement, kernel_shapes
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.state.train_state import TrainState, build_train_state
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Sink, StatefulOperations
from tasks.train_segment.callback_schedule import Callbacks
from tasks.train_segment.fingerprint import traced_step, warn_if_step_differs
from tasks.train_segment.host_stats import InnerLoop
from tasks.train_segment.loop import NOT_FOUND, make_loop, nondeterminism_warnings, stateful_operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a trainer is built from. Equal recipes give equal trainers."""

    spec: RunSpec
    dataset: DatasetRef
    code_folder: Path


class Trainer:
    """Trains from one state to the next. After an exception its state is unknown, and it must not be used again.

    Attributes:
        recipe: what it was built from.
        accelerator: the process's.
        state: the train state.
        callbacks: of the user; None if the run file names none.
        staging_seconds: duration of the last staging; decides whether a commit fits into a grace period.
        traced: the step as it was traced; None until `compile`.
    """

    def __init__(self, recipe: Recipe, *, storage: Storage, accelerator: Accelerator) -> None:
        spec = recipe.spec
        self.recipe = recipe
        self.accelerator = accelerator
        self._storage = storage
        self._per_replica = per_replica_batch_size(
            spec.train.global_batch_size, accelerator.replicas, spec.train.accumulate
        )
        batch = apply_class_weight(
            zero_batch(load_manifest(storage, recipe.dataset), self._per_replica), spec.train.class_weight
        )
        self.state: TrainState = build_train_state(
            spec, code_folder=recipe.code_folder, accelerator=accelerator, batch=batch, training=True
        )
        # Before any restore, because Keras's callbacks reset their state in on_train_begin.
        self.callbacks = Callbacks(spec, self.state, code_folder=recipe.code_folder) if spec.train.callbacks else None
        step = build_train_step(
            self.state.model,
            batch,
            spec.train.accumulate,
            reference=spec.model.build,
            accelerator=accelerator,
            returned=self.state.returned,
        )
        self._hints = partial(tracing_hints, self.state.model, batch)
        self._masked = spec.train.accumulate > 1 and outputs_keras_mask(self.state.model, batch)
        self._loop = make_loop(step, accelerator)
        self.staging_seconds: float | None = None
        self._restored: str | None = None
        self._iterator: Any = None
        self._next_batch: int | None = None
        self.traced: TracedStep | None = None

    def restore(self, home: Storage, ref: CheckpointRef) -> bool:
        """Restore a checkpoint on every host. Returns False, and reads nothing, if its state is in memory already."""
        in_memory = self._restored in {ref.path, ref.state_digest} and self.state.step == ref.step
        if self.accelerator.all_agree(in_memory):
            return False
        restore_checkpoint(self.state, home, ref)
        if self.callbacks is not None:
            self.callbacks.recall()
        self._restored = ref.path
        return True

    def begin(self, home: Storage, start: CheckpointRef) -> str | None:
        """Call the callbacks that are due at the checkpoint in memory.

        Returns:
            Why they end the run; None if they do not.

        Raises:
            ModelError: a callback raised.
        """
        if self.callbacks is None:
            return None
        # Callbacks change the state, so another start from this checkpoint must restore it.
        self._restored = None
        if not self.callbacks.begin(RunLog(home), start):
            self._restored = start.path
        return self._agreed_end(self.callbacks)

    def holds(self, ref: CheckpointRef | None) -> None:
        """Note that the state in memory was staged as `ref`; None on hosts other than the chief."""
        self._restored = self.state.digest() if ref is None else ref.path

    def seek(self, batch: int) -> None:
        """Move the data stream to a batch index. Does nothing if it is there already."""
        if self._next_batch == batch:
            return
        spec = self.recipe.spec

        def per_replica_batches(context: Any) -> tf.data.Dataset:
            dataset = training_dataset(
                self._storage,
                self.recipe.dataset,
                seed=spec.train.seed,
                global_batch_size=spec.train.global_batch_size,
                window_shards=spec.data.window_shards,
                first_batch=batch,
                host=context.input_pipeline_id,
                hosts=context.num_input_pipelines,
                local_replicas=self.accelerator.replicas // context.num_input_pipelines,
            )
            return map_class_weight(dataset, spec.train.class_weight)

        self._iterator = iter(self.accelerator.strategy.distribute_datasets_from_function(per_replica_batches))
        self._next_batch = batch

    def compile(self, log: RunLog, base: int, telemetry: Sink) -> None:
        """Trace the loop, and refuse a model with state that would not be saved.

        Args:
            log: the run's; it may have the fingerprint of a step that another process traced.
            base: number of the log entry that training starts from.
            telemetry: receives warnings about what can make a resumed run differ.

        Raises:
            ModelError: the step cannot be traced, or uses a variable that is not in the tree.
        """
        if self.traced is not None:
            return
        reference = self.recipe.spec.model.build
        arguments = (self._iterator, tf.constant(1, tf.int64))
        function = trace_train_step(
            self._loop, arguments, leaves=self.state.leaves, reference=reference, hints=self._hints
        )
        for words in nondeterminism_warnings(function, intra_op_threads=self.accelerator.environment.intra_op_threads):
            telemetry.emit(Note(text=f"{reference}: {words}", warning=True))
        operations = stateful_operations(function)
        if operations:
            telemetry.emit(StatefulOperations(reference=reference, operations=operations))
        unused = ignored_compile_settings(self.state.model)
        if unused:
            text = f"{reference}: compiled with {unused}, which is not used: steps run inside one compiled loop"
            telemetry.emit(Note(text=text))
        ignored = () if self.state.returned is None else self.state.returned.ignored
        if ignored:
            telemetry.emit(
                Note(
                    text=f"{reference}: train_step returns {listed(ignored)}, which are no scalars and are not logged; "
                    "return their means",
                    warning=True,
                )
            )
        if self._masked:
            telemetry.emit(
                Note(
                    text=f"{reference}: a Keras mask reaches the loss, which is then a mean over what the mask keeps "
                    "of each micro-batch (train.accumulate), and not of the whole batch",
                    warning=True,
                )
            )
        if self.accelerator.kind != "cpu":
            telemetry.emit(Note(text=describe_placement(leaf.variable for leaf in self.state.leaves)))
        filled_up = padding(self._per_replica // self.recipe.spec.train.accumulate, kernel_shapes(self.state.leaves))
        if words := padding_words(filled_up, kind=self.accelerator.kind):
            telemetry.emit(Note(text=words, warning=True))
        head = log.entry(base).head
        self.traced = traced_step(function, environment=self.accelerator.environment, identity=head.identity)
        if self.accelerator.is_chief:
            warn_if_step_differs(log, base, self.traced, telemetry=telemetry)

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
        self._restored, batch, self._next_batch = None, self._next_batch, None
        where = f"between step {before} and step {before + steps}, in segment {segment}"
        with (
            op_errors_as_model_error(f"{self.recipe.spec.model.build}: train_step failed {where}"),
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
        metrics = take_metrics(self.state.model, self.accelerator.strategy, self.state.returned)
        return MetricRow(step=self.state.step, metrics=metrics)

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

    def _agreed_end(self, callbacks: Callbacks) -> str | None:
        """Why the chief's callbacks end the run. Callbacks of other hosts may depend on local clocks or files."""
        if not self.accelerator.broadcast_from_chief(callbacks.ended is not None):
            return None
        return callbacks.ended or "the chief's callbacks set model.stop_training"
