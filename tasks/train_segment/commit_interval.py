"""What lies between two commits of a segment: its start, its base, its rows and its seconds.

A segment without commits inside is one interval. Each commit begins the next, on top of itself.
"""

import uuid
from collections.abc import Callable
from typing import Protocol

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.attempt import INPUT_WAIT
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Commit, Entry, Rewind
from tasks.foundation.contracts.run_spec import RunSpec
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
from tasks.foundation.runlog.multi_host import require_head_of_chief
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.telemetry.formatting import duration_words
from tasks.foundation.telemetry.measurements import seconds_between
from tasks.foundation.telemetry.stopwatch import Stopwatch
from tasks.train_segment.host_stats import HostStats, InnerLoop
from tasks.train_segment.trainer import Trainer

# A commit stages the state, then reads it once more to verify it: at most as long again.
_COMMIT_PER_STAGING = 2.0


class CommitStaged(Protocol):
    """Makes a staged checkpoint the tip, see `runlog.landing.land`."""

    def __call__(self, home: Storage, body: Commit, *, spec: RunSpec, telemetry: Sink) -> Entry:
        """Verify, commit, retire."""


class CommitInterval:
    """The work since the last commit, and the ways to end it."""

    def __init__(
        self, request: SegmentRequest, home: Storage, *, telemetry: Sink, clock: Callable[[], float], land: CommitStaged
    ) -> None:
        self.home = home
        self.start: CheckpointRef = request.start
        self.base = request.base
        self.metrics: dict[str, float] = {}
        self._rows: list[MetricRow] = []
        self._spec = request.spec
        self._telemetry = telemetry
        self._clock = clock
        self._land = land
        self._number = request.number
        self._trains_since = 0.0
        self._effort = HostStats()
        self._workers: tuple[WorkerStats, ...] = ()
        self._traced: TracedStep | None = None
        self._stopwatch = Stopwatch(telemetry, clock)

    def spends(self, cause: str) -> None:
        """From now on time goes to `cause`."""
        self._stopwatch.begin(cause)
        if cause == "train":
            self._trains_since = self._clock()

    def log(self, row: MetricRow) -> None:
        """Keep a row for the next commit; its metrics are the latest until there are newer ones."""
        self._rows.append(row)
        self.metrics = row.metrics

    def commit_is_due(self, step: int) -> bool:
        """Whether `checkpoint.every_seconds` have passed, and something was trained meanwhile."""
        every = self._spec.checkpoint.every_seconds
        return every is not None and step > self.start.step and self._clock() - self._trains_since >= every

    def ran(self, loop: InnerLoop, seconds: float) -> None:
        """Count an inner loop that took so many seconds; its wait for input is a cause of its own."""
        self._effort.add(loop, seconds)
        self._stopwatch.move(min(loop.input_wait_seconds, seconds), "train", INPUT_WAIT)

    def stage(self, trainer: Trainer) -> CheckpointRef | None:
        """Write the state to the home; not committed yet. Every host takes part, and the chief gets what is staged.

        Raises:
            NonFinite: a weight is NaN or infinite.
            StaleWriter: another writer moved the tip, and swept what was being staged.
        """
        self.spends("stage")
        self._workers = self._effort.of_all_hosts(
            trainer.accelerator, self._spec.train.global_batch_size, telemetry=self._telemetry
        )
        self._effort = HostStats()
        began = self._clock()
        where = f", in segment {self._number}"
        staged = trainer.state.stage(self.home, base=self.base, attempt=uuid.uuid4().hex, where=where)
        self._traced = trainer.traced
        trainer.staging_seconds = seconds_between(began, self._clock())
        trainer.holds(staged)
        return staged

    def commit(self, trainer: Trainer, reason: ExitReason) -> None:
        """Commit inside the segment; what follows is a new interval on top.

        Raises:
            StaleWriter: another writer moved the tip first.
        """
        result = self.result(self.stage(trainer), reason)
        self.spends("commit")
        head = None
        if trainer.accelerator.is_chief:
            head = self._land(self.home, Commit.of(result), spec=self._spec, telemetry=self._telemetry).head
        head = require_head_of_chief(RunLog(self.home), head, trainer.accelerator)
        self.start, self.base, self._rows = head.tip or self.start, head.number, []
        self._stopwatch = Stopwatch(self._telemetry, self._clock)

    def commit_if_it_fits(self, trainer: Trainer, reason: StopReason, *, grace_left: float) -> None:
        """Commit before a stop, unless it is known to take longer than there is time. `grace_left` is in seconds."""
        known = trainer.staging_seconds
        cost = 0.0 if known is None else _COMMIT_PER_STAGING * known
        cost = float(trainer.accelerator.of_all_hosts([cost]).max())  # the chief's, who alone uploads
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
        """Log the way back to a segment border; the next segment begins there. Of several hosts the chief logs it.

        Raises:
            BlowUp: there is no way back any more.
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
        """Log that callbacks ended the run where the interval began. Of several hosts the chief logs it.

        Raises:
            StaleWriter: another writer moved the tip first.
        """
        if accelerator.is_chief:
            finish(RunLog(self.home), self.start, base=self.base, reason=reason, attempt=uuid.uuid4().hex)
        self._telemetry.emit(Note(text=f"training ended at step {self.start.step}: {reason}"))
        return self.result(None, "finished")

    def result(self, staged: CheckpointRef | None, reason: ExitReason) -> SegmentResult:
        """What the interval came to."""
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
