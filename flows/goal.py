"""How far a command goes, whether a run is there already, and what was reached: from the run file and the log alone."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field

from tasks.evaluate.report.report import PAGE, write_report
from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.accelerator.cluster import cluster_of, is_chief
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.identity import CALLBACKS, identity_in_run_file, require_same_identity
from tasks.foundation.contracts.log_entry import Commit, Head
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.segment import STOP_REASONS, StopReason
from tasks.foundation.errors import RunFileError, RunLogError, StorageError
from tasks.foundation.runlog.commits import evaluation_due
from tasks.foundation.runlog.history import history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.progress import require_progress
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.opening import open_storage
from tasks.foundation.telemetry.tensorboard import write_curves
from tasks.foundation.user_code import require_function
from tasks.foundation.user_imports import require_imports
from tasks.init_or_restore.weights.location import locate

_MACHINE_MAY_GO = frozenset({"sigterm", "preempted", "maintenance"})


class RelayResult(Contract):
    """What a command reached."""

    schema_version: Literal[1] = 1
    run: str
    home: str
    step: int
    checkpoint: str
    state_digest: str
    segments: int
    metrics: dict[str, float]
    exit_reason: (
        Literal["complete", "until_step", "max_segments", "nothing_to_do", "finished_early", "cancelled"] | StopReason
    )
    report: str | None = Field(description="address of the report; None if there is none yet")

    @property
    def stopped(self) -> bool:
        """Whether the command ended with work left to do."""
        return self.exit_reason in {"max_segments", "cancelled"} or self.exit_reason in STOP_REASONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """How far this command goes: an absolute step, and a bound on the work."""

    step: int
    max_segments: int | None
    max_seconds: float | None

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        *,
        until_step: int | None = None,
        max_segments: int | None = None,
        max_seconds: float | None = None,
    ) -> "Goal":
        """The goal of a command; `max_seconds`, if given, takes the place of train.stop_after_seconds.

        Raises:
            RunFileError: a bound below 1, seconds that are not above 0, or a step beyond train.steps.
        """
        for name, value in (("--until-step", until_step), ("--max-segments", max_segments)):
            if value is not None and value < 1:
                raise RunFileError(f"{name} = {value} must be at least 1")
        if max_seconds is not None and not (max_seconds > 0 and math.isfinite(max_seconds)):
            raise RunFileError(f"--max-seconds = {max_seconds} must be more than 0, and finite")
        if until_step is not None and until_step > spec.train.steps:
            raise RunFileError(
                f"--until-step = {until_step} lies beyond train.steps = {spec.train.steps}; raise train.steps, "
                f"as with --set train.steps={until_step}"
            )
        return cls(
            step=until_step or spec.train.steps,
            max_segments=max_segments,
            max_seconds=spec.train.stop_after_seconds if max_seconds is None else max_seconds,
        )

    def reason(self, head: Head, spec: RunSpec) -> str:
        """What it is called to have reached it."""
        if head.finished is not None and (head.tip is None or head.tip.step < self.step):
            return "finished_early"
        return "complete" if self.step == spec.train.steps else "until_step"

    def reached(self, head: Head | None, spec: RunSpec) -> bool:
        """Whether nothing is left to do: the step is reached, or callbacks ended the run before."""
        if head is None or head.tip is None or evaluation_due(head, spec):
            return False
        return head.tip.step >= self.step or head.finished is not None


def storage_of(run: RunFile) -> Storage:
    """The storage root that a run file names."""
    return open_storage(run.spec.storage, relative_to=run.folder)


def require_lasting_storage(run: RunFile) -> None:
    """Refuse a store that ends with the process: what a command leaves behind is for later commands.

    Raises:
        RunFileError: storage is memory://.
    """
    if run.spec.storage.startswith("memory:"):
        raise RunFileError(f"storage is {run.spec.storage}, which ends with this process; name a folder, or gs://")


def preflight(run: RunFile) -> None:
    """What can be refused from the run file and the code beside it, before anything is written or waited for.

    Raises:
        InvalidInput: the storage address, the batch size or a function that is named cannot be used.
    """
    storage_of(run)
    accelerator = run.spec.accelerator
    known = accelerator.replicas if accelerator.kind != "multi_worker" else len(cluster_of(os.environ).addresses)
    per_replica_batch_size(run.spec.train.global_batch_size, known, run.spec.train.accumulate)
    evaluating = run.spec.stages.evaluate.accelerator
    if evaluating is not None:
        per_replica_batch_size(run.spec.train.global_batch_size, evaluating.replicas)
    require_function(run.spec.model.build, run.folder)
    if ":" in run.spec.data.source:
        require_function(run.spec.data.source, run.folder)
    if run.spec.train.callbacks is not None:
        require_function(run.spec.train.callbacks, run.folder)
    _require_initial_weights(run)


def require_packages_and_source(run: RunFile) -> None:
    """What else can be refused before Prefect and TensorFlow are waited for, of a run that has something left to do.

    Only of what this process is to do: a stage that runs elsewhere has packages and files of its own.

    Raises:
        InvalidInput: a package that the user's code imports is not installed, or the built-in source cannot be read.
    """
    elsewhere = run.spec.stages.elsewhere()
    if "prepare_data" not in elsewhere:
        if ":" in run.spec.data.source:
            require_imports(run.spec.data.source, run.folder)
        else:
            from tasks.prepare_data.sources.opening import require_source  # verbs that only read need no source

            require_source(run.spec.data, run.folder)
    if not {"init_or_restore", "train_segment"} <= elsewhere.keys():
        for reference in (run.spec.model.build, run.spec.train.callbacks):
            if reference is not None:
                require_imports(reference, run.folder)


def _require_initial_weights(run: RunFile) -> None:
    """A run that has begun needs them no more."""
    if not run.spec.init.weights:
        return
    head = RunLog(storage_of(run).at(run.spec.run)).head()
    if head is None or head.tip is None:
        for source in run.spec.init.weights:
            locate(source, run.folder)


def relay_is_done(run: RunFile, goal: Goal, *, accept: Sequence[str] = ()) -> RelayResult | None:
    """What to answer where nothing is left to do: found out from the log alone, in no time.

    Raises:
        IdentityChanged: the run on disk is another one, as the run file alone tells.
    """
    log = RunLog(storage_of(run).at(run.spec.run))
    head = log.head()
    if head is not None:
        # Before a dataset is prepared in vain; init-or-restore compares the rest.
        require_same_identity(head.identity, identity_in_run_file(run.spec), home=log.home.uri, accept=accept)
    if not goal.reached(head, run.spec):
        return None
    if head is not None and head.finished is not None and CALLBACKS in accept:
        return None  # other callbacks may go on; whether they are others is known once they are loaded
    return result_of(log, segments=0, exit_reason="nothing_to_do", report=is_chief(run.spec.accelerator, os.environ))


def require_not_stuck(run: RunFile, *, try_again: bool) -> None:
    """Refuse to rent an accelerator for what has failed again and again.

    Raises:
        NoProgress: `stop.attempts_without_progress` attempts in a row did not get further than the run stands.
    """
    home = storage_of(run).at(run.spec.run)
    head = RunLog(home).head()
    if head is not None and not try_again:
        require_progress(home, head, limit=run.spec.stop.attempts_without_progress, now=datetime.now(UTC))


def interrupted(run: RunFile, goal: Goal, reason: str, *, since: int) -> RelayResult | None:
    """What a command reached that a signal ended. The report is written unless the machine may be about to go.

    Args:
        run: the run file.
        goal: what it aimed at; reached all the same, the signal came too late to stop anything.
        reason: why it was ended.
        since: number of the newest log entry when the command began, or -1.

    Returns:
        None if the run has no checkpoint yet.
    """
    log = RunLog(storage_of(run).at(run.spec.run))
    head = log.head()
    if head is None or head.tip is None:
        return None
    new = (log.entry(number).body for number in range(since + 1, head.number + 1))
    segments = sum(isinstance(body, Commit) and body.ends_a_segment for body in new)
    report = leaves_time(reason) and is_chief(run.spec.accelerator, os.environ)
    if goal.reached(head, run.spec):
        reason = goal.reason(head, run.spec)
    try:
        return result_of(log, segments=segments, exit_reason=reason, report=report)
    except StorageError:
        # What is committed stays: a report that cannot be written must not turn a stop into a failure.
        return result_of(log, segments=segments, exit_reason=reason, report=False)


def leaves_time(exit_reason: str) -> bool:
    """Whether there is time for a report after a stop: not where the machine is, or may be, about to go."""
    return exit_reason not in _MACHINE_MAY_GO


def result_of(log: RunLog, *, segments: int, exit_reason: Any, report: bool = True) -> RelayResult:
    """What a command reached: the run as its log has it, and the command's own part.

    Args:
        log: the run's.
        segments: how many this command trained.
        exit_reason: why it ends.
        report: whether to write the report.

    Raises:
        RunLogError: there is no tip to report.
    """
    history = history_of(log.entries())
    name = log.home.uri.rsplit("/", 1)[-1]
    head = history.head
    if head is None or head.tip is None:
        raise RunLogError(f"{log.home.uri}: there is no tip to report")
    metrics = dict(history.rows[-1].metrics) if history.rows else {}
    if history.evaluations:
        metrics |= {f"validation_{name}": value for name, value in history.evaluations[-1].metrics.items()}
    if report:
        write_curves(log)
    # A command that was killed before its report left it to the next one.
    if report and (exit_reason != "nothing_to_do" or not log.home.exists(PAGE)):
        write_report(log.home, title=name)
    return RelayResult(
        run=name,
        home=log.home.uri,
        step=head.tip.step,
        checkpoint=f"{log.home.uri}/{head.tip.path}",
        state_digest=head.tip.state_digest,
        segments=segments,
        metrics=metrics,
        exit_reason=exit_reason,
        report=f"{log.home.uri}/{PAGE}" if report or log.home.exists(PAGE) else None,
    )
