"""Whether a command may train a run: every cheap check, once, before Prefect or TensorFlow is waited for."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from flows.admission.checks import preflight, require_packages_and_source
from flows.admission.run_at_work import require_idle
from flows.goal import Goal
from flows.process.hash_seed import keep_hash_seed
from flows.result import RelayResult, result_of
from flows.run import Run
from tasks.evaluate.report.saved_code_sections import read_saved_code
from tasks.foundation.accelerator.cluster import cluster_of, is_chief
from tasks.foundation.accelerator.environment import backend_note, quiet_tensorflow
from tasks.foundation.contracts.epochs import with_examples
from tasks.foundation.contracts.identity import identity_in_run_file, is_as_in_run_file, require_same_identity
from tasks.foundation.contracts.identity_keys import CALLBACKS
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.saved_code import SAVED_CODE
from tasks.foundation.hosts import OneHost
from tasks.foundation.messages import listed
from tasks.foundation.model.code_digest import source_digest
from tasks.foundation.model.saved_code import collect_code, edited_files, require_savable
from tasks.foundation.runlog.attempts import Attempts
from tasks.foundation.runlog.progress import require_progress
from tasks.foundation.telemetry.events import Note, Sink

if TYPE_CHECKING:
    from tasks.foundation.accelerator.strategy import Accelerator


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
    """

    run: Run
    goal: Goal
    accept: tuple[str, ...]
    try_again: bool
    take_over: bool
    head: Head | None
    notes: tuple[str, ...]

    def with_examples(self, train_examples: int) -> "Admitted":
        """The same, with the number of training examples in the settings; from it follows where epochs end.

        Raises:
            RunFileError: an epoch has no whole batch, or the goal lies beyond the target.
        """
        spec = with_examples(self.run.spec, train_examples)
        self.goal.require_within(spec)
        return replace(self, run=replace(self.run, spec=spec))


def admit(
    run: Run,
    goal: Goal,
    *,
    accept: Sequence[str] = (),
    try_again: bool = False,
    take_over: bool = False,
    telemetry: Sink,
) -> Admitted | RelayResult:
    """Check everything that is cheap to check. Nothing of the run is written; the storage is tried out with a probe.

    The process of a command that hashes otherwise than the run's other processes starts anew here.

    Args:
        run: the run.
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
    """
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
    # Every host checks it, so that none waits for a chief that has refused.
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


def require_same_on_hosts(admitted: Admitted, hosts: "Accelerator | OneHost") -> None:
    """Compare run file, options, code and packages of all hosts, and with the log. Collective; the first of all.

    Raises:
        InvalidInput: the hosts differ; on every host.
        IdentityChanged: the run on disk differs from the run file in a key that is not accepted; on every host.
    """
    if hosts.hosts == 1 or isinstance(hosts, OneHost):
        return
    run, goal, environment = admitted.run, admitted.goal, hosts.environment
    hosts.require_same(
        {
            **run.spec.model_dump(mode="json", exclude={"train": {"epoch_examples"}}),
            "storage": run.root.uri,
            "--until-step": goal.until_step,
            "--max-segments": goal.max_segments,
            "--max-seconds": goal.max_seconds,
            "--cut-at": goal.cuts,
            "--accept": admitted.accept,
            **{f"code of {name}": source_digest(data) for name, data in collect_code(run.spec, run.folder).items()},
            # A run continues with the chief's threads, so the others begin with these too.
            "accelerator.intra_op_threads": environment.intra_op_threads,
            "accelerator.inter_op_threads": environment.inter_op_threads,
            **{f"version of {name}": text for name, text in environment.versions.items() if name != "python"},
            "Keras": None if environment.keras is None else environment.keras.model_dump(),
        }
    )
    require_recorded_identity(run, admitted.head, accept=admitted.accept)


def require_recorded_identity(run: Run, head: Head | None, *, accept: Sequence[str]) -> None:
    """Compare the run file with the log before a dataset is prepared; init-or-restore compares the rest.

    Raises:
        IdentityChanged: the run on disk differs from the run file in a key that is not accepted.
    """
    if head is not None and not is_as_in_run_file(head.identity, run.spec):
        require_same_identity(head.identity, identity_in_run_file(run.spec), home=run.home.uri, accept=accept)


def result_if_done(
    run: Run, goal: Goal, head: Head | None, *, accept: Sequence[str] = (), telemetry: Sink
) -> RelayResult | None:
    """The result where nothing is left to do, from the log alone; `telemetry` gets a warning if a report fails.

    Raises:
        IdentityChanged: the run on disk differs from the run file in a key that is not accepted.
    """
    reached = goal.reached(head, run.spec)
    several = run.spec.accelerator.kind == "multi_worker" and len(cluster_of(os.environ).addresses) > 1
    if reached or not several:  # one of several hosts that refused here would leave the others waiting for it
        require_recorded_identity(run, head, accept=accept)
    if not reached:
        return None
    if head is not None and head.finished is not None and CALLBACKS in accept:
        return None  # changed callbacks may continue a run that callbacks ended; init-or-restore compares them
    chief = is_chief(run.spec.accelerator, os.environ)
    if chief and head is not None:
        _warn_of_edited_code(run, head, telemetry)
    return result_of(run, segments=0, exit_reason="nothing_to_do", telemetry=telemetry, report=chief)


def _warn_of_edited_code(run: Run, head: Head, telemetry: Sink) -> None:
    """Say which code beside the run file is not that of a run with nothing to do, whose model nobody builds then."""
    saved = read_saved_code(run.home, head.identity.get(SAVED_CODE))
    files = () if saved is None else edited_files(saved, run.spec, run.folder)
    if files:
        text = (
            f"{listed(files)} changed since the run saved its code, and no step is left to train with the change: take "
            "another name under run, or train more steps with --accept model"
        )
        telemetry.emit(Note(text=text, warning=True))


def require_advancing(run: Run, head: Head | None, attempts: Attempts | None = None) -> None:
    """Refuse to rent an accelerator for a run that fails again and again.

    Args:
        run: the run.
        head: the newest state of its log.
        attempts: the records of its attempts, if the caller has just read them.

    Raises:
        NoProgress: `stop.attempts_without_progress` attempts in a row did not advance the run.
    """
    if head is not None:
        limit = run.spec.stop.attempts_without_progress
        require_progress(run.home, head, limit=limit, now=datetime.now(UTC), attempts=attempts)
