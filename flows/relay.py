"""The story of a run, as a plain function of its five stages.

prepare-data -> init-or-restore -> (train-segment -> checkpoint-to-GCS)* -> evaluate
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from tasks.evaluate.report.report import PAGE, write_report
from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.identity import identity_in_run_file, require_same_identity
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import next_border
from tasks.foundation.contracts.segment import SegmentRequest
from tasks.foundation.errors import DamagedCheckpoint, RunFileError, RunLogError
from tasks.foundation.runlog.committing import evaluation_due
from tasks.foundation.runlog.history import history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.opening import open_storage
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.user_code import require_function

# A checkpoint that is damaged between its verification and its use is looked up again so often.
_TRIES_WITHOUT_PROGRESS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The five stages, as plain functions or as Prefect tasks."""

    prepare_data: Callable[..., Any]
    init_or_restore: Callable[..., Any]
    train_segment: Callable[..., Any]
    checkpoint_to_gcs: Callable[..., Any]
    evaluate: Callable[..., Any]


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
    exit_reason: Literal["complete", "until_step", "max_segments", "nothing_to_do"]
    report: str = Field(description="address of the report")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """How far this command goes: an absolute step, and a bound on the work."""

    step: int
    max_segments: int | None

    @classmethod
    def of(cls, spec: RunSpec, *, until_step: int | None, max_segments: int | None) -> "Goal":
        """The goal of a command.

        Raises:
            RunFileError: a bound below 1, or a step beyond train.steps.
        """
        for name, value in (("--until-step", until_step), ("--max-segments", max_segments)):
            if value is not None and value < 1:
                raise RunFileError(f"{name} = {value} must be at least 1")
        if until_step is not None and until_step > spec.train.steps:
            raise RunFileError(
                f"--until-step = {until_step} lies beyond train.steps = {spec.train.steps}; raise train.steps, "
                f"as with --set train.steps={until_step}"
            )
        return cls(step=until_step or spec.train.steps, max_segments=max_segments)

    def reached(self, head: Head | None, spec: RunSpec) -> bool:
        """Whether nothing is left to do."""
        tip = None if head is None else head.tip
        return head is not None and tip is not None and tip.step >= self.step and not evaluation_due(head, spec)


def storage_of(run: RunFile) -> Storage:
    """The storage root that a run file names."""
    return open_storage(run.spec.storage, relative_to=run.folder)


def preflight(run: RunFile) -> None:
    """What can be refused from the run file and the code beside it, before anything is written or waited for.

    Raises:
        InvalidInput: the storage address, the batch size or a function that is named cannot be used.
    """
    storage_of(run)
    per_replica_batch_size(run.spec.train.global_batch_size, run.spec.accelerator.replicas)
    require_function(run.spec.model.build, run.folder)
    if ":" in run.spec.data.source:
        require_function(run.spec.data.source, run.folder)


def relay_is_done(run: RunFile, goal: Goal) -> RelayResult | None:
    """What to answer where nothing is left to do: found out from the log alone, in no time.

    Raises:
        IdentityChanged: the run on disk is another one, as the run file alone tells.
    """
    log = RunLog(storage_of(run).at(run.spec.run))
    head = log.head()
    if head is not None:
        # Before a dataset is prepared in vain; init-or-restore compares the rest.
        require_same_identity(head.identity, identity_in_run_file(run.spec), home=log.home.uri)
    if not goal.reached(head, run.spec):
        return None
    return _result(log, segments=0, exit_reason="nothing_to_do")


def relay(run: RunFile, goal: Goal, stages: Stages, *, telemetry: Sink) -> RelayResult:
    """Train a run to its goal, from wherever its log says that it stands.

    Every attempt begins by looking up the head of the log, so a retry, a rerun and a scheduled tick are the same thing.
    """
    preflight(run)
    spec, storage = run.spec, storage_of(run)
    log = RunLog(storage.at(spec.run))
    done = relay_is_done(run, goal)
    if done is not None:
        return done
    _acquire_accelerator(spec, log.head())
    dataset = stages.prepare_data(spec, code_folder=run.folder, storage=storage, telemetry=telemetry)
    segments, tries, head = 0, 0, None
    while True:
        if head is None:
            head = stages.init_or_restore(spec, dataset, code_folder=run.folder, storage=storage, telemetry=telemetry)
        try:
            if evaluation_due(head, spec):
                stages.evaluate(
                    spec,
                    dataset,
                    head.tip,
                    code_folder=run.folder,
                    storage=storage,
                    recorded=head.environment,
                    telemetry=telemetry,
                )
                head = _head(log)
            if goal.reached(head, spec):
                reason = "complete" if goal.step == spec.train.steps else "until_step"
                return _result(log, segments=segments, exit_reason=reason)
            if segments == goal.max_segments:
                return _result(log, segments=segments, exit_reason="max_segments")
            request = _next_segment(spec, dataset, head, goal, number=segments + 1)
            result = stages.train_segment(
                request, code_folder=run.folder, storage=storage, recorded=head.environment, telemetry=telemetry
            )
            stages.checkpoint_to_gcs(request, result, storage=storage, telemetry=telemetry)
        except DamagedCheckpoint as fault:
            tries += 1
            if not fault.retryable or tries == _TRIES_WITHOUT_PROGRESS:
                raise
            telemetry.emit(Note(text=f"{fault}; looking at the log again", warning=True))
            head = None
            continue
        segments, tries, head = segments + 1, 0, _head(log)


def _acquire_accelerator(spec: RunSpec, head: Head | None) -> None:
    """First of all: TensorFlow fixes devices and threads at its first use, and the user's `load` may use it."""
    from tasks.foundation.accelerator.strategy import acquire  # `baton --help` must not wait for TensorFlow

    acquire(spec.accelerator, None if head is None else head.environment)


def _next_segment(spec: RunSpec, dataset: DatasetRef, head: Head, goal: Goal, *, number: int) -> SegmentRequest:
    if head.tip is None:
        raise RunLogError(f"run {spec.run} has no tip although init-or-restore has ended; run again")
    return SegmentRequest(
        spec=spec,
        dataset=dataset,
        start=head.tip,
        base=head.base,
        skipped_batches=head.skipped_batches,
        until_step=next_border(spec, head.tip.step, goal.step),
        number=number,
    )


def _head(log: RunLog) -> Head:
    head = log.head()
    if head is None:
        raise RunLogError(f"{log.home.uri}: the log was there and is gone; see whether the folder is still mounted")
    return head


def _result(log: RunLog, *, segments: int, exit_reason: Any) -> RelayResult:
    history = history_of(log.entries())
    name = log.home.uri.rsplit("/", 1)[-1]
    head = history.head
    if head is None or head.tip is None:
        raise RunLogError(f"{log.home.uri}: there is no tip to report")
    metrics = dict(history.rows[-1].metrics) if history.rows else {}
    if history.evaluations:
        metrics |= {f"validation_{name}": value for name, value in history.evaluations[-1].metrics.items()}
    # A command that was killed before its report left it to the next one.
    if exit_reason != "nothing_to_do" or not log.home.exists(PAGE):
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
        report=f"{log.home.uri}/{PAGE}",
    )
