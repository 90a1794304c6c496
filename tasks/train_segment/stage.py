"""The stage train-segment: committed checkpoint -> staged checkpoint."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from tasks.foundation.accelerator.strategy import Accelerator, acquire
from tasks.foundation.checkpoint.commit_staged import commit_staged
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.schedule import next_multiple
from tasks.foundation.contracts.segment import BorderReason, SegmentRequest, SegmentResult
from tasks.foundation.errors import BlowUp
from tasks.foundation.model.train_step import once_training_has_begun
from tasks.foundation.runlog.history import recent_rows
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.stops.agreement import agreed_stop
from tasks.foundation.stops.stops import Stops
from tasks.foundation.stops.uninterrupted import run_uninterrupted
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.deadline import LEAVING
from tasks.foundation.telemetry.events import Sink, Training
from tasks.foundation.telemetry.measurements import seconds_between
from tasks.train_segment.blowups import MEDIAN_ROWS, LossWatch
from tasks.train_segment.commit_interval import CommitInterval, CommitStaged
from tasks.train_segment.loop import steps_within
from tasks.train_segment.loop_decision import LoopDecision
from tasks.train_segment.trainer import Recipe, Trainer

# The longest that an inner loop may last, in seconds: the progress bar moves.
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
    land: CommitStaged = commit_staged,
) -> SegmentResult:
    """Train from `request.start` to the absolute step `request.until_step`, and stage what was reached.

    Asked to stop (by a signal, the metadata server or the time budget), it ends the inner loop, commits what was
    trained if that fits into the grace period, and returns with the reason; what a signal's handler raised meanwhile is
    raised then. Model, loop and data live in the thread that `run_uninterrupted` keeps for such work. Where the start
    is the end, callbacks act on its evaluation, and nothing is trained or staged.

    Args:
        request: where to start and where to stop.
        code_folder: the run file's folder.
        storage: the storage root.
        recorded: the run's environment, for its thread counts.
        telemetry: is told of progress.
        clock: seconds, never going back.
        land: makes a staged checkpoint the tip, for commits inside a long segment and on a stop.

    Raises:
        DamagedCheckpoint: the checkpoint to start from is not what the log says.
        ModelError: the user's model cannot be trained, or its callbacks fail before the first step.
        StepFailed: a step or a callback failed.
        BlowUp: the loss ran away, or loss or weights are NaN or infinite, and `train.on_blowup` is stop.
        StaleWriter: another writer moved the tip, before a commit inside the segment.
    """

    def work(stops: Stops) -> SegmentResult:
        interval = CommitInterval(request, storage.at(request.spec.run), telemetry=telemetry, clock=clock, land=land)
        stops.at_stake = False
        interval.spends("build")
        accelerator = acquire(request.spec.accelerator, recorded, deterministic=request.spec.train.deterministic)
        recipe = Recipe(spec=request.spec, dataset=request.dataset, code_folder=code_folder)
        trainer = _take_trainer(recipe, storage, accelerator)
        for prepare in (_restore, _compile):
            stop = agreed_stop(stops, accelerator)
            if stop is not None:
                return interval.result(None, stop)
            prepare(trainer, request, interval, telemetry)
        stops.at_stake = True
        interval.spends("train")
        try:
            # Before the first step, what callbacks do is a matter of the run file.
            with nullcontext() if interval.start.step == 0 else once_training_has_begun():
                ended = trainer.begin(interval.home, interval.start)
            if ended is not None:
                result = interval.finish(ended, accelerator)
            elif request.until_step == interval.start.step:
                result = interval.result(None, "finished")
            else:
                with once_training_has_begun():
                    result = _train(trainer, request, interval, stops, telemetry=telemetry, clock=clock)
        except BlowUp as fault:
            if request.spec.train.on_blowup == "stop":
                raise
            result = interval.rewind(fault, accelerator)
        _warm.append(trainer)
        return result

    return run_uninterrupted(work, request.spec.stop, within_seconds=request.stop_within_seconds, telemetry=telemetry)


def forget_trainer() -> None:
    """Drop the warm trainer, so that the next segment restores from storage."""
    _warm.clear()


def _restore(trainer: Trainer, request: SegmentRequest, interval: CommitInterval, _telemetry: Sink) -> None:
    interval.spends("restore")
    trainer.restore(interval.home, request.start)
    trainer.seek(request.start.step + request.skipped_batches)


def _compile(trainer: Trainer, request: SegmentRequest, interval: CommitInterval, telemetry: Sink) -> None:
    interval.spends("compile")
    trainer.compile(RunLog(interval.home), request.base, telemetry)


def _take_trainer(recipe: Recipe, storage: Storage, accelerator: Accelerator) -> Trainer:
    """The warm trainer if it fits, else a new one. Taken out: only a segment that ends well puts it back."""
    kept = _warm.pop() if _warm else None
    if kept is not None and kept.recipe == recipe and kept.accelerator is accelerator:
        return kept
    return Trainer(recipe, storage=storage, accelerator=accelerator)


def _train(
    trainer: Trainer,
    request: SegmentRequest,
    interval: CommitInterval,
    stops: Stops,
    *,
    telemetry: Sink,
    clock: Callable[[], float],
) -> SegmentResult:
    """Inner loops up to the segment's end; each ends at every absolute step that matters."""
    train = request.spec.train
    began = clock()
    # Half of the promise, since the speed of the last inner loop is no promise for the next.
    longest = min(_INNER_LOOP_SECONDS, request.spec.stop.answer_seconds / 2)
    steps_per_second = 0.0
    watch = _loss_watch(request, interval.home)
    reason: BorderReason = "segment_end"
    while trainer.state.step < request.until_step:
        step = trainer.state.step
        end = min(request.until_step, next_multiple(train.log_every_steps, step))
        turn = LoopDecision(
            stop=None if stops.asked is None else stops.asked.reason,
            grace_left=stops.grace_left(),
            segment_is_over=train.segment_seconds is not None
            and clock() - began >= train.segment_seconds
            and step > interval.start.step,
            commit_is_due=interval.commit_is_due(step),
            steps=min(end - step, steps_within(longest, steps_per_second)),
        ).agreed(trainer.accelerator)
        if turn.stop is not None:
            if math.isfinite(turn.grace_left):
                LEAVING.bind(turn.grace_left)  # the notice may be another host's
            if step > interval.start.step:
                interval.commit_if_it_fits(trainer, turn.stop, grace_left=turn.grace_left)
            return interval.result(None, turn.stop)
        if turn.segment_is_over:
            reason = "segment_seconds"
            break
        if turn.commit_is_due:
            interval.commit(trainer, "interval")
            interval.spends("train")
        inner_began = clock()
        inner = trainer.run(turn.steps, segment=request.number)
        inner_seconds = seconds_between(inner_began, clock())
        interval.ran(inner, inner_seconds)
        steps_per_second = turn.steps / max(inner_seconds, 1e-9)
        if trainer.state.step % train.log_every_steps == 0:
            row = trainer.read_metrics()
            watch.look_at(row)
            interval.log(row)
            if trainer.take_row(row):
                break  # what comes next begins from here, and says so in the log
        telemetry.emit(
            Training(
                step=trainer.state.step,
                target=train.steps,
                metrics=interval.metrics,
                examples_per_second=steps_per_second * train.global_batch_size,
                input_wait_seconds=inner.input_wait_seconds,
            )
        )
    return interval.result(interval.stage(trainer), reason)


def _loss_watch(request: SegmentRequest, home: Storage) -> LossWatch:
    factor = request.spec.train.blowup_factor
    if factor is None:
        return LossWatch(None)
    log = RunLog(home)
    return LossWatch(factor, recent_rows(log, log.entry(request.base).head, MEDIAN_ROWS))
