"""The stage init-or-restore: nothing, or the tip of the log -> the committed checkpoint to start from."""

import uuid
from pathlib import Path

from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.accelerator.strategy import acquire
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.identity import require_same_identity
from tasks.foundation.contracts.log_entry import Body, Change, Commit, Environment, Head, Origin
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.dataset.reader import load_manifest, zero_batch
from tasks.foundation.errors import RunLogError
from tasks.foundation.model.building import require_test_step
from tasks.foundation.model.metrics import require_metric, take_metrics
from tasks.foundation.model.stepping import require_train_step
from tasks.foundation.runlog.committing import commit, sound_tip
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.state.train_state import build_train_state
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Committed, Note, Sink
from tasks.init_or_restore.identity import identity_of


def init_or_restore(
    spec: RunSpec, dataset: DatasetRef, *, code_folder: Path, storage: Storage, telemetry: Sink
) -> Head:
    """Begin the run, or find the checkpoint it goes on from.

    A fresh run commits step 0, so that training only ever restores. A tip that proves damaged is quarantined and the
    one before becomes the tip.

    Returns:
        The head; its tip is whole and is what to train from.

    Raises:
        IdentityChanged: the run on disk is another one.
        NothingToRestore: all that was retained is damaged.
        ModelError: the user's model cannot be used, or lacks the metric of `checkpoint.keep_best`.
    """
    attempt = uuid.uuid4().hex
    log = RunLog(storage.at(spec.run))
    head = sound_tip(log, attempt=attempt, telemetry=telemetry)
    accelerator = acquire(spec.accelerator, head.environment if head else None)
    batch_size = per_replica_batch_size(spec.train.global_batch_size, accelerator.replicas)
    batch = zero_batch(load_manifest(storage, dataset), batch_size)
    state = build_train_state(spec, code_folder=code_folder, accelerator=accelerator, batch=batch)
    if spec.data.validation_fraction > 0:
        require_metric(spec.checkpoint.keep_best, take_metrics(state.model, accelerator.strategy))
    # Before tracing: Python code of the model's may leave its marks then, and a resume traces nothing here.
    identity = identity_of(spec, dataset, state, code_folder)
    if head is None:
        reference = spec.model.build
        require_train_step(state.model, batch, leaves=state.leaves, reference=reference, accelerator=accelerator)
        if spec.data.validation_fraction > 0:
            require_test_step(state.model, batch, reference=reference, accelerator=accelerator)
    head = _begin(log, identity, accelerator.environment, attempt=attempt) if head is None else head
    # Also right after beginning: of two that begin at once, one finds the other's origin.
    require_same_identity(head.identity, identity, home=log.home.uri)
    if head.tip is None:
        staged = state.stage(log.home, base=head.base, attempt=attempt)
        head = commit(log, Commit(checkpoint=staged, parent=None, exit_reason="initialized")).head
        telemetry.emit(Committed(step=0, path=staged.path, size=staged.size, metrics={}))
    return _note_environment(log, head, accelerator.environment, attempt=attempt, telemetry=telemetry)


def _begin(log: RunLog, identity: dict[str, object], environment: Environment, *, attempt: str) -> Head:
    def decide(newest: Head | None) -> Body | None:
        return Origin(identity=identity, environment=environment) if newest is None else None

    entry = log.append(decide, attempt=attempt)
    head = log.head() if entry is None else entry.head
    if head is None:
        raise RunLogError(f"{log.home.uri}: the log was there and is gone; see whether the folder is still mounted")
    return head


def _note_environment(log: RunLog, head: Head, environment: Environment, *, attempt: str, telemetry: Sink) -> Head:
    """A change of devices, threads or versions can change the bits: say so aloud, and in the log."""
    if head.environment == environment:
        return head
    before, now = head.environment.model_dump(), environment.model_dump()
    changed = "; ".join(f"{key}: {before[key]} -> {now[key]}" for key in now if now[key] != before[key])
    telemetry.emit(
        Note(text=f"the environment changed, so the bits may differ from an uninterrupted run: {changed}", warning=True)
    )

    def decide(newest: Head | None) -> Body | None:
        if newest is None or newest.environment == environment:
            return None
        return Change(environment=environment)

    entry = log.append(decide, attempt=attempt)
    return head if entry is None else entry.head
