"""The relay: the order of a run's five stages.

prepare-data -> init-or-restore -> (train-segment -> checkpoint-to-GCS)* -> evaluate

A segment is trained, its commit begins, and what comes next is decided, until the goal is reached; the training of the
next segment does not wait for the commit.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flows.admit import Admitted, features_check, require_same_on_hosts
from flows.commits import Commits, is_in_flight
from flows.evaluating import EvaluationBeside, Evaluations
from flows.launching.devices import acquired_devices
from flows.launching.runner import Runner, StageStopped
from flows.opened_run import Goal, Run
from flows.result import RelayResult, leaves_time, result_of, result_of_interrupted
from tasks.foundation.checkpoint.committer import Committer
from tasks.foundation.checkpoint.second_look import SecondLook
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.identity import recorded_callbacks
from tasks.foundation.contracts.log_entry import Head, Rewind, SegmentRequest, SegmentResult
from tasks.foundation.contracts.run_spec import callbacks_act_at_end, next_border
from tasks.foundation.contracts.stage_calls import InitOrRestoreCall, PrepareDataCall, TrainSegmentCall
from tasks.foundation.errors import DamagedCheckpoint, NothingToRestore, RunLogError, StageLost, StaleWriter
from tasks.foundation.machine.hang import HangWatch
from tasks.foundation.machine.hosts import Hosts, OneHost, is_chief
from tasks.foundation.machine.stops import PROCESS_STOP, Stops, agreed_stop
from tasks.foundation.machine.threads import run_uninterrupted
from tasks.foundation.runlog.attempts import read_attempts
from tasks.foundation.stage import Place
from tasks.foundation.storage.transfers import PROCESS_DEADLINE
from tasks.foundation.telemetry.events import Note, Phase, Several, Silent, Sink, Waiting, warnings_as_notes
from tasks.foundation.telemetry.formatting import checkpoint_name
from tasks.foundation.telemetry.ledger import Ledger
from tasks.foundation.telemetry.tensorboard import CurveFiles
from tasks.foundation.telemetry.trackers import tracking
from tasks.stages import CHECKPOINT_TO_GCS, INIT_OR_RESTORE, PREPARE_DATA, TRAIN_SEGMENT

if TYPE_CHECKING:
    from tasks.foundation.machine.devices import Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Trains and commits segments.

    Attributes:
        goal: of the command.
        commits: commits what a segment has staged.
        hosts: of the run.
        seconds_left: of the command's time budget; None: no limit.
        accept: identity keys whose change the command accepts.
    """

    goal: Goal
    commits: Commits
    hosts: Hosts
    seconds_left: Callable[[], float | None]
    accept: tuple[str, ...]

    def train_and_commit(self, dataset: DatasetRef, head: Head, *, number: int) -> tuple[str | None, Head, bool]:
        """Train and commit one segment; signals that arrive meanwhile are delivered afterwards.

        A signal between the last step and the commit would lose a trained segment. A host that exits before the other
        hosts know the head would look like a lost one.

        Returns:
            The reason to stop after the segment, or None; the new head; whether any step was trained.
        """
        request = self._next_segment(dataset, head, number=number)

        def work(stops: Stops) -> tuple[str | None, Head, bool]:
            result = self.commits.runner.run(
                TRAIN_SEGMENT, TrainSegmentCall.of(request, head.environment, self.accept), self.commits.place
            )
            self.commits.commit(request, result)
            stop = agreed_stop(stops, self.hosts)
            if stop is None and result.exit_reason == "time_budget":
                # The clock of the stage's machine is ahead of this one, so each further segment would stop at once.
                stop = "time_budget"
            if result.in_flight is None:
                newest = self.commits.agreed_head()
                return stop, newest, self._has_trained(request, result, newest)
            ahead = self.commits.head_in_flight(head, result)
            return stop, ahead if stop is None else self.commits.landed(ahead), True

        seconds_left, telemetry = request.stop_within_seconds, self.commits.place.telemetry
        return run_uninterrupted(work, request.spec.stop, within_seconds=seconds_left, telemetry=telemetry)

    def _next_segment(self, dataset: DatasetRef, head: Head, *, number: int) -> SegmentRequest:
        spec, tip = self.commits.spec, _tip_of(head, self.commits.place)
        return SegmentRequest(
            spec=spec,
            dataset=dataset,
            start=tip,
            base=head.base,
            skipped_batches=head.skipped_batches,
            until_step=next_border(spec, tip.step, self.goal.next_cut(spec, tip.step)),
            stop_within_seconds=self.seconds_left(),
            number=number,
        )

    def _has_trained(self, request: SegmentRequest, result: SegmentResult, newest: Head) -> bool:
        """Whether a segment counts. One that was dropped because the save before it failed does not."""
        if result.exit_reason != "rewind":
            return result.exit_reason not in {"finished", "superseded"}
        rewound = self.commits.place.log.entry(newest.base).body
        return not isinstance(rewound, Rewind) or rewound.blown_up_at > request.start.step

    def end_epoch_of_callbacks(self, dataset: DatasetRef, head: Head, *, number: int) -> None:
        """Report the run's last evaluation and its end to the callbacks, because no later segment does.

        Their state after this report is not saved. If the run is extended, they receive the same report after the
        restore.
        """
        spec, tip = self.commits.spec, head.tip
        if tip is None or head.finished is not None or spec.train.callbacks is None or tip.step != spec.train.target:
            return
        if callbacks_act_at_end(spec, tip.step) or recorded_callbacks(head.identity).on_train_end:
            self.train_and_commit(dataset, head, number=number)


def _tip_of(head: Head, place: Place) -> CheckpointRef:
    if head.tip is None:
        raise RunLogError(f"{place.home.uri}: the run has no tip, although init-or-restore has ended; run again")
    return head.tip


@contextmanager
def second_look(run: Run, runner: Runner, committer: Committer, *, telemetry: Sink) -> Iterator[Sink]:
    """Read retained checkpoints again meanwhile, if `checkpoint.verify` is background. Only the chief does.

    It pauses while this process saves a checkpoint, and once it was asked to stop.

    Args:
        run: the run.
        runner: runs the stages.
        committer: saves beside the training.
        telemetry: receives warnings about damage.

    Returns:
        A sink that has to receive the events of the training.
    """
    if run.spec.checkpoint.verify != "background" or not is_chief(run.spec.accelerator, os.environ):
        yield Silent()
        return

    def paused() -> bool:
        return committer.busy or PROCESS_DEADLINE.is_set or PROCESS_STOP.last_stop is not None

    own_entries = CHECKPOINT_TO_GCS.name in runner.remote
    with SecondLook(run.log, telemetry=telemetry, paused=paused, own_entries=own_entries) as looking:
        yield looking


# How many times in a row a checkpoint may be found damaged between its verification and its use.
_TRIES_WITHOUT_PROGRESS = 3


def relay(
    admitted: Admitted,
    runner: Runner,
    *,
    telemetry: Sink,
    attempt: str | None = None,
    whole_process: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> RelayResult:
    """Train a run to its goal, starting from the head of its log.

    Every attempt reads the head first, so a retry, a second command and a scheduled run do the same work.

    Args:
        admitted: the run, its goal and its options.
        runner: runs the stages.
        telemetry: receives every event.
        attempt: id of this attempt, a uuid4 made in this process, if remote stages know it; None: a new one.
        whole_process: whether the process runs only this command; its start-up and exit then count as the run's time,
            and it is ended if the training hangs.
        clock: monotonic time in seconds; the time budget counts from the first reading.

    Returns:
        What the command reached.

    Raises:
        StageLost: a remote stage was stopped before the run had a checkpoint.
        BatonError: a stage failed.
    """
    began = clock()
    PROCESS_DEADLINE.clear()
    run = admitted.run
    with (
        warnings_as_notes(telemetry),
        Ledger(attempt=attempt, whole_process=whole_process) as ledger,
        PROCESS_DEADLINE.for_command(run.spec.stop.grace_seconds),
        HangWatch(run.spec.stop, ledger=ledger, telemetry=telemetry, whole_process=whole_process) as watch,
    ):
        for note in admitted.notes:
            telemetry.emit(Note(text=note, warning=True))
        head = run.log.head()
        if head is not None and is_chief(run.spec.accelerator, os.environ):
            ledger.open(run.home, head, afresh=admitted.try_again)
        recorded = None if head is None else head.environment
        with acquired_devices(run.spec, recorded, remote=runner.remote, telemetry=telemetry) as accelerator:
            require_same_on_hosts(admitted, accelerator)
            sinks = Several((telemetry, ledger, watch))
            try:
                with (
                    tracking(run.spec, run.home) as track,  # ends last, when everything is committed
                    Committer(across_segments=CHECKPOINT_TO_GCS.name not in runner.remote) as committer,
                    PROCESS_DEADLINE.start_on_interrupt(run.spec.stop.grace_seconds),
                    second_look(run, runner, committer, telemetry=sinks) as looking,
                ):
                    watch.follow_saves(lambda: committer.busy, committer.seconds_of_save)
                    one_command = _Relay(
                        admitted=admitted,
                        runner=runner,
                        place=Place(
                            root=run.root,
                            home=run.home,
                            log=run.log,
                            code_folder=run.folder,
                            telemetry=Several((looking, sinks)),
                            committer=None if TRAIN_SEGMENT.name in runner.remote else committer,
                        ),
                        ledger=ledger,
                        curves=CurveFiles(run.log),
                        track=track,
                        accelerator=accelerator,
                        elapsed=lambda: clock() - began,
                        is_new=head is None,
                    )
                    try:
                        return one_command.run_to_goal()
                    finally:
                        sinks.emit(Waiting(on="the save in flight"))  # the committer waits for it
            except StageStopped as stop:
                ledger.end(stop.reason)
                result = result_of_interrupted(run, admitted.goal, stop.reason, since=head, telemetry=telemetry)
                if result is None:
                    raise StageLost(f"{stop}; the run has not begun; run the same command again to begin it") from stop
                telemetry.emit(Note(text=str(stop), warning=True))
                return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Relay:
    """The stages that one command runs."""

    admitted: Admitted
    runner: Runner
    place: Place
    ledger: Ledger
    curves: CurveFiles
    track: Callable[[], None]  # tells trackers that the log has grown
    accelerator: "Accelerator | OneHost"
    elapsed: Callable[[], float]
    is_new: bool  # the run has no log yet
    beside: EvaluationBeside = field(default_factory=EvaluationBeside)

    @property
    def commits(self) -> Commits:
        """Commits what segments have staged."""
        return Commits(
            spec=self.admitted.run.spec,
            runner=self.runner,
            place=self.place,
            hosts=self.accelerator,
            curves=self.curves,
        )

    @property
    def evaluations(self) -> Evaluations:
        """Evaluates what is due."""
        return Evaluations(commits=self.commits, beside=self.beside)

    @property
    def segments(self) -> Segments:
        """Trains and commits segments."""
        return Segments(
            goal=self.admitted.goal,
            commits=self.commits,
            hosts=self.accelerator,
            seconds_left=self._seconds_left,
            accept=self.admitted.accept,
        )

    def run_to_goal(self) -> RelayResult:
        """Run the stages in order until the goal is reached or the command must stop."""
        dataset = self._prepare_data()
        admitted = self.admitted.with_examples(dataset.train_examples)
        return dataclasses.replace(self, admitted=admitted)._train_on(dataset)

    def _train_on(self, dataset: DatasetRef) -> RelayResult:
        """Run the stages that follow the preparation of the data. From here on, it is known where epochs end."""
        run, goal = self.admitted.run, self.admitted.goal
        segments, tries, head = 0, 0, None
        while True:
            head = self._init_or_restore(dataset, verify_bytes=tries > 0) if head is None else head
            try:
                head = self.evaluations.evaluate_what_is_due(
                    dataset, head, nothing_to_train=goal.is_trained(head, run.spec)
                )
                ended = self._exit_reason(head, segments)
                if ended is not None and is_in_flight(head):
                    head = self.commits.landed(head)
                    continue  # if the save failed, the run may have been rewound
                if ended is not None:
                    self.evaluations.join()
                    self.segments.end_epoch_of_callbacks(dataset, head, number=segments + 1)
                    break
                ended, head_after, trained = self.segments.train_and_commit(dataset, head, number=segments + 1)
            except DamagedCheckpoint as fault:
                tries += 1
                if isinstance(fault, NothingToRestore) or tries == _TRIES_WITHOUT_PROGRESS:
                    raise
                self._warn(f"{fault}; reading the log again")
                head = None
                continue
            except StaleWriter as fault:
                if not self._moved_by_own_stage():
                    raise
                self._warn(f"{fault}; it was committed by a stage that this command started, continuing from it")
                head = None
                continue
            tries, head = 0, head_after
            segments += trained
            self.commits.write_curves(head)
            self.track()
            if ended is not None and not goal.reached(head, run.spec):
                break
        self.evaluations.join()
        self.place.telemetry.emit(Phase(cause="report"))
        self.ledger.end(ended)  # before the report, which reads the ledger
        return result_of(
            run,
            segments=segments,
            exit_reason=ended,
            telemetry=self.place.telemetry,
            report=self.accelerator.is_chief and leaves_time(ended),
        )

    def _prepare_data(self) -> DatasetRef:
        """Prepare the dataset on the chief first; the other hosts then find it prepared."""
        telemetry = self.place.telemetry
        telemetry.emit(Phase(cause="prepare-data"))
        if not self.accelerator.is_chief:
            self.accelerator.broadcast_from_chief(0)
        place = self.place
        if self.is_new:
            run, remote = self.admitted.run, self.runner.remote
            check = features_check(run, self.accelerator, remote=remote, telemetry=telemetry)
            place = dataclasses.replace(place, check_features=check)
        dataset = self.runner.run(PREPARE_DATA, PrepareDataCall(spec=self.admitted.run.spec), place)
        if self.accelerator.is_chief:
            self.accelerator.broadcast_from_chief(0)
        return dataset

    def _init_or_restore(self, dataset: DatasetRef, *, verify_bytes: bool) -> Head:
        self.place.telemetry.emit(Phase(cause="build"))
        call = InitOrRestoreCall(
            spec=self.admitted.run.spec, dataset=dataset, accept=self.admitted.accept, verify_bytes=verify_bytes
        )
        head = self.runner.run(INIT_OR_RESTORE, call, self.place)
        if self.accelerator.is_chief:
            self.ledger.open(self.place.home, head)
        if head.tip is not None and (head.tip.step > 0 or not self.is_new):
            self.place.telemetry.emit(Note(text=self._where_it_continues(head.tip)))
        return head

    def _where_it_continues(self, tip: CheckpointRef) -> str:
        words = f"continues from step {tip.step}, checkpoint {checkpoint_name(tip.path)}"
        newest, target = self.place.log.newest_seen(), self.admitted.run.spec.train.known_target
        logged = None if newest is None or newest.totals is None else newest.totals.target
        if target is None or logged in {None, target}:
            return words
        return f"{words}; the target is step {target}, and was step {logged}"

    def _exit_reason(self, head: Head, segments: int) -> str | None:
        """The reason to end the command here; None to continue."""
        goal, spec = self.admitted.goal, self.admitted.run.spec
        if goal.reached(head, spec):
            return goal.reason(head, spec)
        if segments == goal.max_segments:
            return "max_segments"
        left = self._seconds_left()
        is_over = left is not None and left <= 0
        return "time_budget" if self.accelerator.broadcast_from_chief(is_over) else None

    def _moved_by_own_stage(self) -> bool:
        """Whether a remote stage of this command committed the tip after the command had given the stage up.

        If so, no other process has moved the tip: the stage could not have committed on top of a foreign commit.
        """
        tip = self.place.log.require_head().tip
        return tip is not None and any(
            record.within == self.ledger.attempt and record.from_step < record.committed_step == tip.step
            for record in read_attempts(self.place.home).records
        )

    def _seconds_left(self) -> float | None:
        budget = self.admitted.goal.max_seconds
        return None if budget is None else budget - self.elapsed()

    def _warn(self, text: str) -> None:
        self.place.telemetry.emit(Note(text=text, warning=True))
