"""The relay: the order of a run's five stages.

prepare-data -> init-or-restore -> (train-segment -> checkpoint-to-GCS)* -> evaluate

`relay` sets up what a command needs, and `Relay.run_to_goal` is the story: a segment is trained, its commit begins,
what is due is evaluated, and what comes next is decided, until the goal is reached. The training of the next segment
does not wait for the commit: while a save is in flight, the relay plans with the head as it will be.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.flows.admit import Admitted, features_check
from baton.flows.evaluating import Command, Evaluations, is_in_flight
from baton.flows.host_checks import require_same_keras
from baton.flows.opened_run import OpenedRun
from baton.flows.process import last_lines, stop_reason
from baton.flows.result import RelayResult, leaves_time, report_end, result_of, result_of_interrupted
from baton.flows.runner import Runner, StageStopped, acquired_devices
from baton.tasks.foundation.checkpoint.save import AsyncSaves
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.identity import recorded_callbacks
from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Head, Rewind, SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.run_spec import callbacks_act_at_end, next_border
from baton.tasks.foundation.contracts.stage_calls import (
    CheckpointToGcsCall,
    InitOrRestoreCall,
    PrepareDataCall,
    TrainSegmentCall,
)
from baton.tasks.foundation.errors import (
    DamagedCheckpoint,
    InvalidInput,
    NothingToRestore,
    RunLogError,
    StageLost,
    StaleWriter,
)
from baton.tasks.foundation.log.attempts import read_attempts
from baton.tasks.foundation.log.fold import fold
from baton.tasks.foundation.machine.cluster import is_chief
from baton.tasks.foundation.machine.collectives import OneHost
from baton.tasks.foundation.machine.hang import HangWatch
from baton.tasks.foundation.machine.stops import Stops, agreed_stop
from baton.tasks.foundation.machine.threads import run_uninterrupted
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE
from baton.tasks.foundation.telemetry.events import (
    Note,
    Phase,
    Several,
    Sink,
    Waiting,
    WithoutPhases,
    warnings_as_notes,
)
from baton.tasks.foundation.telemetry.formatting import checkpoint_name
from baton.tasks.foundation.telemetry.ledger import Ledger
from baton.tasks.foundation.telemetry.tensorboard import CurveFiles
from baton.tasks.foundation.telemetry.trackers import tracking
from baton.tasks.stages import CHECKPOINT_TO_GCS, INIT_OR_RESTORE, PREPARE_DATA, TRAIN_SEGMENT

if TYPE_CHECKING:
    from baton.tasks.foundation.machine.devices import Accelerator


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
        Ledger(attempt=attempt, whole_process=whole_process, last_lines=last_lines) as ledger,
        PROCESS_DEADLINE.for_command(run.spec.stop.grace_seconds),
        HangWatch(run.spec.stop, ledger=ledger, telemetry=telemetry, whole_process=whole_process) as watch,
    ):
        for note in admitted.notes:
            telemetry.emit(Note(text=note, warning=True))
        head = run.log.head()
        if head is not None and is_chief(run.spec.accelerator, os.environ):
            ledger.open(run.home, head, afresh=admitted.try_again)
        recorded = None if head is None else head.environment
        with acquired_devices(
            run.spec, recorded, remote=runner.remote, telemetry=telemetry, link=admitted.link
        ) as hosts:
            require_same_keras(hosts)
            sinks = Several((telemetry, ledger, watch))
            try:
                with (
                    tracking(run.spec, run.home) as track,  # ends last, when everything is committed
                    AsyncSaves(across_segments=CHECKPOINT_TO_GCS.name not in runner.remote) as saves,
                    PROCESS_DEADLINE.start_on_interrupt(run.spec.stop.grace_seconds),
                ):
                    watch.follow_saves(lambda: saves.busy, saves.seconds_of_save)
                    try:
                        place = Place(
                            root=run.root,
                            home=run.home,
                            log=run.log,
                            code_folder=run.folder,
                            telemetry=sinks,
                            saves=None if TRAIN_SEGMENT.name in runner.remote else saves,
                            profiler=ledger.profiler,
                        )
                        dataset = _prepared_dataset(run, runner, hosts, place, is_new=head is None)
                        # From here on, it is known where epochs end.
                        admitted = admitted.with_examples(dataset.train_examples)
                        of_run = Relay(
                            spec=admitted.run.spec,
                            runner=runner,
                            place=place,
                            hosts=hosts,
                            admitted=admitted,
                            dataset=dataset,
                            ledger=ledger,
                            curves=CurveFiles(run.log),
                            track=track,
                            clock=clock,
                            began=began,
                            is_new=head is None,
                        )
                        if hosts.hosts == 1:
                            return of_run.run_to_goal()
                        return run_uninterrupted(of_run.run_together, run.spec.stop, telemetry=sinks)
                    finally:
                        sinks.emit(Waiting(on="the save in flight"))  # which `saves` waits for
            except StageStopped as stop:
                ledger.end(stop.reason)
                result = result_of_interrupted(run, admitted.goal, stop.reason, since=head, telemetry=telemetry)
                if result is None:
                    raise StageLost(f"{stop}; the run has not begun; run the same command again to begin it") from stop
                telemetry.emit(Note(text=str(stop), warning=True))
                return result
            except BaseException as fault:
                ledger.end(type(fault).__name__, str(fault))  # before the report, which reads the ledger
                refused = isinstance(fault, InvalidInput)  # which leaves the home as it was
                is_end = isinstance(fault, Exception) or leaves_time(stop_reason(fault))
                if hosts.is_chief and is_end and not refused:
                    report_end(run, telemetry)
                raise


def _prepared_dataset(
    run: OpenedRun, runner: Runner, hosts: "Accelerator | OneHost", place: Place, *, is_new: bool
) -> DatasetRef:
    """Prepare the dataset on the chief first; the other hosts then find it prepared."""
    place.telemetry.emit(Phase(cause="prepare-data"))
    if not hosts.is_chief:
        hosts.broadcast_from_chief(0)
    if is_new:
        check = features_check(run, hosts, remote=runner.remote, telemetry=place.telemetry)
        place = dataclasses.replace(place, check_features=check)
    dataset = runner.run(PREPARE_DATA, PrepareDataCall(spec=run.spec), place)
    if hosts.is_chief:
        hosts.broadcast_from_chief(0)
    return dataset


# How many times in a row a checkpoint may be found damaged between its verification and its use.
_TRIES_WITHOUT_PROGRESS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay(Command):
    """The stages that one command runs, once the data is prepared.

    Attributes:
        admitted: the run, the goal and the options of the command.
        dataset: the prepared data.
        ledger: of the attempt.
        curves: the TensorBoard files of the run.
        track: tells trackers that the log has grown.
        clock: monotonic time in seconds.
        began: its reading when the command began.
        is_new: whether the run had no log when the command began.
    """

    admitted: Admitted
    dataset: DatasetRef
    ledger: Ledger
    curves: CurveFiles
    track: Callable[[], None]
    clock: Callable[[], float]
    began: float
    is_new: bool

    def run_together(self, stops: Stops) -> RelayResult:
        """Run the stages with other hosts, which learn of a signal when the next segment begins, if not within it."""
        stops.together, stops.unsaved_work = True, False
        return self.run_to_goal()

    def run_to_goal(self) -> RelayResult:
        """Run the stages in order until the goal is reached or the command must stop."""
        goal, evaluations = self.admitted.goal, Evaluations(self, self.dataset)
        segments, tries, head = 0, 0, None
        while True:
            head = self._init_or_restore(verify_bytes=tries > 0) if head is None else head
            try:
                head = evaluations.evaluate_what_is_due(head, nothing_to_train=goal.is_trained(head, self.spec))
                ended = self._exit_reason(head, segments)
                if ended is not None and is_in_flight(head):
                    head = self.wait_for_save(head)
                    continue  # if the save failed, the run may have been rewound
                if ended is not None:
                    evaluations.join()
                    self._end_epoch_of_callbacks(head, number=segments + 1)
                    break
                ended, head_after, trained = self.train_and_commit(head, number=segments + 1)
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
            self._write_curves(head)
            self.track()
            if ended is not None and not goal.reached(head, self.spec):
                break
        evaluations.join()
        self.place.telemetry.emit(Phase(cause="report"))
        self.ledger.end(ended)  # before the report, which reads the ledger
        return result_of(
            self.admitted.run,
            segments=segments,
            exit_reason=ended,
            telemetry=self.place.telemetry,
            report=self.hosts.is_chief and leaves_time(ended),
        )

    def train_and_commit(self, head: Head, *, number: int) -> tuple[str | None, Head, bool]:
        """Train and commit one segment; signals that arrive meanwhile are delivered afterwards.

        A signal between the last step and the commit would lose a trained segment. A host that exits before the other
        hosts know the head would look like a lost one.

        Args:
            head: to start from; if its save is in flight, as it will be.
            number: of the segment within the command.

        Returns:
            The reason to stop after the segment, or None; the new head; whether any step was trained.
        """
        request = self._next_segment(head, number=number)

        def work(stops: Stops) -> tuple[str | None, Head, bool]:
            call = TrainSegmentCall.of(request, head.environment, self.admitted.accept)
            result = self.runner.run(TRAIN_SEGMENT, call, self.place)
            self._commit(request, result)
            stop = agreed_stop(stops, self.hosts)
            if stop is None and result.exit_reason == "time_budget":
                # The clock of the stage's machine is ahead of this one, so each further segment would stop at once.
                stop = "time_budget"
            if result.in_flight is None:
                newest = self.head_of_log()
                trained = self._has_trained(request, result, newest)
            else:
                newest, trained = self._head_in_flight(head, result, result.in_flight), True
                newest = newest if stop is None else self.wait_for_save(newest)
            stops.unsaved_work = False  # until steps are trained again
            return stop, newest, trained

        seconds_left, telemetry = request.stop_within_seconds, self.place.telemetry
        return run_uninterrupted(work, request.spec.stop, within_seconds=seconds_left, telemetry=telemetry)

    def _next_segment(self, head: Head, *, number: int) -> SegmentRequest:
        spec, tip = self.spec, head.tip
        if tip is None:
            uri = self.place.home.uri
            raise RunLogError(f"{uri}: the run has no tip, although init-or-restore has ended; run again")
        return SegmentRequest(
            spec=spec,
            dataset=self.dataset,
            start=tip,
            base=head.base,
            skipped_batches=head.skipped_batches,
            until_step=next_border(spec, tip.step, self.admitted.goal.next_cut(spec, tip.step)),
            stop_within_seconds=self._seconds_left(),
            number=number,
        )

    def _commit(self, request: SegmentRequest, result: SegmentResult) -> None:
        """Commit the checkpoint of a segment, if it has one; if it is still being written, in the thread that saves.

        On hosts other than the chief it does nothing.

        Raises:
            BatonError: a commit in line failed. What fails in the thread is raised where somebody waits for the save.
        """
        saves = self.place.saves
        if not self.hosts.is_chief:
            return
        if result.in_flight is not None and saves is not None:
            silent = dataclasses.replace(self.place, telemetry=WithoutPhases(self.place.telemetry))

            def commit(staged: CheckpointRef) -> Entry:
                call = CheckpointToGcsCall.of(request, result.with_staged(staged))
                return self.runner.run(CHECKPOINT_TO_GCS, call, silent)

            saves.commit(commit)
        elif result.staged is not None:
            self.runner.run(CHECKPOINT_TO_GCS, CheckpointToGcsCall.of(request, result), self.place)

    def _head_in_flight(self, head: Head, result: SegmentResult, in_flight: CheckpointRef) -> Head:
        """The head as it will be once the save in flight is committed, apart from the numbers of entries.

        Args:
            head: the head that the segment started from; its save may still have been in flight then.
        """
        newest = None if self.place.saves is None else self.place.saves.newest
        if is_in_flight(head) and newest is not None:
            head = newest.head  # of the save before, which is committed meanwhile
        return fold(head, Commit.of(result.with_staged(in_flight), target=self.spec.train.known_target))

    def _has_trained(self, request: SegmentRequest, result: SegmentResult, newest: Head) -> bool:
        """Whether a segment counts. One that was dropped because the save before it failed does not."""
        if result.exit_reason != "rewind":
            return result.exit_reason not in {"finished", "superseded"}
        rewound = self.place.log.entry(newest.base).body
        return not isinstance(rewound, Rewind) or rewound.blown_up_at > request.start.step

    def _end_epoch_of_callbacks(self, head: Head, *, number: int) -> None:
        """Report the run's last evaluation and its end to the callbacks, because no later segment does.

        Their state after this report is not saved. If the run is extended, they receive the same report after the
        restore.
        """
        spec, tip = self.spec, head.tip
        if tip is None or head.finished is not None or spec.train.callbacks is None or tip.step != spec.train.target:
            return
        if callbacks_act_at_end(spec, tip.step) or recorded_callbacks(head.identity).on_train_end:
            self.train_and_commit(head, number=number)

    def _init_or_restore(self, *, verify_bytes: bool) -> Head:
        self.place.telemetry.emit(Phase(cause="build"))
        call = InitOrRestoreCall(
            spec=self.spec, dataset=self.dataset, accept=self.admitted.accept, verify_bytes=verify_bytes
        )
        head = self.runner.run(INIT_OR_RESTORE, call, self.place)
        if self.hosts.is_chief:
            self.ledger.open(self.place.home, head)
        if head.tip is not None and (head.tip.step > 0 or not self.is_new):
            self.place.telemetry.emit(Note(text=self._where_it_continues(head.tip)))
        return head

    def _where_it_continues(self, tip: CheckpointRef) -> str:
        words = f"continues from step {tip.step}, checkpoint {checkpoint_name(tip.path)}"
        newest, target = self.place.log.newest_seen(), self.spec.train.known_target
        logged = None if newest is None or newest.totals is None else newest.totals.target
        if target is None or logged in {None, target}:
            return words
        return f"{words}; the target is step {target}, and was step {logged}"

    def _exit_reason(self, head: Head, segments: int) -> str | None:
        """The reason to end the command here; None to continue."""
        goal = self.admitted.goal
        if goal.reached(head, self.spec):
            return goal.reason(head, self.spec)
        if segments == goal.max_segments:
            return "max_segments"
        left = self._seconds_left()
        is_over = left is not None and left <= 0
        return "time_budget" if self.hosts.broadcast_from_chief(is_over) else None

    def _moved_by_own_stage(self) -> bool:
        """Whether a remote stage of this command committed the tip after the command had given the stage up.

        If so, no other process has moved the tip: the stage could not have committed on top of a foreign commit.
        """
        tip = self.place.log.require_head().tip
        return tip is not None and any(
            record.within == self.ledger.attempt and record.from_step < record.committed_step == tip.step
            for record in read_attempts(self.place.home).records
        )

    def _write_curves(self, head: Head) -> None:
        """Bring the TensorBoard files up to date, after the save in flight if there is one."""
        saves, curves = self.place.saves, self.curves
        if not self.hosts.is_chief:
            return
        if saves is not None and is_in_flight(head):
            saves.then(lambda entry: curves.update(entry.head))
        else:
            curves.update(head)

    def _seconds_left(self) -> float | None:
        budget = self.admitted.goal.max_seconds
        return None if budget is None else budget - (self.clock() - self.began)

    def _warn(self, text: str) -> None:
        self.place.telemetry.emit(Note(text=text, warning=True))
