"""The stage init-or-restore: begins a run at step 0, or finds the committed checkpoint that it continues from.

A run file and environment that differ from the run's log are refused, or logged as one accepted change.
"""

import os
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from baton.tasks.foundation.checkpoint.fork import refuse_unfinished_fork
from baton.tasks.foundation.checkpoint.retention import quarantine_damaged_tips
from baton.tasks.foundation.checkpoint.save import commit_staged
from baton.tasks.foundation.checkpoint.verify import read_manifest
from baton.tasks.foundation.checkpoint.write import stage_checkpoint
from baton.tasks.foundation.contracts.checkpoint import CarriedState, CheckpointRef, WeightsReport
from baton.tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef
from baton.tasks.foundation.contracts.identity import Difference, difference_words, differences, require_same_identity
from baton.tasks.foundation.contracts.log_entry import Body, Change, Commit, Environment, Head, Origin
from baton.tasks.foundation.contracts.placement import per_replica_batch_size
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import InitOrRestoreCall
from baton.tasks.foundation.dataset.evaluation_sets import set_batches
from baton.tasks.foundation.dataset.manifest import changed_files, load_manifest, require_labels_of_run, zero_examples
from baton.tasks.foundation.dataset.model_inputs import apply_class_weight
from baton.tasks.foundation.dataset.order import oversized_batch_warning
from baton.tasks.foundation.dataset.read import WorkerFiles, training_dataset
from baton.tasks.foundation.dataset.slice_input import require_no_python, require_shared_storage
from baton.tasks.foundation.errors import StateMismatch
from baton.tasks.foundation.log.appends import broadcast_head, require_broadcast_head
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.cluster import is_chief
from baton.tasks.foundation.machine.devices import Accelerator, acquire, thread_override_warning
from baton.tasks.foundation.machine.processes import hash_seed
from baton.tasks.foundation.model.build import preserved_random_states
from baton.tasks.foundation.model.code_changes import CodeReason
from baton.tasks.foundation.model.model_identity import summarize
from baton.tasks.foundation.model.saved_code import save_code
from baton.tasks.foundation.model.variables import stateful_layers_warning
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.state.train_state import TrainState, carry, is_same_tree
from baton.tasks.foundation.state.warm_state import PROCESS_STATE, WarmState, warm_state_of
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.telemetry.events import Note, Sink
from baton.tasks.init_or_restore.model_requirements import (
    batch_dependent_parts,
    describe_dependence,
    extremes_of,
    require_best,
    require_callbacks,
    require_evaluations,
    require_extremes,
)
from baton.tasks.init_or_restore.new_run import build_new_run, callback_record, run_identity, user_code_identity

_DETERMINISTIC = (
    "from here on TensorFlow uses deterministic operations only (train.deterministic: true; set it to false to "
    "continue as before)"
)
_NOT_DETERMINISTIC = "from here on TensorFlow may use non-deterministic operations (train.deterministic: false)"
# Adam divides by 1 - beta**iterations to correct for averages that begin at 0; late in a run it no longer does.
_LARGER_UPDATES = (
    "; the first updates with fresh velocities are larger than usual, because the iterations go on: a lower learning "
    "rate for a while helps"
)
_ALLOWED_TO_DIFFER = (
    "train.deterministic is false: operations that are not deterministic are allowed, so two runs of this file may "
    "differ in their bits"
)


def accepted_changes(
    log: RunLog,
    head: Head,
    *,
    identity: dict[str, object],
    state: TrainState,
    accept: Sequence[str],
    code: Callable[[Sequence[Difference]], Sequence[str]] = lambda _: (),
    files: Callable[[], Sequence[str]] = tuple,
) -> tuple[Difference, ...]:
    """Return the accepted differences between a run file and its log.

    For the arguments see `record_changes` and `require_same_identity`.

    Raises:
        IdentityChanged: a key differs and was not accepted.
        StateMismatch: an accepted change has other weights than the tip.
    """
    fits = True
    if head.tip is not None and differences(head.identity, identity):
        try:
            _carried(log, head.tip, state)
        except StateMismatch:
            if accept:
                raise
            fits = False
    return require_same_identity(
        head.identity, identity, home=log.home.uri, accept=accept, code=code, files=files, fits=fits
    )


def record_changes(
    log: RunLog,
    head: Head,
    accepted: Sequence[Difference],
    *,
    identity: dict[str, object],
    environment: Environment,
    state: TrainState,
    save_code: Callable[[], dict[str, str]],
    accept: Sequence[str],
    attempt: str,
    telemetry: Sink,
) -> Head:
    """Append one entry with accepted identity changes and any environment changes; nothing if there are none.

    Args:
        accepted: of `accepted_changes`.
        state: the state that the run file builds.
        save_code: saves the run file and its code in the home, and returns what the identity records of it; called only
            for an accepted difference.
        accept: identity keys that may differ.
        attempt: id of this attempt.
        telemetry: receives a note for each change.

    Returns:
        The head; identity and environment agree with it.

    Raises:
        IdentityChanged: another process has logged another identity meanwhile.
    """
    if not accepted and head.environment == environment:
        return head
    carried = None if head.tip is None or not accepted else _carried(log, head.tip, state)
    if accepted:
        step = 0 if head.tip is None else head.tip.step
        identity = identity | save_code()
        telemetry.emit(Note(text=f"from step {step} on, as accepted: {difference_words(accepted)}"))
        if carried is not None:
            larger = step > 0 and any(path.endswith("_velocity") for path in carried.fresh)
            words = f"variables of the checkpoint {carried.words} (each in baton log --json)"
            telemetry.emit(Note(text=f"{words}{_LARGER_UPDATES if larger else ''}"))
    if head.environment != environment:
        telemetry.emit(Note(text=_environment_words(head.environment, environment, state), warning=True))

    def decide(newest: Head | None) -> Body | None:
        if newest is None:
            return None
        # Compare with the newest entry: another process may have logged the same, or accepted another change.
        found = require_same_identity(newest.identity, identity, home=log.home.uri, accept=accept)
        if not found and newest.environment == environment:
            return None
        keys = tuple(dict.fromkeys(each.of for each in found))
        if not keys:
            return Change(environment=environment)
        return Change(environment=environment, identity=identity, accepted=keys, variables=carried)

    entry = log.append(decide, attempt=attempt)
    return log.require_head() if entry is None else entry.head


def _carried(log: RunLog, tip: CheckpointRef, state: TrainState) -> CarriedState | None:
    """What becomes of the tip's variables; None if the model has the same."""
    manifest = read_manifest(log.home, tip)
    if is_same_tree(manifest, state.tree):
        return None
    return carry(manifest, state.tree, where=f"{log.home.uri}/{tip.path}", home=log.home.uri)


def _environment_words(before: Environment, now: Environment, state: TrainState) -> str:
    """Describe changes of devices, threads, versions, processor or variables, which can change the bits."""
    changes = {key: f"{key}: {old} -> {new}" for key, (old, new) in before.changes_to(now).items()}
    if now.deterministic != before.deterministic:
        changes["deterministic"] = _DETERMINISTIC if now.deterministic else _NOT_DETERMINISTIC
    changed = "; ".join(changes.values())
    words = f"the environment changed, so the bits may differ from an uninterrupted run: {changed}"
    if before.replicas == now.replicas:
        return words
    return f"{words}. {before.replicas} replicas became {now.replicas}: " + describe_dependence(
        batch_dependent_parts(state.model)
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
    accelerator = _acquire(spec, dataset, head, place.root)
    head = broadcast_head(log, head, accelerator)
    manifest = load_manifest(place.root, dataset)
    PROCESS_STATE.forget()  # before another one is built
    if head is None or head.tip is None:
        warm, of_model, weights = _build_new(call, manifest, accelerator, place)
    else:
        weights = None
        warm, of_model = _build_state(spec, manifest, code_folder=code_folder, accelerator=accelerator, accept=accept)
    _require_functions_for_servers(spec, dataset, warm, place.root)
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
    code = CodeReason(home=log.home, recorded=head.identity, spec=spec, folder=code_folder)
    files = partial(changed_files, place.root, head.identity, call.dataset)
    accepted = accepted_changes(log, head, identity=identity, state=warm.state, accept=accept, code=code, files=files)
    require_labels_of_run(place.root, head.identity.get("data.folder"), call.dataset)  # also of accepted data
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


def _acquire(spec: RunSpec, dataset: DatasetRef, head: Head | None, root: Storage) -> Accelerator:
    """The accelerator of this process; if it has servers, they find the dataset."""
    accelerator = acquire(spec.accelerator, head.environment if head else None, deterministic=spec.train.deterministic)
    if accelerator.has_servers:
        require_shared_storage(root, dataset, accelerator.strategy)
    return accelerator


def _require_functions_for_servers(spec: RunSpec, dataset: DatasetRef, warm: WarmState, root: Storage) -> None:
    """Refuse transforms that a host without Python cannot run, if there are such hosts."""
    if not warm.state.accelerator.has_servers:
        return
    inputs, size = warm.inputs, spec.train.global_batch_size
    with preserved_random_states():
        worker = WorkerFiles(root=root.uri, batches=1)
        require_no_python(
            training_dataset(
                root, dataset, seed=0, global_batch_size=size, window_shards=1, first_batch=0,
                functions=inputs.training_functions, worker=worker,
            )
        )  # fmt: skip
        if dataset.examples_of("validation"):
            function = inputs.validation_function
            require_no_python(
                set_batches(root, dataset, on="validation", batch_size=1, function=function, on_server=True)
            )


def _build_new(
    call: InitOrRestoreCall, manifest: DatasetManifest, accelerator: Accelerator, place: Place
) -> tuple[WarmState, dict[str, object], WeightsReport | None]:
    """The state of a new run, the model's identity, and what was loaded into it."""
    new = build_new_run(
        call.spec,
        manifest.features,
        reading=manifest.reading,
        code_folder=place.code_folder,
        accelerator=accelerator,
        telemetry=place.telemetry,
    )
    require_evaluations(call.spec, new.warm, call.dataset, place.root)
    _warn(
        place.telemetry,
        oversized_batch_warning(call.dataset.train_examples, call.spec.train.global_batch_size),
        stateful_layers_warning(new.warm.state.model, shuffle=call.spec.data.shuffle),
    )
    return new.warm, new.identity, new.loaded


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
        telemetry.emit(Note(text=_ALLOWED_TO_DIFFER))
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
