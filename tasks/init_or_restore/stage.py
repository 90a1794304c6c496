"""The stage init-or-restore: nothing, or the tip of the log -> the committed checkpoint to start from."""

import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.accelerator.cluster import is_chief
from tasks.foundation.accelerator.strategy import acquire
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.log_entry import Body, Commit, Environment, Head, Origin
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.weights import WeightsReport
from tasks.foundation.dataset.class_weight import weighed
from tasks.foundation.dataset.reader import load_manifest, zero_batch
from tasks.foundation.model.metrics import require_metric, take_metrics
from tasks.foundation.runlog.committing import commit, sound_tip
from tasks.foundation.runlog.following import head_of_chief, require_head_of_chief
from tasks.foundation.runlog.forking import refuse_unfinished_fork
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.state.train_state import TrainState, build_train_state
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Committed, Sink
from tasks.init_or_restore.beginning import require_callbacks, require_steps
from tasks.init_or_restore.changes import note_changes
from tasks.init_or_restore.identity import identity_of
from tasks.init_or_restore.weights.loading import load_weights


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
        ModelError: the user's model or callbacks cannot be used, or lack the metric of `checkpoint.keep_best`.
        WeightsError: the initial weights are not there, cannot be read, or do not fit; nothing is written.
    """
    attempt = uuid.uuid4().hex
    log = RunLog(storage.at(spec.run))
    head = log.head()
    if is_chief(spec.accelerator, os.environ):
        head = _sound(log, attempt=attempt, telemetry=telemetry, suspicious=suspicious)
    accelerator = acquire(spec.accelerator, head.environment if head else None)
    head = head_of_chief(log, head, accelerator)
    batch_size = per_replica_batch_size(spec.train.global_batch_size, accelerator.replicas, spec.train.accumulate)
    unweighed = zero_batch(load_manifest(storage, dataset), batch_size)
    batch = weighed(unweighed, spec.train.class_weight)
    state = build_train_state(spec, code_folder=code_folder, accelerator=accelerator, batch=batch)
    if spec.data.validation_fraction > 0:
        require_metric(spec.checkpoint.keep_best, take_metrics(state.model, accelerator.strategy))
    # Before tracing: Python code of the model's may leave its marks then, and a resume traces nothing here.
    identity = identity_of(spec, dataset, state, code_folder)
    fresh = head is None or head.tip is None
    if spec.train.callbacks is not None and (fresh or accept):
        # What they do to the model before training is part of step 0.
        require_callbacks(spec, state, code_folder=code_folder)
    if head is None:
        require_steps(spec, state, batch, unweighed)
    loaded = load_weights(state, spec.init, code_folder=code_folder, telemetry=telemetry) if fresh else None
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
