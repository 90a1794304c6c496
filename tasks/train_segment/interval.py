"""The commits of a segment: where the next one starts from, its base, how it is saved, and what it says.

A segment without commits in its middle is one interval. Each commit ends an interval and starts the next one. Besides
the state it has the interval's rows, its seconds by cause, and what each host did.
"""

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from baton.tasks.foundation.checkpoint.cadence import CommitCadence
from baton.tasks.foundation.checkpoint.retention import rewind_run
from baton.tasks.foundation.checkpoint.save import AsyncSaves, commit_staged, wait_for_save
from baton.tasks.foundation.checkpoint.snapshot import fits_memory, snapshot_bytes, take_snapshot
from baton.tasks.foundation.checkpoint.write import stage_checkpoint, write_snapshot
from baton.tasks.foundation.contracts.attempt import INPUT_WAIT
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import (
    BorderReason,
    Commit,
    Entry,
    ExitReason,
    HostSteps,
    LoggedValues,
    MetricRow,
    SegmentRequest,
    SegmentResult,
    StopReason,
    TracedStep,
    WorkerStats,
)
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BlowUp
from baton.tasks.foundation.log.appends import finish, require_broadcast_head
from baton.tasks.foundation.log.attempts import losses_of, pack_beside, read_attempts
from baton.tasks.foundation.machine.collectives import Hosts
from baton.tasks.foundation.machine.devices import Accelerator
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.storage.interface import best_effort
from baton.tasks.foundation.telemetry.events import CommitPace, Note, Sink, WithoutPhases
from baton.tasks.foundation.telemetry.formatting import duration_words, size_words
from baton.tasks.foundation.telemetry.ledger import Stopwatch, seconds_between
from baton.tasks.train_segment.host_stats import HostStats, InnerLoop
from baton.tasks.train_segment.trainer import Trainer

# About 3 MB in an entry of the log, which may have 16.
_MOST_VALUES = 100_000


class IntervalWork:
    """The work since the last commit.

    Attributes:
        metrics: of the newest logged row.
    """

    def __init__(self, spec: RunSpec, *, telemetry: Sink, clock: Callable[[], float]) -> None:
        """Begin with none.

        Args:
            telemetry: receives the causes that time is spent on.
            clock: monotonic time in seconds.
        """
        self.metrics: dict[str, float] = {}
        self._rows: list[MetricRow] = []
        self._logged: tuple[LoggedValues, ...] = ()
        self._values = 0
        self._spec = spec
        self._telemetry = telemetry
        self._clock = clock
        self._trains_since = 0.0
        self._host_stats = HostStats()
        self._workers: tuple[WorkerStats, ...] = ()
        self._agreed = ""
        self._partial: MetricRow | None = None
        self._traced: TracedStep | None = None
        self._stopwatch = Stopwatch(telemetry, clock)

    @property
    def training_seconds(self) -> float:
        """Seconds since training last began, after a commit or at the start."""
        return self._clock() - self._trains_since

    @property
    def fills_an_entry(self) -> bool:
        """Whether there are as many logged values as an entry of the log should have; more may be too many to read."""
        return self._values >= _MOST_VALUES

    def begin_cause(self, cause: str) -> None:
        """Count the time from now on as `cause`, one of the ledger's causes."""
        self._stopwatch.begin(cause)
        if cause == "train":
            self._trains_since = self._clock()

    def log(self, row: MetricRow) -> None:
        """Keep a logged row for the next commit."""
        self._rows.append(row)
        self._values += len(row.metrics)
        self.metrics = row.metrics

    def log_values(self, logged: tuple[LoggedValues, ...]) -> None:
        """Keep for the next commit what callbacks added to `logs`."""
        self._logged += logged
        self._values += sum(len(each.values) for each in logged)

    def add_inner_loop(self, loop: InnerLoop, seconds: float) -> None:
        """Count an inner loop. Its wait for input becomes a separate cause.

        Args:
            loop: what the loop did.
            seconds: its duration, including the wait for input.
        """
        self._host_stats.add(loop, seconds)
        self._stopwatch.move(min(loop.input_wait_seconds, seconds), "train", INPUT_WAIT)

    def add_interval(self, of_hosts: tuple[HostSteps, ...]) -> None:
        """Keep what an interval took of each host for the next commit, if one has ended."""
        if of_hosts:
            self._host_stats.add_interval(of_hosts)

    def gather_from_hosts(self, trainer: Trainer) -> None:
        """Collect what goes into the next commit besides the state. With several hosts, all of them call it."""
        self._workers = self._host_stats.gather_from_hosts(
            trainer.accelerator, self._spec.train.global_batch_size, telemetry=self._telemetry
        )
        self._host_stats = HostStats()
        self._partial = trainer.read_partial_row(self._telemetry)
        self._traced = trainer.traced
        self._agreed = trainer.accelerator.agreed

    def result(
        self,
        start: CheckpointRef,
        reason: ExitReason,
        *,
        staged: CheckpointRef | None = None,
        in_flight: CheckpointRef | None = None,
    ) -> SegmentResult:
        """The result of this work.

        Args:
            start: the checkpoint that it started from.
            reason: why the segment or the interval ends.
            staged: its checkpoint; None if nothing was staged.
            in_flight: its checkpoint, if its save is in flight.
        """
        saved = staged or in_flight
        trained = 0 if saved is None else saved.step - start.step
        return SegmentResult(
            staged=staged,
            parent=start.path,
            exit_reason=reason,
            history=tuple(self._rows),
            partial=self._partial if saved is not None else None,
            logged=self._logged,
            examples=trained * self._spec.train.global_batch_size,
            seconds=self._stopwatch.seconds,
            workers=self._workers if saved is not None else (),
            agreed=self._agreed if saved is not None else "",
            traced=self._traced if saved is not None else None,
            in_flight=in_flight,
        )

    def begin_next(self) -> None:
        """Begin the work of the next commit."""
        self._rows, self._logged, self._values = [], (), 0
        self._stopwatch = Stopwatch(self._telemetry, self._clock)


# A commit stages the state, then verifies it. Verifying takes at most as long as staging.
_COMMIT_PER_STAGING = 2.0


class CommitInterval:
    """The way from the last commit to the next one.

    Attributes:
        run_log: the log of the run.
        work: the rows and the seconds since the last commit.
        start: the checkpoint that the work started from; while it is being written, a reference without digests.
        base: number of the log entry that the work started from; while `start` is being written, it is not known.
        skipped_batches: see `Head`; the batch index is the step plus these.
    """

    def __init__(self, request: SegmentRequest, place: Place) -> None:
        """Begin where the request says.

        Args:
            request: the segment's.
            place: where it runs; with `place.saves`, checkpoints are saved while the training goes on.
        """
        telemetry, clock = place.telemetry, place.clock
        self.run_log = place.log
        self.work = IntervalWork(request.spec, telemetry=telemetry, clock=clock)
        self.start: CheckpointRef = request.start
        self.base = request.base
        self.skipped_batches = request.skipped_batches
        self._in_flight = request.start.is_in_flight
        self._spec = request.spec
        self._telemetry = telemetry
        self._clock = clock
        self._saves = place.saves
        self._where = f", in segment {request.number}"  # for errors

    def commit_is_due(self, step: int, cadence: CommitCadence) -> bool:
        """Whether a step was trained since the last commit, and its time has come or its rows fill an entry."""
        if step == self.start.step:
            return False
        return self.work.fills_an_entry or self.work.training_seconds >= cadence.interval_seconds

    def wait_for_save(self, hosts: Hosts) -> None:
        """Wait until the checkpoint that the interval starts from is committed. With several hosts, all call it.

        Raises:
            NonFinite: it has weights that are not finite, and is not committed.
            StaleWriter: another writer moved the tip first.
            StorageError: the store failed.
        """
        if not self._in_flight:
            return
        self.work.begin_cause("commit")
        self._in_flight = False
        self.base = self.start.base  # if it fails: nothing is committed on top of the commit before
        number = wait_for_save(self._saves, hosts)
        if number is None:
            raise AssertionError("the save in flight is neither committed nor failed")
        self.base = number
        newest = None if self._saves is None else self._saves.newest
        if newest is not None and isinstance(newest.body, Commit):
            self.start = newest.body.checkpoint

    def raise_failed_save(self, hosts: Hosts) -> None:
        """Raise what failed in the save in flight. With several hosts, all of them call it."""
        self.wait_for_save(hosts)
        wait_for_save(self._saves, hosts)  # what failed after the commit, such as logging an evaluation

    def earliest(self, fault: BlowUp, hosts: Hosts) -> BlowUp:
        """The blow-up of the save in flight if it has one, because it is of an earlier step; otherwise `fault`.

        Without this, what is rewound would depend on when the save was written.

        Raises:
            BatonError: the save in flight failed for another reason.
        """
        try:
            self.wait_for_save(hosts)
        except BlowUp as earlier:
            return earlier
        return fault

    def stage(self, trainer: Trainer) -> CheckpointRef | None:
        """Stage the state in line. With several hosts, all of them call it; only the chief gets the checkpoint.

        Raises:
            NonFinite: a weight is NaN or infinite.
            StaleWriter: another writer moved the tip, and deleted what was being staged.
        """
        self._prepare_save(trainer)
        began = self._clock()
        home, attempt = self.run_log.home, uuid.uuid4().hex
        staged = stage_checkpoint(trainer.state, home, base=self.base, attempt=attempt, where=self._where)
        trainer.staging_seconds = seconds_between(began, self._clock())
        trainer.warm.set_content(staged)
        return staged

    def commit(self, trainer: Trainer, reason: ExitReason) -> None:
        """Commit within the segment, and start a new interval from this commit.

        Raises:
            BatonError: this save failed, or the async one before.
        """
        began = self._clock()
        saves = self._saves if self._saves_async(trainer) else None
        if saves is not None:
            result = self._begin_save(saves, trainer, reason)
            if trainer.accelerator.is_chief:
                saves.commit(partial(self._commit_async, result))
            self.start, self._in_flight = result.in_flight or self.start, True
        else:
            result = self.result(reason, staged=self.stage(trainer))
            self.work.begin_cause("commit")
            head = None
            if trainer.accelerator.is_chief:
                body = Commit.of(result, target=self._spec.train.known_target)
                head = commit_staged(self.run_log, body, spec=self._spec, telemetry=self._telemetry).head
            head = require_broadcast_head(self.run_log, head, trainer.accelerator)
            self.start, self.base = head.tip or self.start, head.number
        trainer.cadence.stalled(seconds_between(began, self._clock()))
        if trainer.accelerator.is_chief and trainer.cadence.is_auto:
            if saves is None:
                self._learn(trainer.cadence)
            else:
                saves.then(lambda _: self._learn(trainer.cadence))
        self.work.begin_next()

    def _commit_async(self, result: SegmentResult, staged: CheckpointRef) -> Entry:
        """Commit the save in flight, in its thread, which has just compared what the store holds with what was sent."""
        body = Commit.of(result.with_staged(staged), target=self._spec.train.known_target)
        telemetry = WithoutPhases(self._telemetry)
        return commit_staged(self.run_log, body, spec=self._spec, telemetry=telemetry, verified=True)

    def end(self, trainer: Trainer, reason: BorderReason) -> SegmentResult:
        """End the segment: begin an async save of its checkpoint, or stage it in line.

        Raises:
            BatonError: staging failed, or the async save before.
        """
        saves = self._saves
        if saves is not None and saves.across_segments and self._saves_async(trainer):
            return self._begin_save(saves, trainer, reason)
        return self.result(reason, staged=self.stage(trainer))

    def commit_if_it_fits(self, trainer: Trainer, reason: StopReason, *, grace_left: float) -> None:
        """Commit before a stop, unless the last save shows that there is too little time.

        Args:
            trainer: holds the state.
            grace_left: seconds until the machine may end.
        """
        # The longest: the chief commits when all hosts have written.
        cost = float(trainer.accelerator.gather_from_hosts([self._seconds_of_save(trainer)]).max())
        if cost <= grace_left:
            self.commit(trainer, reason)
            return
        self._telemetry.emit(
            Note(
                text=f"a commit takes about {duration_words(cost)} and {duration_words(max(grace_left, 0))} of "
                f"stop.grace_seconds are left: steps {self.start.step + 1} to {trainer.state.step} are not committed "
                "and will be trained again",
                warning=True,
            )
        )

    def rewind(self, fault: BlowUp, accelerator: Accelerator) -> SegmentResult:
        """Log a rewind to a segment border, where the next segment starts. With several hosts, the chief logs it.

        Raises:
            BlowUp: no rewind is left, see `train.rewind_tries`, or no border.
            StaleWriter: another writer moved the tip first.
        """
        if accelerator.is_chief:
            rewind_run(self.run_log, fault, base=self.base, spec=self._spec, telemetry=self._telemetry)
        return self.result("rewind")

    def finish(self, reason: str, accelerator: Accelerator) -> SegmentResult:
        """Log that callbacks ended the run where the interval started. With several hosts, the chief logs it.

        The checkpoint there must be committed.

        Raises:
            StaleWriter: another writer moved the tip first.
        """
        if accelerator.is_chief:
            finish(self.run_log, self.start, base=self.base, reason=reason, attempt=uuid.uuid4().hex)
        self._telemetry.emit(Note(text=f"training ended at step {self.start.step}: {reason}"))
        return self.result("finished")

    def result(
        self, reason: ExitReason, *, staged: CheckpointRef | None = None, in_flight: CheckpointRef | None = None
    ) -> SegmentResult:
        """The result of the work since the last commit, see `IntervalWork.result`."""
        return self.work.result(self.start, reason, staged=staged, in_flight=in_flight)

    def _learn(self, cadence: CommitCadence) -> None:
        """Read once how often attempts were lost, and say how often this process commits."""
        if cadence.losses is None:
            home, now = self.run_log.home, datetime.now(UTC)
            with best_effort(home, "earlier losses could not be counted", then="the next commit tries again"):
                attempts = read_attempts(home)
                cadence.losses = losses_of(attempts.records, now=now)
                pack_beside(home, attempts.records, attempts.files, now=now)
        self._telemetry.emit(
            CommitPace(
                every_seconds=cadence.interval_seconds,
                cost_seconds=cadence.cost_seconds,
                between_losses_seconds=cadence.between_seconds,
            )
        )

    def _prepare_save(self, trainer: Trainer) -> None:
        """Wait for the save before, and collect what goes into the commit besides the state."""
        self.wait_for_save(trainer.accelerator)
        self.work.begin_cause("stage")
        self.work.gather_from_hosts(trainer)

    def _saves_async(self, trainer: Trainer) -> bool:
        """Whether the next save is made while the training goes on. With several hosts, all of them call it, and agree.

        If memory is short, that is reported once.
        """
        if self._saves is None:
            return False
        if trainer.accelerator.all_agree(fits_memory(trainer.state)):
            return True
        if not self._saves.memory_was_short:
            self._saves.memory_was_short = True
            size = size_words(snapshot_bytes(trainer.state))
            text = f"a copy of the train state takes {size} of memory, and less is free: training waits for each commit"
            self._telemetry.emit(Note(text=text, warning=True))
        return False

    def _begin_save(self, saves: AsyncSaves, trainer: Trainer, reason: ExitReason) -> SegmentResult:
        """Take a snapshot, and begin to write it. With several hosts, all of them call it, and each writes its share.

        What fails is raised where somebody waits for the save.
        """
        self._prepare_save(trainer)
        state, home, base, attempt = trainer.state, self.run_log.home, self.base, agreed_attempt(trainer.accelerator)
        processed = trainer.cadence.processed
        snapshot = take_snapshot(state, where=self._where)
        if snapshot is not None:
            saves.begin(lambda: write_snapshot(snapshot, home, base=base, attempt=attempt, processed=processed))
        reference = CheckpointRef.in_flight(step=state.step, base=base, attempt=attempt)
        trainer.warm.set_content(reference)
        return self.result(reason, in_flight=reference)

    def _seconds_of_save(self, trainer: Trainer) -> float:
        """Estimate of the seconds until a save that begins now is committed."""
        in_line = 0.0 if trainer.staging_seconds is None else _COMMIT_PER_STAGING * trainer.staging_seconds
        return in_line if self._saves is None else max(in_line, self._saves.seconds_of_save())


_WORD_BITS = 32  # a float64 holds such a word exactly


def agreed_attempt(hosts: Hosts) -> str:
    """A new attempt id, the chief's on every host."""
    chosen = uuid.uuid4()
    words = [chosen.int >> shift & (1 << _WORD_BITS) - 1 for shift in (96, 64, 32, 0)]
    agreed = 0
    for word in hosts.gather_from_hosts(words)[0].tolist():
        agreed = agreed << _WORD_BITS | int(word)
    return f"{agreed:032x}"
