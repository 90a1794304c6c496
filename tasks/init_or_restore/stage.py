"""The stage init-or-restore: begins a run at step 0, or finds the committed checkpoint that it continues from."""

import os
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tasks.foundation.checkpoint.fork import refuse_unfinished_fork
from tasks.foundation.checkpoint.retention import quarantine_damaged_tips
from tasks.foundation.checkpoint.save import commit_staged
from tasks.foundation.checkpoint.write import stage_checkpoint
from tasks.foundation.contracts.checkpoint import WeightsReport
from tasks.foundation.contracts.dataset import DatasetManifest
from tasks.foundation.contracts.log_entry import Body, Commit, Environment, Head, Origin
from tasks.foundation.contracts.placement import per_replica_batch_size
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.stage_calls import InitOrRestoreCall
from tasks.foundation.dataset.manifest import load_manifest, zero_examples
from tasks.foundation.dataset.model_inputs import apply_class_weight
from tasks.foundation.dataset.order import oversized_batch_warning
from tasks.foundation.machine.devices import Accelerator, acquire, thread_override_warning
from tasks.foundation.machine.hosts import is_chief
from tasks.foundation.machine.processes import hash_seed
from tasks.foundation.model.code_digest import save_code
from tasks.foundation.model.model_identity import summarize
from tasks.foundation.model.variables import stateful_layers_warning
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.multi_host import broadcast_head, require_broadcast_head
from tasks.foundation.stage import Place
from tasks.foundation.state.warm_state import PROCESS_STATE, WarmState, warm_state_of
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Sink
from tasks.init_or_restore.changes import accepted_changes, record_changes
from tasks.init_or_restore.model_requirements import (
    extremes_of,
    require_best,
    require_callbacks,
    require_evaluations,
    require_extremes,
)
from tasks.init_or_restore.new_run import build_new_run, callback_record, run_identity, user_code_identity

_NOT_DETERMINISTIC = (
    "train.deterministic is false: operations that are not deterministic are allowed, so two runs of this file may "
    "differ in their bits"
)


def init_or_restore(call: InitOrRestoreCall, place: Place) -> Head:
    """Begin the run, or find the checkpoint that it continues from.

    A new run commits step 0, so that training always starts with a restore. Initial weights are loaded only then. A
    damaged tip is quarantined, and the checkpoint before it becomes the tip.

    Args:
        call: the run file, its dataset, and the accepted identity keys. An accepted difference is logged, and becomes
            part of the identity.
        place: where the run's home and the user's code are.

    Returns:
        The head; training starts from its tip. It is whole, unless this process is still reading it ahead: then the
        restore verifies it.

    Raises:
        IdentityChanged: the run file differs from the run in more keys than were accepted.
        StateMismatch: an accepted change has other weights than the tip.
        InvalidInput: the run is a fork that was not finished.
        NothingToRestore: every retained checkpoint is damaged.
        RunLogError: the log has lost an entry, or cannot be read.
        SourceError: the source of a new run yields batches instead of examples.
        ModelError: the user's model or callbacks cannot be used, or lack the metric of `checkpoint.keep_best`.
        WeightsError: the initial weights are missing, unreadable, or do not fit; nothing is written.
    """
    spec, dataset, accept, log = call.spec, call.dataset, call.accept, place.log
    code_folder, telemetry = place.code_folder, place.telemetry
    attempt = uuid.uuid4().hex
    if is_chief(spec.accelerator, os.environ):
        log.require_whole()
        head = quarantine_damaged_tips(log, attempt=attempt, telemetry=telemetry, verify_bytes=call.verify_bytes)
    else:
        head = log.head()
    if head is None:
        refuse_unfinished_fork(log)
    accelerator = acquire(spec.accelerator, head.environment if head else None, deterministic=spec.train.deterministic)
    head = broadcast_head(log, head, accelerator)
    manifest = load_manifest(place.root, dataset)
    weights = None
    PROCESS_STATE.forget()  # before another one is built
    if head is None or head.tip is None:
        new = build_new_run(
            spec,
            manifest.features,
            reading=manifest.reading,
            code_folder=code_folder,
            accelerator=accelerator,
            telemetry=telemetry,
        )
        warm, of_model, weights = new.warm, new.identity, new.loaded
        require_evaluations(spec, warm, dataset, place.root)
        _warn(
            telemetry,
            oversized_batch_warning(dataset.train_examples, spec.train.global_batch_size),
            stateful_layers_warning(warm.state.model, shuffle=spec.data.shuffle),
        )
    else:
        warm, of_model = _build_state(spec, manifest, code_folder=code_folder, accelerator=accelerator, accept=accept)
    _require_extremes(call, head, warm, place)
    _note_environment(accelerator, telemetry)
    identity = run_identity(spec, dataset, of_model)
    accelerator.require_same(identity)
    save = partial(_save_code, log.home, spec, warm)
    if head is None and accelerator.is_chief:
        identity |= save()  # first, so that what an entry names is there
        environment = accelerator.environment.model_copy(update={"hash_seed": hash_seed()})
        head = _append_origin(log, identity, environment, attempt=attempt)
    head = require_broadcast_head(log, head, accelerator)
    # Check again after the origin entry: another process may have begun or forked this run meanwhile.
    if head.tip is None:
        refuse_unfinished_fork(log)
    # Every host checks them, so that none waits for a chief that refuses.
    accepted = accepted_changes(log, head, identity=identity, state=warm.state, accept=accept)
    if accelerator.is_chief:
        head = record_changes(
            log,
            head,
            accepted,
            identity=identity,
            environment=accelerator.environment.in_run_of(head.environment),
            state=warm.state,
            save_code=save,
            accept=accept,
            attempt=attempt,
            telemetry=telemetry,
        )
    warm.has_recorded_contents = True
    head = require_broadcast_head(log, head, accelerator)
    if head.tip is None:
        head = _commit_step_0(log, warm, head, weights, attempt=attempt, telemetry=telemetry)
    if spec.stages.train_segment.deployment is None or spec.stages.evaluate.deployment is None:
        PROCESS_STATE.keep(warm)  # another stage of this process uses it
    return head


def _build_state(
    spec: RunSpec, manifest: DatasetManifest, *, code_folder: Path, accelerator: Accelerator, accept: Sequence[str]
) -> tuple[WarmState, dict[str, object]]:
    """The state of an existing run, with its initial values, and the model's identity."""
    warm = warm_state_of(spec, manifest.features, code_folder=code_folder, accelerator=accelerator)
    state, size = warm.state, per_replica_batch_size(spec.train.global_batch_size, accelerator.replicas)
    unweighed = zero_examples(warm.inputs.validation, size)
    # Before tracing, which may run Python code with side effects on the model. A resume traces nothing here.
    identity = user_code_identity(spec, state, code_folder)
    require_best(spec, state, unweighed)
    if spec.train.callbacks is not None and accept:
        batch = apply_class_weight(zero_examples(warm.inputs.train, size), spec.train.class_weight)
        warm.seed_as_built()
        started = require_callbacks(spec, state, batch, unweighed, code_folder=code_folder)
        warm.keep_companion(started)
        identity |= callback_record(started)
    return warm, identity


def _require_extremes(call: InitOrRestoreCall, head: Head | None, warm: WarmState, place: Place) -> None:
    """Refuse a new run, or an accepted change, whose model cannot be trained on a value of its data."""
    if head is None or head.tip is None or call.accept:
        size = per_replica_batch_size(call.spec.train.global_batch_size, warm.state.accelerator.replicas)
        extremes = extremes_of(call.spec, call.dataset, place.root)
        require_extremes(warm.state, extremes, reference=call.spec.model.build, size=size)


def _save_code(home: Storage, spec: RunSpec, warm: WarmState) -> dict[str, str]:
    """Save the run file, its code and the summary of its model; returns what the identity records of them."""
    return save_code(home, spec, warm.code_folder, summarize(warm.state.model))


def _warn(telemetry: Sink, *warnings: str | None) -> None:
    for text in filter(None, warnings):
        telemetry.emit(Note(text=text, warning=True))


def _note_environment(accelerator: Accelerator, telemetry: Sink) -> None:
    """Report what can change the bits of training. Called after the user's code is imported, which may set threads."""
    if not accelerator.environment.deterministic:
        telemetry.emit(Note(text=_NOT_DETERMINISTIC))
    if words := thread_override_warning(accelerator):
        telemetry.emit(Note(text=words, warning=True))


def _commit_step_0(
    log: RunLog, warm: WarmState, head: Head, weights: WeightsReport | None, *, attempt: str, telemetry: Sink
) -> Head:
    staged = stage_checkpoint(warm.state, log.home, base=head.base, attempt=attempt)
    newest = None
    if staged is not None:
        body = Commit(
            checkpoint=staged,
            parent=None,
            exit_reason="initialized",
            initialized_from=weights,
            target=warm.spec.train.known_target,
        )
        newest = commit_staged(log, body, spec=warm.spec, telemetry=telemetry).head
    head = require_broadcast_head(log, newest, warm.state.accelerator)
    warm.set_content(staged)
    return head


def _append_origin(log: RunLog, identity: dict[str, object], environment: Environment, *, attempt: str) -> Head:
    def decide(newest: Head | None) -> Body | None:
        return Origin(identity=identity, environment=environment) if newest is None else None

    entry = log.append(decide, attempt=attempt)
    return log.require_head() if entry is None else entry.head
