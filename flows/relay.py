"""The story of a run, as a plain function of its five stages.

prepare-data -> init-or-restore -> (train-segment -> checkpoint-to-GCS)* -> evaluate
"""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flows.admission.first_example import first_look
from flows.admission.run_at_work import require_nobody_at_work
from flows.admission.storage_check import notes_about
from flows.goal import (
    Goal,
    RelayResult,
    interrupted,
    leaves_time,
    preflight,
    relay_is_done,
    require_not_stuck,
    require_packages_and_source,
    result_of,
    storage_of,
)
from tasks.foundation.accelerator.cluster import cluster_of, is_chief
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.placement import StagesSpec
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import acts_at_the_end, next_border
from tasks.foundation.contracts.segment import SegmentRequest
from tasks.foundation.errors import DamagedCheckpoint, RunLogError, StageLost, StaleWriter
from tasks.foundation.runlog.attempts import read_attempts
from tasks.foundation.runlog.commits import evaluation_due
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.multi_host import require_head_of_chief
from tasks.foundation.stops.agreement import agreed_stop
from tasks.foundation.stops.stops import Stops
from tasks.foundation.stops.uninterrupted import run_uninterrupted
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.deadline import LEAVING
from tasks.foundation.telemetry.events import Note, Phase, Several, Sink
from tasks.foundation.telemetry.ledger import Ledger
from tasks.foundation.telemetry.log_handler import warnings_as_notes
from tasks.foundation.telemetry.tensorboard import write_curves

# A checkpoint that is damaged between its verification and its use is looked up again so often.
_TRIES_WITHOUT_PROGRESS = 3

_ON_DEVICES = frozenset({"init_or_restore", "train_segment", "evaluate"})

_RELAYS_OF_THIS_PROCESS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The five stages, as plain functions or as Prefect tasks."""

    prepare_data: Callable[..., Any]
    init_or_restore: Callable[..., Any]
    train_segment: Callable[..., Any]
    checkpoint_to_gcs: Callable[..., Any]
    evaluate: Callable[..., Any]
    elsewhere: frozenset[str] = frozenset()  # names of those that run in other processes

    @staticmethod
    def names() -> tuple[str, ...]:
        """In the order of the story."""
        return tuple(StagesSpec.model_fields)


class StageStopped(Exception):
    """A stage that runs elsewhere was told to go, by whoever stops this command or by a person.

    Attributes:
        reason: an exit reason of the command.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NoDevices:
    """In place of an accelerator, where every stage that needs one runs elsewhere."""

    is_chief = True
    hosts = 1

    def of_chief(self, number: int) -> int:
        """The number: this is the only host."""
        return number

    def of_all_hosts(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        """What the only host says, float64 [1, len(numbers)]."""
        return np.asarray([numbers], np.float64)


def devices_needed_by(spec: RunSpec) -> frozenset[str]:
    """Names of the stages that need an accelerator; without held-out examples nothing is evaluated."""
    return _ON_DEVICES - {"evaluate"} if spec.data.validation_fraction == 0 else _ON_DEVICES


def relay(
    run: RunFile,
    goal: Goal,
    stages: Stages,
    *,
    telemetry: Sink,
    accept: Sequence[str] = (),
    try_again: bool = False,
    take_over: bool = False,
    attempt: str | None = None,
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
        take_over: begin although another process is at work.
        attempt: a uuid4 made in this process, where stages elsewhere have been told of it.
        clock: seconds, never going back; the time budget counts from now.

    Raises:
        NoProgress: attempt after attempt has failed to get further than the run stands.
        RunAtWork: another process trains it.
    """
    began = clock()
    LEAVING.lift()
    with warnings_as_notes(telemetry):
        preflight(run)
        done = relay_is_done(run, goal, accept=accept)
        if done is not None:
            return done
        require_packages_and_source(run)
        storage = storage_of(run)
        # Every host asks, so that none waits for a chief that has refused.
        require_not_stuck(run, try_again=try_again)
        writes = is_chief(run.spec.accelerator, os.environ)
        if writes:  # of several hosts the others would find their own chief's sign of life
            require_nobody_at_work(run, take_over=take_over, telemetry=telemetry)
            for note in notes_about(storage):
                telemetry.emit(Note(text=note, warning=True))
        log = RunLog(storage.at(run.spec.run))
        # Of a process that outlives its first run, such as a notebook's, a later run counts its own time only.
        with (
            Ledger(attempt=attempt, whole_process=next(_RELAYS_OF_THIS_PROCESS) == 0) as ledger,
            LEAVING.of_a_command(run.spec.stop.grace_seconds),
        ):
            head = log.head()
            if head is not None and writes:
                ledger.open(log.home, head, afresh=try_again)
            needed = devices_needed_by(run.spec) - stages.elsewhere
            accelerator = _acquire_accelerator(run.spec, head, telemetry) if needed else NoDevices()
            way = _Relay(
                run=run,
                goal=goal,
                stages=stages,
                storage=storage,
                log=log,
                ledger=ledger,
                accelerator=accelerator,
                telemetry=Several((telemetry, ledger)),
                accept=tuple(accept),
                elapsed=lambda: clock() - began,
                begins=head is None,
            )
            try:
                if isinstance(accelerator, NoDevices):
                    return way.to_the_goal()
                from tasks.foundation.accelerator.strategy import may_be_lost

                with may_be_lost(accelerator):
                    return way.to_the_goal()
            except StageStopped as stop:
                ledger.end(stop.reason)
                result = interrupted(run, goal, stop.reason, since=-1 if head is None else head.number)
                if result is None:
                    raise StageLost(f"{stop}; the run has not begun, and the same command begins it") from stop
                telemetry.emit(Note(text=str(stop), warning=True))
                return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Relay:
    """One command's way through the stages."""

    run: RunFile
    goal: Goal
    stages: Stages
    storage: Storage
    log: RunLog
    ledger: Ledger
    accelerator: Any
    telemetry: Sink
    accept: tuple[str, ...]
    elapsed: Callable[[], float]
    begins: bool  # nothing of the run is there yet

    def to_the_goal(self) -> RelayResult:
        """prepare-data -> init-or-restore -> (train-segment -> checkpoint-to-GCS)* -> evaluate."""
        dataset = self._prepare()
        segments, tries, head = 0, 0, None
        while True:
            head = self._begin_or_restore(dataset, suspicious=tries > 0) if head is None else head
            try:
                if evaluation_due(head, self.run.spec):
                    self._evaluate(dataset, head)
                    head = self._agreed_head()
                ended = self._ended(head, segments)
                if ended is not None:
                    self._let_callbacks_end(dataset, head, number=segments + 1)
                    break
                ended, head_after, trained = self._train_and_commit(dataset, head, number=segments + 1)
            except DamagedCheckpoint as fault:
                tries += 1
                if not fault.retryable or tries == _TRIES_WITHOUT_PROGRESS:
                    raise
                self.telemetry.emit(Note(text=f"{fault}; looking at the log again", warning=True))
                head = None
                continue
            except StaleWriter as fault:
                if not self._moved_by_own_stage():
                    raise
                self.telemetry.emit(Note(text=f"{fault}. It was a stage of this very command", warning=True))
                head = None
                continue
            tries, head = 0, head_after
            segments += trained
            if self.accelerator.is_chief:
                write_curves(self.log)
            if ended is not None and not self.goal.reached(head, self.run.spec):
                break
        self.telemetry.emit(Phase(cause="report"))
        self.ledger.end(ended)  # before the report, which reads it
        report = self.accelerator.is_chief and leaves_time(ended)
        return result_of(self.log, segments=segments, exit_reason=ended, report=report)

    def _moved_by_own_stage(self) -> bool:
        """Whether the tip is the work of a stage that this command has asked for, and then took for dead.

        Then nobody else has moved the tip since: on top of another's the stage could not have committed.
        """
        tip = self.log.require_head().tip
        return tip is not None and any(
            record.within == self.ledger.attempt and record.from_step < record.committed_step == tip.step
            for record in read_attempts(self.log.home).records
        )

    def _agreed_head(self) -> Head:
        """The newest head; of several hosts the chief says which, and the others read that entry."""
        newest = self.log.require_head() if self.accelerator.is_chief else None
        return require_head_of_chief(self.log, newest, self.accelerator)

    def _prepare(self) -> DatasetRef:
        self.telemetry.emit(Phase(cause="prepare-data"))
        if not self.accelerator.is_chief:
            self.accelerator.of_chief(0)  # has prepared it
        elsewhere, telemetry = self.stages.elsewhere, self.telemetry
        look = first_look(self.run, self.accelerator, elsewhere=elsewhere, telemetry=telemetry) if self.begins else {}
        dataset: DatasetRef = self.stages.prepare_data(
            self.run.spec, code_folder=self.run.folder, storage=self.storage, telemetry=telemetry, **look
        )
        if self.accelerator.is_chief:
            self.accelerator.of_chief(0)
        return dataset

    def _begin_or_restore(self, dataset: DatasetRef, *, suspicious: bool) -> Head:
        self.telemetry.emit(Phase(cause="build"))
        head: Head = self.stages.init_or_restore(
            self.run.spec,
            dataset,
            code_folder=self.run.folder,
            storage=self.storage,
            accept=self.accept,
            suspicious=suspicious,
            telemetry=self.telemetry,
        )
        if self.accelerator.is_chief:
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
            return self.goal.reason(head, self.run.spec)
        if segments == self.goal.max_segments:
            return "max_segments"
        left = self._seconds_left()
        over = left is not None and left <= 0
        return "time_budget" if self.accelerator.of_chief(over) else None

    def _train_and_commit(self, dataset: DatasetRef, head: Head, *, number: int) -> tuple[str | None, Head, bool]:
        """One segment; why the command is to stop after it, if it is, the head, and whether anything was trained.

        All of it is held together: a signal between the last step and the commit would lose a segment that is trained
        already, and a host that left before the others know the head would look lost. What the signal's handler raised
        is raised after them.
        """
        spec, seconds_left = self.run.spec, self._seconds_left()
        request = _next_segment(spec, dataset, head, self.goal, number=number, seconds_left=seconds_left)

        def work(stops: Stops) -> tuple[str | None, Head, bool]:
            result = self.stages.train_segment(
                request,
                code_folder=self.run.folder,
                storage=self.storage,
                recorded=head.environment,
                telemetry=self.telemetry,
            )
            if result.staged is not None and self.accelerator.is_chief:
                self.stages.checkpoint_to_gcs(request, result, storage=self.storage, telemetry=self.telemetry)
            trained = result.exit_reason not in {"finished", "superseded"}
            stop = agreed_stop(stops, self.accelerator)
            if stop is None and result.exit_reason == "time_budget":
                # Another machine's clock is ahead of this one's. Its stages would stop at once, one after the other.
                stop = "time_budget"
            return stop, self._agreed_head(), trained

        return run_uninterrupted(work, spec.stop, within_seconds=seconds_left, telemetry=self.telemetry)

    def _let_callbacks_end(self, dataset: DatasetRef, head: Head, *, number: int) -> None:
        """Where the run's last evaluation ends an epoch, nothing is trained from there that would tell callbacks of it.

        What they remember of it is not kept: a run that is prolonged tells them again, as it takes up the checkpoint.
        """
        if head.tip is not None and head.finished is None and acts_at_the_end(self.run.spec, head.tip.step):
            self._train_and_commit(dataset, head, number=number)

    def _seconds_left(self) -> float | None:
        return None if self.goal.max_seconds is None else self.goal.max_seconds - self.elapsed()


def _acquire_accelerator(spec: RunSpec, head: Head | None, telemetry: Sink) -> Any:
    """First of all: TensorFlow fixes devices and threads at its first use, and the user's `load` may use it."""
    from tasks.foundation.accelerator.strategy import acquire  # `baton --help` must not wait for TensorFlow

    if spec.accelerator.kind == "multi_worker":
        addresses = cluster_of(os.environ).addresses
        telemetry.emit(Note(text=f"waiting until all workers are there: {', '.join(addresses)}"))
    accelerator = acquire(
        spec.accelerator, None if head is None else head.environment, deterministic=spec.train.deterministic
    )
    if accelerator.said:
        telemetry.emit(Note(text=accelerator.said))
    return accelerator


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
