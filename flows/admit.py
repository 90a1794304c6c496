"""Whether a command may train a run: every cheap check, once, before Prefect or TensorFlow is waited for.

Run file, code and data files are checked before anything is written, and a run that another process trains is refused
before a second process wastes minutes. That is no lock. Two processes that start together find nobody, and the log lets
only one of them commit. A new run's model is built as soon as the first example is known, before a dataset is written.
"""

import importlib.util
import os
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from baton.flows.host_checks import agree
from baton.flows.opened_run import OpenedRun
from baton.flows.process_start import keep_hash_seed
from baton.flows.result import Goal, RelayResult, result_of
from baton.tasks.foundation.contracts.attempt import AttemptRecord, utc_time
from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.dataset import Feature, Reading
from baton.tasks.foundation.contracts.identity import (
    CALLBACKS,
    identity_in_run_file,
    identity_without_code,
    require_same_identity,
)
from baton.tasks.foundation.contracts.log_entry import Head
from baton.tasks.foundation.contracts.placement import per_replica_batch_size
from baton.tasks.foundation.contracts.run_spec import with_examples
from baton.tasks.foundation.errors import BatonError, RunAtWork, RunFileError, StorageError
from baton.tasks.foundation.keras_config import require_keras_file
from baton.tasks.foundation.log.attempts import AttemptReader, Attempts, is_alive, require_progress
from baton.tasks.foundation.machine.cluster import cluster_of, is_chief, several_hosts
from baton.tasks.foundation.machine.collectives import OneHost
from baton.tasks.foundation.machine.environment import backend_note, quiet_tensorflow
from baton.tasks.foundation.machine.host_link import HostLink
from baton.tasks.foundation.machine.processes import is_gone, is_running, process_name
from baton.tasks.foundation.machine.tpu import require_first_worker, require_one_host, wait_for_servers
from baton.tasks.foundation.model.code_changes import (
    CodeChange,
    CodeReason,
    certain_changes,
    changes_since_saved,
)
from baton.tasks.foundation.model.saved_code import require_savable
from baton.tasks.foundation.telemetry.events import Note, Phase, Sink
from baton.tasks.foundation.telemetry.formatting import duration_words
from baton.tasks.foundation.telemetry.ledger import heartbeat_interval
from baton.tasks.foundation.text import command, listed, message, option
from baton.tasks.foundation.user_functions import require_function, require_imports
from baton.tasks.init_or_restore.weights.location import locate_weights

if TYPE_CHECKING:
    from baton.tasks.foundation.machine.devices import Accelerator


def preflight(run: OpenedRun) -> None:
    """Check keras.json, the tracker, batch size, functions and weights, without importing Keras or the user's code.

    Raises:
        InvalidInput: one of them cannot be used.
    """
    spec, folder = run.spec, run.folder
    require_keras_file()
    _require_trackers(run)
    accelerator = spec.accelerator
    known = accelerator.replicas if accelerator.kind != "multi_worker" else len(cluster_of(os.environ).addresses)
    per_replica_batch_size(spec.train.global_batch_size, known, spec.train.accumulate)
    evaluating = spec.stages.evaluate.accelerator
    if evaluating is not None:
        per_replica_batch_size(spec.train.global_batch_size, evaluating.replicas)
    require_function(spec.model.build, folder)
    for reference in spec.data.all_sources:
        if ":" in reference:
            require_function(reference, folder)
    for reference in spec.data.transforms:
        require_function(reference, folder)
    if spec.train.callbacks is not None:
        require_function(spec.train.callbacks, folder)
    if spec.init.weights:
        head = run.log.head()
        if head is None or head.tip is None:  # a run that has begun has them in its checkpoint
            for source in spec.init.weights:
                locate_weights(source, folder)


def _require_trackers(run: OpenedRun) -> None:
    """Check that the packages of the trackers are installed, and that W&B's offline folder has a place."""
    asked = {"mlflow": run.spec.tracking.mlflow, "wandb": run.spec.tracking.wandb}
    for (key, settings), package in zip(asked.items(), ("mlflow-skinny", "wandb"), strict=True):
        if settings is not None and importlib.util.find_spec(key) is None:
            raise RunFileError(
                f"tracking.{key} is set, and package {key} is not installed here; install {package} (the extra "
                f"`{key}` of Baton), or drop the key"
            )
    if asked["wandb"] is not None and "://" in run.home.uri:
        raise RunFileError(
            f"tracking.wandb writes an offline run into the home, and storage is {run.spec.storage}; take a folder on "
            "a local disk, or drop the key"
        )


def require_packages_and_source(run: OpenedRun) -> None:
    """Check what this process needs to do the work: a supported TPU, the packages of the user's code, the source.

    A stage that runs as a deployment has its own packages and files, so they are not checked here.

    Raises:
        InvalidInput: a package is not installed, the source cannot be read, or this is one host of a TPU slice.
    """
    remote = run.spec.stages.remote()
    accelerator = run.spec.accelerator
    if "train_segment" not in remote and accelerator.kind in {"auto", "tpu"}:
        (require_one_host if accelerator.tpu == "local" else require_first_worker)()
    if "prepare_data" not in remote:
        _require_sources(run.spec.data, run.folder)
    if not {"init_or_restore", "train_segment"} <= remote.keys():
        for reference in (run.spec.model.build, run.spec.train.callbacks, *run.spec.data.transforms):
            if reference is not None:
                require_imports(reference, run.folder)


def _require_sources(data: DataSpec, folder: Path) -> None:
    """Check `data.source` or each source of a mixture, and the own sets."""
    from baton.tasks.prepare_data.mixture import errors_at

    if not data.sources:
        _require_source(data, folder)
    for index in range(len(data.sources)):
        with errors_at(f"data.sources[{index}]"):
            _require_source(data.of_source(index), folder)
    for name in data.own_sets:
        with errors_at(f"data.{name}"):
            _require_source(data.of_set(name), folder)


def _require_source(data: DataSpec, folder: Path) -> None:
    if ":" in data.source:
        require_imports(data.source, folder)
    else:
        from baton.tasks.prepare_data.sources.registry import require_source  # verbs that only read need no source

        require_source(data, folder)


def require_lasting_storage(run: OpenedRun) -> None:
    """Refuse a storage that ends with the process: later commands read what this one leaves.

    Raises:
        RunFileError: storage is memory://.
    """
    if run.spec.storage.startswith("memory:"):
        raise RunFileError(f"storage is {run.spec.storage}, which ends with this process; name a folder, or gs://")


# A heartbeat may take this much longer than its interval to be written and read.
_LATE_FACTOR, _LATE_SECONDS = 1.5, 2.0
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessProbe:
    """Clocks and the process table; tests replace them."""

    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    is_running: Callable[[str], bool] = is_running
    is_gone: Callable[[str], bool] = is_gone


def require_idle(
    run: OpenedRun,
    *,
    take_over: bool,
    telemetry: Sink,
    attempts: Attempts | None = None,
    probe: LivenessProbe = LivenessProbe(),
) -> None:
    """Refuse to train a run that another process is training.

    A process of this machine is looked up in the process table. A process of another machine is known only by the
    heartbeats in its record, and the last one may be from just before it died. So this waits for its next heartbeat: a
    few seconds for a young process, at most 47.

    Args:
        take_over: do not look.
        telemetry: receives a note before the wait.
        attempts: the records of its attempts, if the caller has just read them.
        probe: clocks and the process table.

    Raises:
        RunAtWork: another process trains the run.
    """
    if take_over:
        return
    known = _possibly_alive(run.attempts, probe, attempts)
    rivals = [record for record in known if probe.is_running(record.process)]
    unsure = [record for record in known if record not in rivals]
    if not rivals and unsure:
        rivals = _wait_for_heartbeats(unsure, run.attempts, telemetry, probe)
    if rivals:
        raise RunAtWork(
            message(
                f"{run.spec.run} is at work: {_words(rivals[0], probe)}",
                details=[_words(record, probe) for record in rivals[1:]],
                hints=[
                    "wait until it ends, or stop it; the same command then continues",
                    option("take-over", True)
                    + " starts anyway; the first to commit continues, the other ends with StaleWriter",
                ],
            )
        )


def _possibly_alive(
    reader: AttemptReader, probe: LivenessProbe, attempts: Attempts | None = None
) -> list[AttemptRecord]:
    try:
        records = (attempts or reader.read()).records
    except StorageError:  # the next reader of the log reports it
        return []
    now, own = probe.now(), process_name()
    return [
        record
        for record in records
        if is_alive(record, now=now, gone=probe.is_gone)
        # A remote stage belongs to its parent, which has its own record.
        and record.within is None
        and (not own or record.process != own)
    ]


def _wait_for_heartbeats(
    unsure: list[AttemptRecord], reader: AttemptReader, telemetry: Sink, probe: LivenessProbe
) -> list[AttemptRecord]:
    seconds = max(_until_next_sign(record) for record in unsure)
    telemetry.emit(
        Note(
            text=f"another process may be at work: {_words(unsure[0], probe)}; waiting up to "
            f"{duration_words(seconds)} for its next heartbeat (--take-over does not wait)"
        )
    )
    seen = {record.attempt: record.alive for record in unsure}
    until = probe.clock() + seconds
    while probe.clock() < until:
        probe.sleep(_POLL_SECONDS)
        alive = [record for record in _possibly_alive(reader, probe) if record.attempt in seen]
        again = [record for record in alive if record.alive != seen[record.attempt]]
        if again or not alive:
            return again
    return []


def _until_next_sign(record: AttemptRecord) -> float:
    age = max((utc_time(record.alive) - utc_time(record.began)).total_seconds(), 0.0)
    return _LATE_FACTOR * heartbeat_interval(age) + _LATE_SECONDS


def _words(record: AttemptRecord, probe: LivenessProbe) -> str:
    silent = max((probe.now() - utc_time(record.alive)).total_seconds(), 0.0)  # another machine's clock
    return f"process {record.pid} on {record.host}, step {record.step}, last heartbeat {duration_words(silent)} ago"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A run that a command may train, and how.

    Attributes:
        run: the run.
        goal: how far the command goes.
        accept: identity keys whose change is accepted, and logged.
        try_again: whether earlier attempts without progress are forgotten.
        take_over: whether the command starts even if another process trains the run.
        head: the folded state of the newest log entry at this moment; None if the run has not begun.
        notes: what the user should know about the storage.
        link: of this host to the other hosts of the run; None for a single host.
    """

    run: OpenedRun
    goal: Goal
    accept: tuple[str, ...]
    try_again: bool
    take_over: bool
    head: Head | None
    notes: tuple[str, ...]
    link: HostLink | None = None

    def with_examples(self, train_examples: int) -> "Admitted":
        """The same, with the number of training examples in the settings; from it follows where epochs end.

        Raises:
            RunFileError: an epoch has no whole batch, or the goal lies beyond the target.
        """
        spec = with_examples(self.run.spec, train_examples)
        self.goal.require_within(spec)
        return replace(self, run=replace(self.run, spec=spec))


def admit(
    run: OpenedRun,
    goal: Goal,
    *,
    accept: Sequence[str] = (),
    try_again: bool = False,
    take_over: bool = False,
    telemetry: Sink,
) -> Admitted | RelayResult:
    """Check everything that is cheap to check. Nothing of the run is written; the storage is tried out with a probe.

    The process of a command that hashes otherwise than the run's other processes starts anew here. Several hosts then
    meet, and all are admitted or none is; the servers of a slice are waited for.

    Args:
        goal: how far to go.
        accept: identity keys whose change is accepted.
        try_again: forget earlier attempts without progress.
        take_over: do not look for another process that trains the run.
        telemetry: receives a note if another process may be at work and is waited for.

    Returns:
        The admitted run, or the command's result if nothing is left to do.

    Raises:
        InvalidInput: the run file, the code, a package, a path or the storage cannot be used.
        IdentityChanged: the run on disk differs from the run file in a key that is not accepted.
        NoProgress: `stop.attempts_without_progress` attempts in a row did not advance the run.
        RunAtWork: another process trains the run.
        AcceleratorLost: another host, or the server of one, did not come.
    """

    def alone() -> Admitted | RelayResult:
        return _admit_alone(run, goal, accept=accept, try_again=try_again, take_over=take_over, telemetry=telemetry)

    cluster = several_hosts(run.spec.accelerator, os.environ)
    if cluster is None:
        outcome = alone()
        if isinstance(outcome, Admitted):  # here, as hosts that meet: a vain wait is no attempt without progress
            wait_for_servers(run.spec.accelerator, lambda text: telemetry.emit(Note(text=text)))
        return outcome
    found, refusal = None, None
    try:
        found = alone()
    except BatonError as fault:
        refusal = fault
    idle = isinstance(found, RelayResult)
    link = agree(cluster, run, goal, accept=accept, refusal=refusal, nothing_to_do=idle, telemetry=telemetry)
    if found is None:
        raise AssertionError("hosts go on only if none has refused") from refusal
    if isinstance(found, Admitted):  # now a refusal of one is that of all
        require_recorded_identity(run, found.head, accept=accept)
        found = replace(found, link=link)
    return found


def _admit_alone(
    run: OpenedRun, goal: Goal, *, accept: Sequence[str], try_again: bool, take_over: bool, telemetry: Sink
) -> Admitted | RelayResult:
    preflight(run)
    # With initial weights, `preflight` has just asked for it.
    head = run.log.head_seen() if run.spec.init.weights else run.log.head()
    run = run.with_recorded_examples(head)
    goal.require_within(run.spec)
    done = result_if_done(run, goal, head, accept=accept, telemetry=telemetry)
    if done is not None:
        return done
    hashes = "" if head is None else keep_hash_seed(head.environment.hash_seed)  # before the user's code is imported
    quiet_tensorflow()
    require_packages_and_source(run)
    if head is None or accept:
        require_savable(run.spec, run.folder)
    attempts = run.attempts.read()
    if not try_again:
        require_advancing(run, head, attempts)
    chief = is_chief(run.spec.accelerator, os.environ)
    if chief:  # the other hosts would find their own chief's heartbeat
        require_idle(run, take_over=take_over, telemetry=telemetry, attempts=attempts)
    notes = run.root.probe(run.spec.run)
    return Admitted(
        run=run,
        goal=goal,
        accept=tuple(accept),
        try_again=try_again,
        take_over=take_over,
        head=head,
        notes=(*(notes if chief else ()), *filter(None, (hashes, backend_note()))),
    )


def require_still_idle(admitted: Admitted, *, telemetry: Sink) -> None:
    """Look once more for another process, after TensorFlow and Prefect took their seconds to start.

    Raises:
        RunAtWork: another process has started to train the run meanwhile.
    """
    if is_chief(admitted.run.spec.accelerator, os.environ):
        require_idle(admitted.run, take_over=admitted.take_over, telemetry=telemetry)


def require_free_servers(run: OpenedRun, telemetry: Sink) -> None:
    """Wait for the TensorFlow servers of a slice; a second client would take the TPU from the training.

    Raises:
        RunAtWork: another process trains the run on them.
        AcceleratorLost: a server did not come.
    """
    if run.spec.accelerator.tpu == "local":
        return
    try:
        require_idle(run, take_over=False, telemetry=telemetry)
    except RunAtWork as fault:
        raise RunAtWork(
            f"{str(fault).splitlines()[0]}; the servers of accelerator.tpu have one client: try again when it has "
            "ended, or here, with " + command("", ("set", "accelerator.kind=cpu"), ("set", "accelerator.tpu=local"))
        ) from fault
    wait_for_servers(run.spec.accelerator, lambda text: telemetry.emit(Note(text=text)))


def require_recorded_identity(
    run: OpenedRun, head: Head | None, *, accept: Sequence[str], changes: Sequence[CodeChange] | None = None
) -> None:
    """Compare the run file, and the text of its code, with the log before a dataset is prepared or code imported.

    What only data and model tell, init-or-restore compares.

    Args:
        accept: identity keys whose change is accepted.
        changes: of its code since the run saved it; None: what concerns the code is not compared.

    Raises:
        IdentityChanged: the run on disk differs from the run file in a key that is not accepted.
    """
    if head is None:
        return
    if changes is None:
        now = identity_in_run_file(run.spec)
    else:
        now = identity_without_code(run.spec, head.identity)
        now |= certain_changes(changes, {**head.identity, **now}, run.spec, run.folder)
    require_same_identity(
        head.identity,
        now,
        home=run.home.uri,
        accept=accept,
        code=CodeReason(home=run.home, recorded=head.identity, spec=run.spec, folder=run.folder),
        before_imports=True,
    )


def result_if_done(
    run: OpenedRun, goal: Goal, head: Head | None, *, accept: Sequence[str] = (), telemetry: Sink
) -> RelayResult | None:
    """The result where nothing is left to do, from the log alone; `telemetry` gets a warning if a report fails.

    Raises:
        IdentityChanged: the run on disk differs from the run file in a key that is not accepted.
    """
    reached = goal.reached(head, run.spec)
    # Several hosts first find out whether they differ from each other.
    if reached or several_hosts(run.spec.accelerator, os.environ) is None:
        changes = None if reached else _changes_of_code(run, head)
        require_recorded_identity(run, head, accept=accept, changes=changes)
        if changes and not accept:
            text = (
                f"the code changed since the run saved it: {_places(changes)}; the run continues if this makes the "
                "same model and the same data"
            )
            telemetry.emit(Note(text=text))
    if not reached:
        return None
    if head is not None and head.finished is not None and CALLBACKS in accept:
        return None  # changed callbacks may continue a run that callbacks ended; init-or-restore compares them
    chief = is_chief(run.spec.accelerator, os.environ)
    if chief and head is not None:
        _warn_of_edited_code(run, head, telemetry)
    return result_of(run, segments=0, exit_reason="nothing_to_do", telemetry=telemetry, report=chief)


def _warn_of_edited_code(run: OpenedRun, head: Head, telemetry: Sink) -> None:
    """Say which code beside the run file is not that of a run with nothing to do, whose model nobody builds then."""
    if changes := _changes_of_code(run, head):
        text = (
            f"{_places(changes)} changed since the run saved its code, and no step is left to train with the change: "
            "take another name under run, or train more steps with --accept model"
        )
        telemetry.emit(Note(text=text, warning=True))


def _changes_of_code(run: OpenedRun, head: Head | None) -> tuple[CodeChange, ...]:
    """What changed in the code beside the run file since the run saved it; nothing if the model is built elsewhere."""
    if head is None or "init_or_restore" in run.spec.stages.remote():
        return ()
    return changes_since_saved(run.home, head.identity, run.spec, run.folder)


def _places(changes: Sequence[CodeChange]) -> str:
    return listed(list(dict.fromkeys(f"{change.path}:{change.line}" for change in changes)))


def require_advancing(run: OpenedRun, head: Head | None, attempts: Attempts | None = None) -> None:
    """Refuse to rent an accelerator for a run that fails again and again.

    Args:
        attempts: the records of its attempts, if the caller has just read them.

    Raises:
        NoProgress: `stop.attempts_without_progress` attempts in a row did not advance the run.
    """
    if head is not None:
        limit = run.spec.stop.attempts_without_progress
        require_progress(run.home, head, limit=limit, now=datetime.now(UTC), attempts=attempts)


def features_check(
    run: OpenedRun, accelerator: "Accelerator | OneHost", *, remote: Set[str], telemetry: Sink
) -> Callable[[tuple[Feature, ...], Reading], None] | None:
    """The check of the first example for a new run: it builds the model as the run would, and writes nothing.

    Args:
        run: the run, which has not begun.
        remote: names of the stages that run in other processes.
        telemetry: receives the phases of the check.

    Returns:
        None if the data or the model belong to another process, where init-or-restore checks first of all. None with
        several hosts, where only the chief prepares the data but all hosts build the model together.
    """
    if remote & {"prepare_data", "init_or_restore"} or isinstance(accelerator, OneHost) or accelerator.hosts > 1:
        return None

    def check(features: tuple[Feature, ...], reading: Reading) -> None:
        from baton.tasks.init_or_restore.new_run import check_new_run

        telemetry.emit(Phase(cause="build"))
        check_new_run(
            run.spec,
            features,
            reading=reading,
            code_folder=run.folder,
            accelerator=accelerator,
            telemetry=telemetry,
        )
        telemetry.emit(Phase(cause="prepare-data"))

    return check
