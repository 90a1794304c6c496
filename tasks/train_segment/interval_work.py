"""What a commit says of the steps since the one before: rows, seconds by cause, what each host did."""

from collections.abc import Callable

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.attempt import INPUT_WAIT
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.segment import ExitReason, MetricRow, SegmentResult, TracedStep, WorkerStats
from tasks.foundation.telemetry.events import Sink
from tasks.foundation.telemetry.stopwatch import Stopwatch
from tasks.train_segment.host_stats import HostStats, InnerLoop

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
            spec: the run file.
            telemetry: receives the causes that time is spent on.
            clock: monotonic time in seconds.
        """
        self.metrics: dict[str, float] = {}
        self._rows: list[MetricRow] = []
        self._values = 0
        self._spec = spec
        self._telemetry = telemetry
        self._clock = clock
        self._trains_since = 0.0
        self._host_stats = HostStats()
        self._workers: tuple[WorkerStats, ...] = ()
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

    def add_inner_loop(self, loop: InnerLoop, seconds: float) -> None:
        """Count an inner loop. Its wait for input becomes a separate cause.

        Args:
            loop: what the loop did.
            seconds: its duration, including the wait for input.
        """
        self._host_stats.add(loop, seconds)
        self._stopwatch.move(min(loop.input_wait_seconds, seconds), "train", INPUT_WAIT)

    def gather_from_hosts(self, accelerator: Accelerator, *, traced: TracedStep | None) -> None:
        """Collect what goes into the next commit besides the state. With several hosts, all of them call it.

        Args:
            accelerator: the process's.
            traced: the step as this process traced it.
        """
        self._workers = self._host_stats.gather_from_hosts(
            accelerator, self._spec.train.global_batch_size, telemetry=self._telemetry
        )
        self._host_stats = HostStats()
        self._traced = traced

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
            in_flight: its checkpoint, if it is being written beside the training.
        """
        saved = staged or in_flight
        trained = 0 if saved is None else saved.step - start.step
        return SegmentResult(
            staged=staged,
            parent=start.path,
            exit_reason=reason,
            history=tuple(self._rows),
            examples=trained * self._spec.train.global_batch_size,
            seconds=self._stopwatch.seconds,
            workers=self._workers if saved is not None else (),
            traced=self._traced if saved is not None else None,
            in_flight=in_flight,
        )

    def begin_next(self) -> None:
        """Begin the work of the next commit."""
        self._rows, self._values = [], 0
        self._stopwatch = Stopwatch(self._telemetry, self._clock)
