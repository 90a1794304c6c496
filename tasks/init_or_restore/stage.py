"""The stage init-or-restore: nothing, or the tip of the log -> the committed checkpoint to start from."""

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.accelerator.cluster import is_chief
from tasks.foundation.accelerator.strategy import Accelerator, acquire, threads_of_others
from tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef
from tasks.foundation.contracts.log_entry import Body, Commit, Environment, Head, Origin
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.weights_report import WeightsReport
from tasks.foundation.dataset.class_weight import weighed
from tasks.foundation.dataset.order import repeats_words
from tasks.foundation.dataset.reader import load_manifest, zero_batch
from tasks.foundation.runlog.commits import commit, sound_tip
from tasks.foundation.runlog.fork_status import refuse_unfinished_fork
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.multi_host import head_of_chief, require_head_of_chief
from tasks.foundation.state.train_state import TrainState, build_train_state
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Committed, Note, Sink
from tasks.init_or_restore.changes import note_changes
from tasks.init_or_restore.identity import identity_of, identity_of_model
from tasks.init_or_restore.model_requirements import require_best, require_callbacks, require_evaluation
from tasks.init_or_restore.new_run import begin

_NOT_DETERMINISTIC = (
    "train.deterministic is false: operations that are not deterministic are allowed, so two runs of this file may "
    "differ in their bits"
)


def init_or_restore(
    spec: RunSpec,
    dataset: DatasetRef,
    *,
    code_folder: Path,
    storage: Storage,
    telemetry: Sink,
    accept: Sequence[str] = (),
    suspicious: bool = False,
) -> Head:
    """Begin the run, or find the checkpoint it goes on from.

    A fresh run commits step 0, so that training only ever restores; initial weights are loaded then, and only then. A
    tip that proves damaged is quarantined and the one before becomes the tip.

    Args:
        spec: the run file.
        dataset: what it prepared.
        code_folder: the run file's folder.
        storage: the root that the run's home is below.
        telemetry: is told what was committed, and what differs from before.
        accept: identity keys that may differ from the run on disk; a difference is logged, and holds from here on.
        suspicious: restoring the tip found fault with its bytes, so all of them are read before it is used again.

    Returns:
        The head; its tip is whole and is what to train from.

    Raises:
        IdentityChanged: the run on disk is another one, in more than was accepted.
        StateMismatch: what was accepted changes the variables, so that the tip could not be restored.
        InvalidInput: the run is a fork that was not finished.
        NothingToRestore: all that was retained is damaged.
        RunLogError: the log has lost an entry, or cannot be read.
        SourceError: a run would begin on batches that are taken for examples.
        ModelError: the user's model or callbacks cannot be used, or lack the metric of `checkpoint.keep_best`.
        WeightsError: the initial weights are not there, cannot be read, or do not fit; nothing is written.
    """
    attempt = uuid.uuid4().hex
    log = RunLog(storage.at(spec.run))
    head = log.head()
    if head is None:
        refuse_unfinished_fork(log)
    if is_chief(spec.accelerator, os.environ):
        head = _sound(log, attempt=attempt, telemetry=telemetry, suspicious=suspicious)
    accelerator = acquire(spec.accelerator, head.environment if head else None, deterministic=spec.train.deterministic)
    head = head_of_chief(log, head, accelerator)
    manifest = load_manifest(storage, dataset)
    loaded = None
    if head is None or head.tip is None:
        begun = begin(spec, manifest.features, code_folder=code_folder, accelerator=accelerator, telemetry=telemetry)
        state, of_model, loaded = begun.state, begun.identity, begun.loaded
        require_evaluation(spec, state, manifest.features, manifest.validation_examples)
        if repeats := repeats_words(dataset.train_examples, spec.train.global_batch_size):
            telemetry.emit(Note(text=repeats, warning=True))
    else:
        state, of_model = _built(spec, manifest, code_folder=code_folder, accelerator=accelerator, accept=accept)
    _note_environment(accelerator, telemetry)
    identity = identity_of(spec, dataset, of_model)
    if head is None and accelerator.is_chief:
        head = _begin(log, identity, accelerator.environment, attempt=attempt)
    head = require_head_of_chief(log, head, accelerator)
    # Also right after beginning: of two that begin at once, one finds the other's origin.
    if head.tip is None:
        refuse_unfinished_fork(log)
    if accelerator.is_chief:
        head = note_changes(
            log,
            head,
            identity=identity,
            environment=accelerator.environment,
            state=state,
            accept=accept,
            attempt=attempt,
            telemetry=telemetry,
        )
    head = require_head_of_chief(log, head, accelerator)
    if head.tip is not None:
        return head
    return _commit_step_0(log, state, head, loaded, attempt=attempt, telemetry=telemetry)


def _built(
    spec: RunSpec, manifest: DatasetManifest, *, code_folder: Path, accelerator: Accelerator, accept: Sequence[str]
) -> tuple[TrainState, dict[str, Any]]:
    """The state of a run that has begun, at its initial values, and the model's identity."""
    size = per_replica_batch_size(spec.train.global_batch_size, accelerator.replicas, spec.train.accumulate)
    unweighed = zero_batch(manifest, size)
    batch = weighed(unweighed, spec.train.class_weight)
    state = build_train_state(spec, code_folder=code_folder, accelerator=accelerator, batch=batch)
    # Before tracing: Python code of the model's may leave its marks then, and a resume traces nothing here.
    identity = identity_of_model(spec, state, code_folder)
    require_best(spec, state, unweighed)
    if spec.train.callbacks is not None and accept:
        require_callbacks(spec, state, batch, unweighed, code_folder=code_folder)
    return state, identity


def _note_environment(accelerator: Accelerator, telemetry: Sink) -> None:
    """Say what can make bits differ; after the user's code was imported, which may set threads."""
    if not accelerator.environment.deterministic:
        telemetry.emit(Note(text=_NOT_DETERMINISTIC))
    if words := threads_of_others(accelerator):
        telemetry.emit(Note(text=words, warning=True))


def _commit_step_0(
    log: RunLog, state: TrainState, head: Head, loaded: WeightsReport | None, *, attempt: str, telemetry: Sink
) -> Head:
    staged = state.stage(log.home, base=head.base, attempt=attempt)
    if staged is not None:
        body = Commit(checkpoint=staged, parent=None, exit_reason="initialized", initialized_from=loaded)
        head = commit(log, body).head
        telemetry.emit(Committed(step=0, path=staged.path, size=staged.size, metrics={}))
    return require_head_of_chief(log, head, state.accelerator)


def _sound(log: RunLog, *, attempt: str, telemetry: Sink, suspicious: bool) -> Head | None:
    log.require_whole()
    return sound_tip(log, attempt=attempt, telemetry=telemetry, suspicious=suspicious)


def _begin(log: RunLog, identity: dict[str, object], environment: Environment, *, attempt: str) -> Head:
    def decide(newest: Head | None) -> Body | None:
        return Origin(identity=identity, environment=environment) if newest is None else None

    entry = log.append(decide, attempt=attempt)
    return log.require_head() if entry is None else entry.head
