"""The work between two commits of a segment: its start, its base, its rows and its seconds.

A segment without commits in its middle is one interval. Each commit ends an interval and starts the next one.
"""

import uuid
from collections.abc import Callable

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.checkpoint.save import Saver
from tasks.foundation.contracts.attempt import INPUT_WAIT
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Commit, Rewind
from tasks.foundation.contracts.segment import (
    ExitReason,
    MetricRow,
    SegmentRequest,
    SegmentResult,
    StopReason,
    TracedStep,
    WorkerStats,
)
from tasks.foundation.errors import BlowUp
from tasks.foundation.runlog.commits import finish, rewind
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.telemetry.formatting import duration_words
from tasks.foundation.telemetry.measurements import seconds_between
from tasks.foundation.telemetry.stopwatch import Stopwatch
from tasks.train_segment.host_stats import HostStats, InnerLoop
from tasks.train_segment.trainer import Trainer

# A commit stages the state, then verifies it. Verifying takes at most as long as staging.
_COMMIT_PER_STAGING = 2.0


class CommitInterval:
    """The work since the last commit.

    Attributes:
        home: the run's home.
        start: the checkpoint that the work started from.
        base: number of the log entry that the work started from.
        metrics: of the newest logged row.
    """

    def __init__(self, request: SegmentRequest, saver: Saver, *, telemetry: Sink, clock: Callable[[], float]) -> None:
        self.home = saver.home
        self.start: CheckpointRef = request.start
        self.base = request.base
        self.metrics: dict[str, float] = {}
        self._rows: list[MetricRow] = []
        self._spec = request.spec
        self._telemetry = telemetry
        self._clock = clock
        self._saver = saver
        self._number = request.number
        self._trains_since = 0.0
        self._host_stats = HostStats()
        self._workers: tuple[WorkerStats, ...] = ()
        self._traced: TracedStep | None = None
        self._stopwatch = Stopwatch(telemetry, clock)

    def begin_cause(self, cause: str) -> None:
        """Count the time from now on as `cause`, one of the ledger's causes."""
        self._stopwatch.begin(cause)
        if cause == "train":
            self._trains_since = self._clock()

    def log(self, row: MetricRow) -> None:
        """Keep a logged row for the next commit."""
        self._rows.append(row)
        self.metrics = row.metrics

    def commit_is_due(self, step: int) -> bool:
        """Whether `checkpoint.every_seconds` have passed since the last commit, and at least one step was trained."""
        every = self._spec.checkpoint.every_seconds
        return every is not None and step > self.start.step and self._clock() - self._trains_since >= every

    def add_inner_loop(self, loop: InnerLoop, seconds: float) -> None:
        """Count an inner loop. Its wait for input becomes a separate cause.

        Args:
            loop: what the loop did.
            seconds: its duration, including the wait for input.
        """
        self._host_stats.add(loop, seconds)
        self._stopwatch.move(min(loop.input_wait_seconds, seconds), "train", INPUT_WAIT)

    def stage(self, trainer: Trainer) -> CheckpointRef | None:
        """Stage the state. With several hosts, all of them call it; only the chief gets the staged checkpoint.

        Raises:
            NonFinite: a weight is NaN or infinite.
            StaleWriter: another writer moved the tip, and deleted what was being staged.
        """
        self.begin_cause("stage")
        self._workers = self._host_stats.gather_from_hosts(
            trainer.accelerator, self._spec.train.global_batch_size, telemetry=self._telemetry
        )
        self._host_stats = HostStats()
        began = self._clock()
        where = f", in segment {self._number}"
        staged = self._saver.stage(trainer.state, base=self.base, attempt=uuid.uuid4().hex, where=where)
        self._traced = trainer.traced
        trainer.staging_seconds = seconds_between(began, self._clock())
        trainer.holds(staged)
        return staged

    def commit(self, trainer: Trainer, reason: ExitReason) -> None:
        """Commit within the segment, and start a new interval from this commit.

        Raises:
            StaleWriter: another writer moved the tip first.
        """
        result = self.result(self.stage(trainer), reason)
        self.begin_cause("commit")
        body = Commit.of(result) if trainer.accelerator.is_chief else None
        head = self._saver.commit(body, trainer.accelerator)
        self.start, self.base, self._rows = head.tip or self.start, head.number, []
        self._stopwatch = Stopwatch(self._telemetry, self._clock)

    def commit_if_it_fits(self, trainer: Trainer, reason: StopReason, *, grace_left: float) -> None:
        """Commit before a stop, unless the last staging shows that there is too little time.

        Args:
            trainer: holds the state.
            reason: of the stop.
            grace_left: seconds until the machine may end.
        """
        last = trainer.staging_seconds
        cost = 0.0 if last is None else _COMMIT_PER_STAGING * last
        cost = float(trainer.accelerator.gather_from_hosts([cost]).max())  # the chief's, because only the chief uploads
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
        if not accelerator.is_chief:
            return self.result(None, "rewind")
        entry = rewind(RunLog(self.home), fault, base=self.base, spec=self._spec, attempt=uuid.uuid4().hex)
        if isinstance(entry.body, Rewind):
            self._telemetry.emit(
                Note(
                    text=f"{fault}. Rewound to step {entry.body.to.step}, skipping {entry.body.skip_batches} global "
                    f"batches (rewind {entry.head.rewinds} of at most {self._spec.train.rewind_tries} in a row)",
                    warning=True,
                )
            )
        return self.result(None, "rewind")

    def finish(self, reason: str, accelerator: Accelerator) -> SegmentResult:
        """Log that callbacks ended the run where the interval started. With several hosts, the chief logs it.

        Raises:
            StaleWriter: another writer moved the tip first.
        """
        if accelerator.is_chief:
            finish(RunLog(self.home), self.start, base=self.base, reason=reason, attempt=uuid.uuid4().hex)
        self._telemetry.emit(Note(text=f"training ended at step {self.start.step}: {reason}"))
        return self.result(None, "finished")

    def result(self, staged: CheckpointRef | None, reason: ExitReason) -> SegmentResult:
        """The result of the interval.

        Args:
            staged: its checkpoint; None if nothing was staged.
            reason: why the segment or the interval ends.
        """
        trained = 0 if staged is None else staged.step - self.start.step
        return SegmentResult(
            staged=staged,
            parent=self.start.path,
            exit_reason=reason,
            history=tuple(self._rows),
            examples=trained * self._spec.train.global_batch_size,
            seconds=self._stopwatch.seconds,
            workers=self._workers if staged is not None else (),
            traced=self._traced if staged is not None else None,
        )
