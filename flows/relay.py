"""The story of a run, as a plain function of its five stages.

prepare-data -> init-or-restore -> (train-segment -> checkpoint-to-GCS)* -> evaluate
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field

from tasks.evaluate.report.report import PAGE, write_report
from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.identity import identity_in_run_file, require_same_identity
from tasks.foundation.contracts.log_entry import Commit, Head
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import next_border
from tasks.foundation.contracts.segment import STOP_REASONS, SegmentRequest, StopReason
from tasks.foundation.errors import DamagedCheckpoint, RunFileError, RunLogError
from tasks.foundation.runlog.committing import evaluation_due
from tasks.foundation.runlog.history import history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.progress import require_progress
from tasks.foundation.stops.holding import hold
from tasks.foundation.stops.stops import Stops
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.opening import open_storage
from tasks.foundation.telemetry.events import Note, Phase, Several, Sink
from tasks.foundation.telemetry.ledger import Ledger
from tasks.foundation.user_code import require_function

# A checkpoint that is damaged between its verification and its use is looked up again so often.
_TRIES_WITHOUT_PROGRESS = 3

_RELAYS_OF_THIS_PROCESS = itertools.count()


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
    exit_reason: Literal["complete", "until_step", "max_segments", "nothing_to_do"] | StopReason
    report: str | None = Field(description="address of the report; None if there is none yet")

    @property
    def stopped(self) -> bool:
        """Whether the command ended with work left to do."""
        return self.exit_reason == "max_segments" or self.exit_reason in STOP_REASONS


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
    return _result(log, segments=0, exit_reason="nothing_to_do")


def require_not_stuck(run: RunFile, *, try_again: bool) -> None:
    """Refuse to rent an accelerator for what has failed again and again.

    Raises:
        NoProgress: `stop.attempts_without_progress` attempts in a row did not get further than the run stands.
    """
    home = storage_of(run).at(run.spec.run)
    head = RunLog(home).head()
    if head is not None and not try_again:
        require_progress(home, head, limit=run.spec.stop.attempts_without_progress, now=datetime.now(UTC))


def interrupted(run: RunFile, reason: str, *, since: int) -> RelayResult | None:
    """What a command reached that a signal ended; no report is written, since time may be short.

    Args:
        run: the run file.
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
    segments = sum(isinstance(body, Commit) and body.checkpoint.step > 0 for body in new)
    return _result(log, segments=segments, exit_reason=reason, report=False)


def relay(
    run: RunFile,
    goal: Goal,
    stages: Stages,
    *,
    telemetry: Sink,
    accept: Sequence[str] = (),
    try_again: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> RelayResult:
    """Train a run to its goal, from wherever its log says that it stands.

    Every attempt begins by looking up the head of the log, so a retry, a rerun and a scheduled tick are the same thing.

    Args:
        run: the run file.
        goal: how far to go.
        stages: the five stages.
        telemetry: is told of everything.
        accept: identity keys whose change is accepted, and logged.
        try_again: forget the attempts in a row that did not get further.
        clock: seconds, never going back; the time budget counts from now.

    Raises:
        NoProgress: attempt after attempt has failed to get further than the run stands.
    """
    began = clock()
    preflight(run)
    done = relay_is_done(run, goal, accept=accept)
    if done is not None:
        return done
    require_not_stuck(run, try_again=try_again)
    storage = storage_of(run)
    log = RunLog(storage.at(run.spec.run))
    # Of a process that outlives its first run, such as a notebook's, a later run counts its own time only.
    with Ledger(whole_process=next(_RELAYS_OF_THIS_PROCESS) == 0) as ledger:
        head = log.head()
        if head is not None:
            ledger.open(log.home, head, afresh=try_again)
        _acquire_accelerator(run.spec, head)
        relay = _Relay(
            run=run,
            goal=goal,
            stages=stages,
            storage=storage,
            log=log,
            ledger=ledger,
            telemetry=Several((telemetry, ledger)),
            accept=tuple(accept),
            elapsed=lambda: clock() - began,
        )
        return relay.to_the_goal()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Relay:
    """One command's way through the stages."""

    run: RunFile
    goal: Goal
    stages: Stages
    storage: Storage
    log: RunLog
    ledger: Ledger
    telemetry: Sink
    accept: tuple[str, ...]
    elapsed: Callable[[], float]

    def to_the_goal(self) -> RelayResult:
        """prepare-data -> init-or-restore -> (train-segment -> checkpoint-to-GCS)* -> evaluate."""
        dataset = self._prepare()
        segments, tries, head = 0, 0, None
        while True:
            head = self._begin_or_restore(dataset) if head is None else head
            try:
                if evaluation_due(head, self.run.spec):
                    self._evaluate(dataset, head)
                    head = _head(self.log)
                ended = self._ended(head, segments)
                if ended is not None:
                    break
                ended = self._train_and_commit(dataset, head, number=segments + 1)
            except DamagedCheckpoint as fault:
                tries += 1
                if not fault.retryable or tries == _TRIES_WITHOUT_PROGRESS:
                    raise
                self.telemetry.emit(Note(text=f"{fault}; looking at the log again", warning=True))
                head = None
                continue
            segments, tries, head = segments + 1, 0, _head(self.log)
            if ended is not None and not self.goal.reached(head, self.run.spec):
                break
        self.telemetry.emit(Phase(cause="report"))
        self.ledger.end(ended)  # before the report, which reads it
        return _result(self.log, segments=segments, exit_reason=ended)

    def _prepare(self) -> DatasetRef:
        self.telemetry.emit(Phase(cause="prepare-data"))
        dataset: DatasetRef = self.stages.prepare_data(
            self.run.spec, code_folder=self.run.folder, storage=self.storage, telemetry=self.telemetry
        )
        return dataset

    def _begin_or_restore(self, dataset: DatasetRef) -> Head:
        self.telemetry.emit(Phase(cause="build"))
        head: Head = self.stages.init_or_restore(
            self.run.spec,
            dataset,
            code_folder=self.run.folder,
            storage=self.storage,
            accept=self.accept,
            telemetry=self.telemetry,
        )
        self.ledger.open(self.log.home, head)
        return head

    def _evaluate(self, dataset: DatasetRef, head: Head) -> None:
        self.telemetry.emit(Phase(cause="evaluate"))
        self.stages.evaluate(
            self.run.spec,
            dataset,
            head.tip,
            code_folder=self.run.folder,
            storage=self.storage,
            recorded=head.environment,
            telemetry=self.telemetry,
        )

    def _ended(self, head: Head, segments: int) -> str | None:
        """Why the command ends here, if it does."""
        if self.goal.reached(head, self.run.spec):
            return "complete" if self.goal.step == self.run.spec.train.steps else "until_step"
        if segments == self.goal.max_segments:
            return "max_segments"
        left = self._seconds_left()
        return "time_budget" if left is not None and left <= 0 else None

    def _train_and_commit(self, dataset: DatasetRef, head: Head, *, number: int) -> str | None:
        """One segment; why the command is to stop after it, if it is.

        Both are held together: a signal between the last step and the commit would lose a segment that is trained
        already. What its handler raised is raised after them.
        """
        spec, seconds_left = self.run.spec, self._seconds_left()
        request = _next_segment(spec, dataset, head, self.goal, number=number, seconds_left=seconds_left)

        def work(stops: Stops) -> str | None:
            result = self.stages.train_segment(
                request,
                code_folder=self.run.folder,
                storage=self.storage,
                recorded=head.environment,
                telemetry=self.telemetry,
            )
            if result.staged is not None:
                self.stages.checkpoint_to_gcs(request, result, storage=self.storage, telemetry=self.telemetry)
            return None if stops.asked is None else stops.asked.reason

        return hold(work, spec.stop, within_seconds=seconds_left, telemetry=self.telemetry)

    def _seconds_left(self) -> float | None:
        return None if self.goal.max_seconds is None else self.goal.max_seconds - self.elapsed()


def _acquire_accelerator(spec: RunSpec, head: Head | None) -> None:
    """First of all: TensorFlow fixes devices and threads at its first use, and the user's `load` may use it."""
    from tasks.foundation.accelerator.strategy import acquire  # `baton --help` must not wait for TensorFlow

    acquire(spec.accelerator, None if head is None else head.environment)


def _next_segment(
    spec: RunSpec, dataset: DatasetRef, head: Head, goal: Goal, *, number: int, seconds_left: float | None
) -> SegmentRequest:
    if head.tip is None:
        raise RunLogError(f"run {spec.run} has no tip although init-or-restore has ended; run again")
    return SegmentRequest(
        spec=spec,
        dataset=dataset,
        start=head.tip,
        base=head.base,
        skipped_batches=head.skipped_batches,
        until_step=next_border(spec, head.tip.step, goal.step),
        stop_within_seconds=seconds_left,
        number=number,
    )


def _head(log: RunLog) -> Head:
    head = log.head()
    if head is None:
        raise RunLogError(f"{log.home.uri}: the log was there and is gone; see whether the folder is still mounted")
    return head


def _result(log: RunLog, *, segments: int, exit_reason: Any, report: bool = True) -> RelayResult:
    history = history_of(log.entries())
    name = log.home.uri.rsplit("/", 1)[-1]
    head = history.head
    if head is None or head.tip is None:
        raise RunLogError(f"{log.home.uri}: there is no tip to report")
    metrics = dict(history.rows[-1].metrics) if history.rows else {}
    if history.evaluations:
        metrics |= {f"validation_{name}": value for name, value in history.evaluations[-1].metrics.items()}
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
