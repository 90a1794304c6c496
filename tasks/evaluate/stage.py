"""The stage evaluate: committed checkpoint -> metrics in the log."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tasks.evaluate.averages import use_averages
from tasks.evaluate.loop import Evaluator
from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.accelerator.strategy import Accelerator, acquire
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.log_entry import Body, Environment, Evaluation, Head
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.dataset.reader import load_manifest, validation_dataset, validation_remainder, zero_batch
from tasks.foundation.model.metrics import require_metric
from tasks.foundation.model.returned_metrics import returned_by
from tasks.foundation.model.train_step import once_training_has_begun
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.state.train_state import TrainState, build_train_state
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Evaluated, Sink
from tasks.foundation.telemetry.measurements import seconds_between


@dataclass(frozen=True, slots=True)
class _Recipe:
    spec: RunSpec
    dataset: DatasetRef
    code_folder: Path


@dataclass(frozen=True, slots=True)
class _Warm:
    recipe: _Recipe
    state: TrainState
    evaluator: Evaluator


# The model of this process's earlier evaluations; its own, so that training's stays as it is.
_warm: list[_Warm] = []


def evaluate(
    spec: RunSpec,
    dataset: DatasetRef,
    checkpoint: CheckpointRef,
    *,
    code_folder: Path,
    storage: Storage,
    recorded: Environment,
    telemetry: Sink,
    clock: Callable[[], float] = time.monotonic,
) -> Evaluation:
    """Meet every validation example once with the weights of a committed checkpoint; log what came out.

    With `use_ema` the averaged weights are used, as Keras does at the end of `fit`.

    Raises:
        ModelError: `checkpoint.keep_best` names a metric that the model does not have.
        StepFailed: `test_step` fails.
        DamagedCheckpoint: the checkpoint is not what the log says.
    """
    began = clock()
    accelerator = acquire(spec.accelerator, recorded, deterministic=spec.train.deterministic)
    batch_size = spec.train.global_batch_size
    per_replica = per_replica_batch_size(batch_size, accelerator.replicas)
    warm = _take_warm(_Recipe(spec, dataset, code_folder), storage, accelerator, per_replica)
    state = warm.state
    home = storage.at(spec.run)
    state.restore(home, checkpoint)
    use_averages(state.model)
    examples = dataset.validation_examples
    full_batches = examples // batch_size
    # Each host reads its own part of every global batch.
    per_host = per_replica * len(accelerator.local_replicas)
    full = validation_dataset(storage, dataset, batch_size=per_host).shard(accelerator.hosts, accelerator.host)
    if per_host > per_replica:
        full = full.rebatch(per_replica, drop_remainder=True)
    with once_training_has_begun():
        metrics = warm.evaluator.evaluate(
            full=full,
            full_batches=full_batches,
            remainder=validation_remainder(storage, dataset, batch_size=batch_size),
        )
    rule = spec.checkpoint.keep_best
    require_metric(rule, metrics)
    seconds = seconds_between(began, clock())
    body = Evaluation(checkpoint=checkpoint, metrics=metrics, examples=examples, seconds=seconds, keep_best=rule)
    if accelerator.is_chief:
        RunLog(home).append(lambda head: _unless_done(head, body), attempt=uuid.uuid4().hex)
    telemetry.emit(Evaluated(step=checkpoint.step, metrics=metrics, examples=examples))
    return body


def _unless_done(head: Head | None, body: Evaluation) -> Body | None:
    """Another process may have evaluated the same checkpoint meanwhile."""
    return None if head is None or body.checkpoint.path in head.evaluated else body


def _take_warm(recipe: _Recipe, storage: Storage, accelerator: Accelerator, per_replica: int) -> _Warm:
    if _warm and _warm[0].recipe == recipe and _warm[0].state.accelerator is accelerator:
        return _warm[0]
    _warm.clear()
    batch = zero_batch(load_manifest(storage, recipe.dataset), per_replica)
    state = build_train_state(recipe.spec, code_folder=recipe.code_folder, accelerator=accelerator, batch=batch)
    reference = recipe.spec.model.build
    returned = returned_by(state.model, "test_step", batch, reference=reference, accelerator=accelerator)
    evaluator = Evaluator(state.model, accelerator.strategy, reference=reference, returned=returned)
    _warm.append(_Warm(recipe, state, evaluator))
    return _warm[0]
