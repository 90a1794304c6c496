"""The stage train-segment: committed checkpoint -> staged checkpoint."""

import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tasks.foundation.accelerator.strategy import Accelerator, acquire
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.schedule import next_multiple
from tasks.foundation.contracts.segment import ExitReason, MetricRow, SegmentRequest, SegmentResult
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Sink, Training
from tasks.train_segment.loop import steps_within
from tasks.train_segment.trainer import Recipe, Trainer

# How long an inner loop may last: the progress bar moves, and a stop is answered.
_INNER_LOOP_SECONDS = 1.0

# The warm trainer of this process; empty after any exception.
_warm: list[Trainer] = []


def train_segment(
    request: SegmentRequest,
    *,
    code_folder: Path,
    storage: Storage,
    recorded: Environment,
    telemetry: Sink,
    clock: Callable[[], float] = time.monotonic,
) -> SegmentResult:
    """Train from `request.start` to the absolute step `request.until_step`, and stage what was reached.

    Args:
        request: where to start and where to stop.
        code_folder: the run file's folder.
        storage: the storage root.
        recorded: the run's environment, for its thread counts.
        telemetry: is told of progress.
        clock: seconds, never going back.

    Raises:
        DamagedCheckpoint: the checkpoint to start from is not what the log says.
        ModelError: the user's model cannot be trained.
        NonFinite: loss or weights are NaN or infinite.
    """
    stopwatch = _Stopwatch(clock)
    accelerator = acquire(request.spec.accelerator, recorded)
    home = storage.at(request.spec.run)
    recipe = Recipe(spec=request.spec, dataset=request.dataset, code_folder=code_folder)
    trainer = _take_trainer(recipe, storage, accelerator)
    stopwatch.lap("build")
    trainer.restore(home, request.start)
    stopwatch.lap("restore")
    trainer.seek(request.start.step + request.skipped_batches)
    trainer.compile(telemetry)
    stopwatch.lap("compile")
    history, reason = _train(trainer, request, telemetry, clock)
    trainer.state.require_finite(f"step {trainer.state.step}, in segment {request.number}")
    stopwatch.lap("train")
    staged: CheckpointRef = trainer.state.stage(home, base=request.base, attempt=uuid.uuid4().hex)
    trainer.holds(staged)
    stopwatch.lap("stage")
    _warm.append(trainer)
    return SegmentResult(
        staged=staged,
        exit_reason=reason,
        history=tuple(history),
        examples=(staged.step - request.start.step) * request.spec.train.global_batch_size,
        seconds=stopwatch.seconds,
    )


def forget_trainer() -> None:
    """Drop the warm trainer, so that the next segment restores from storage."""
    _warm.clear()


def _take_trainer(recipe: Recipe, storage: Storage, accelerator: Accelerator) -> Trainer:
    """The warm trainer if it fits, else a new one. Taken out: only a segment that ends well puts it back."""
    kept = _warm.pop() if _warm else None
    if kept is not None and kept.recipe == recipe:
        return kept
    return Trainer(recipe, storage=storage, accelerator=accelerator)


def _train(
    trainer: Trainer, request: SegmentRequest, telemetry: Sink, clock: Callable[[], float]
) -> tuple[list[MetricRow], ExitReason]:
    """Inner loops up to the segment's end; each ends at every absolute step that matters."""
    train = request.spec.train
    history: list[MetricRow] = []
    began = clock()
    steps_per_second = 0.0
    while trainer.state.step < request.until_step:
        step = trainer.state.step
        in_time = train.segment_seconds is None or clock() - began < train.segment_seconds
        if not in_time and step > request.start.step:
            return history, "segment_seconds"
        end = min(request.until_step, next_multiple(train.log_every_steps, step))
        steps = min(end - step, steps_within(_INNER_LOOP_SECONDS, steps_per_second))
        inner_began = clock()
        trainer.run(steps, segment=request.number)
        steps_per_second = steps / max(clock() - inner_began, 1e-9)
        if trainer.state.step % train.log_every_steps == 0:
            history.append(trainer.read_metrics())
        telemetry.emit(
            Training(
                step=trainer.state.step,
                target=train.steps,
                metrics=history[-1].metrics if history else {},
                examples_per_second=steps_per_second * train.global_batch_size,
            )
        )
    return history, "segment_end"


class _Stopwatch:
    """Wall-clock seconds by cause; the causes add up to the whole."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self.seconds: dict[str, float] = {}

    def lap(self, cause: str) -> None:
        """All time since the lap before goes to `cause`."""
        now = self._clock()
        self.seconds[cause] = self.seconds.get(cause, 0.0) + now - self._last
        self._last = now
