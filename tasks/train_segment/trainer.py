"""The warm trainer: model, compiled loop, data and state of one process, kept between its segments."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.accelerator.tpu_padding import padding, padding_words
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.segment import MetricRow, TracedStep
from tasks.foundation.dataset.class_weight import weighed, weighed_dataset
from tasks.foundation.dataset.reader import load_manifest, training_dataset, zero_batch
from tasks.foundation.dataset.reading_errors import reading_failures
from tasks.foundation.errors import NonFinite
from tasks.foundation.messages import listed
from tasks.foundation.model.build import unused_settings
from tasks.foundation.model.gradient_accumulation import tells_a_mask
from tasks.foundation.model.keras_steps import hints_about
from tasks.foundation.model.metrics import take_metrics
from tasks.foundation.model.train_step import step_failures, step_of, trace_step
from tasks.foundation.model.variable_placement import kernel_shapes, placement_words
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.state.train_state import TrainState, build_train_state
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Sink
from tasks.train_segment.callback_schedule import Callbacks
from tasks.train_segment.fingerprint import note_another_step, traced_step
from tasks.train_segment.host_stats import InnerLoop
from tasks.train_segment.loop import NOT_FOUND, make_loop, may_differ_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a trainer is made from; equal recipes may share one."""

    spec: RunSpec
    dataset: DatasetRef
    code_folder: Path


class Trainer:
    """Trains from one state to the next. Dropped after any exception: its state is then in doubt."""

    def __init__(self, recipe: Recipe, *, storage: Storage, accelerator: Accelerator) -> None:
        spec = recipe.spec
        self.recipe = recipe
        self.accelerator = accelerator
        self._storage = storage
        self._per_replica = per_replica_batch_size(
            spec.train.global_batch_size, accelerator.replicas, spec.train.accumulate
        )
        batch = weighed(zero_batch(load_manifest(storage, recipe.dataset), self._per_replica), spec.train.class_weight)
        self.state: TrainState = build_train_state(
            spec, code_folder=recipe.code_folder, accelerator=accelerator, batch=batch, training=True
        )
        # Before anything is restored: Keras's callbacks forget in on_train_begin what they remember.
        self.callbacks = Callbacks(spec, self.state, code_folder=recipe.code_folder) if spec.train.callbacks else None
        step = step_of(
            self.state.model,
            batch,
            spec.train.accumulate,
            reference=spec.model.build,
            accelerator=accelerator,
            returned=self.state.returned,
        )
        self._hints = partial(hints_about, self.state.model, batch)
        self._masked = spec.train.accumulate > 1 and tells_a_mask(self.state.model, batch)
        self._loop = make_loop(step, accelerator)
        # How long the last staging took; known costs decide whether a commit fits into a grace period.
        self.staging_seconds: float | None = None
        self._restored: str | None = None
        self._iterator: Any = None
        self._next_batch: int | None = None
        # The step as it was traced, once it is.
        self.traced: TracedStep | None = None

    def restore(self, home: Storage, ref: CheckpointRef) -> bool:
        """Have the state of `ref` in memory, on every host; False if it was there already."""
        mine = self._restored in {ref.path, ref.state_digest} and self.state.step == ref.step
        if self.accelerator.all_agree(mine):
            return False
        self.state.restore(home, ref)
        if self.callbacks is not None:
            self.callbacks.recall()
        self._restored = ref.path
        return True

    def begin(self, home: Storage, start: CheckpointRef) -> str | None:
        """Let callbacks act where they are due at the checkpoint that is in memory; why they end the run, if they do.

        Raises:
            ModelError: a callback raised.
        """
        if self.callbacks is None:
            return None
        # The state is then no longer the checkpoint's: begun from there again, it has to be restored.
        self._restored = None
        if not self.callbacks.begin(RunLog(home), start):
            self._restored = start.path
        return self._agreed_end(self.callbacks)

    def holds(self, ref: CheckpointRef | None) -> None:
        """The state in memory has just been staged as `ref`; None on a host whose chief has staged it."""
        self._restored = self.state.digest() if ref is None else ref.path

    def seek(self, batch: int) -> None:
        """Have the data stream at a batch index; costs nothing if it is there already."""
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
            return weighed_dataset(dataset, spec.train.class_weight)

        self._iterator = iter(self.accelerator.strategy.distribute_datasets_from_function(per_replica_batches))
        self._next_batch = batch

    def compile(self, log: RunLog, base: int, telemetry: Sink) -> None:
        """Trace the loop, and refuse a model with state that would not be saved.

        Args:
            log: the run's, which may hold what another process has traced.
            base: the entry that training starts from.
            telemetry: is told of what a resumed run may lose.

        Raises:
            ModelError: the step cannot be traced, or uses a variable that is not in the tree.
        """
        if self.traced is not None:
            return
        reference = self.recipe.spec.model.build
        arguments = (self._iterator, tf.constant(1, tf.int64))
        function = trace_step(self._loop, arguments, leaves=self.state.leaves, reference=reference, hints=self._hints)
        for words in may_differ_words(function, intra_op_threads=self.accelerator.environment.intra_op_threads):
            telemetry.emit(Note(text=f"{reference}: {words}", warning=True))
        unused = unused_settings(self.state.model)
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
            telemetry.emit(Note(text=placement_words(leaf.variable for leaf in self.state.leaves)))
        filled_up = padding(self._per_replica // self.recipe.spec.train.accumulate, kernel_shapes(self.state.leaves))
        if words := padding_words(filled_up, kind=self.accelerator.kind):
            telemetry.emit(Note(text=words, warning=True))
        head = log.entry(base).head
        self.traced = traced_step(function, environment=self.accelerator.environment, identity=head.identity)
        if self.accelerator.is_chief:
            note_another_step(log, base, self.traced, telemetry=telemetry)

    def run(self, steps: int, *, segment: int) -> InnerLoop:
        """Train `steps` steps, and tell how it went on this host.

        Raises:
            ModelError: an operation of the step failed; names the steps that it was one of.
            NonFinite: the loss stopped being finite; names the step.
        """
        before = self.state.step
        # In doubt until the steps are done.
        self._restored, batch, self._next_batch = None, self._next_batch, None
        where = f"between step {before} and step {before + steps}, in segment {segment}"
        with step_failures(f"{self.recipe.spec.model.build}: train_step failed {where}"), reading_failures():
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
        told = tuple(losses) if all(map(math.isfinite, losses)) else ()
        return InnerLoop(steps=steps, input_wait_seconds=waited, losses=told)

    def read_metrics(self) -> MetricRow:
        """Metrics since the row before, which are reset: call at absolute steps only."""
        metrics = take_metrics(self.state.model, self.accelerator.strategy, self.state.returned)
        return MetricRow(step=self.state.step, metrics=metrics)

    def take_row(self, row: MetricRow) -> bool:
        """Let callbacks act on a row that has just been read; whether they end the run here.

        Raises:
            ModelError: a callback raised.
        """
        if self.callbacks is None:
            return False
        self.callbacks.take_row(row)
        return self._agreed_end(self.callbacks) is not None

    def _agreed_end(self, callbacks: Callbacks) -> str | None:
        """Why the chief's callbacks end the run; those of other hosts may look at clocks or files of their own."""
        if not self.accelerator.of_chief(callbacks.ended is not None):
            return None
        return callbacks.ended or "the chief's callbacks set model.stop_training"
