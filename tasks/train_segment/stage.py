"""The stage train-segment: trains from a committed checkpoint and stages the next one."""

import math
from contextlib import nullcontext

from tasks.foundation.accelerator.strategy import acquire
from tasks.foundation.checkpoint.save import Saver
from tasks.foundation.contracts.schedule import next_multiple
from tasks.foundation.contracts.segment import BorderReason, SegmentRequest, SegmentResult
from tasks.foundation.contracts.stage_calls import TrainSegmentCall
from tasks.foundation.errors import BlowUp
from tasks.foundation.model.train_step import invalid_input_as_step_failed
from tasks.foundation.runlog.history import recent_rows
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.stage import Place
from tasks.foundation.stops.agreement import agreed_stop
from tasks.foundation.stops.stops import Stops
from tasks.foundation.stops.uninterrupted import run_uninterrupted
from tasks.foundation.storage.deadline import PROCESS_DEADLINE
from tasks.foundation.telemetry.events import Training
from tasks.foundation.telemetry.measurements import seconds_between
from tasks.train_segment.blowups import MEDIAN_ROWS, LossWatch
from tasks.train_segment.commit_interval import CommitInterval
from tasks.train_segment.loop import steps_within
from tasks.train_segment.loop_decision import LoopDecision
from tasks.train_segment.trainer import Recipe, Trainer
from tasks.train_segment.warm_trainer import WARM_TRAINER

# An inner loop is not longer than this, so that the progress bar moves.
_INNER_LOOP_SECONDS = 1.0


def train_segment(call: TrainSegmentCall, place: Place) -> SegmentResult:
    """Train from `request.start` to the absolute step `request.until_step`, and stage the state there.

    After a request to stop (a signal, a notice of the metadata server, the time budget), it ends the inner loop,
    commits the trained steps if the grace period is long enough, and returns with the reason. An exception of a signal
    handler is raised after that. Model, loop and data belong to the work thread of `run_uninterrupted`. If start and
    end are the same step, callbacks are called with its evaluation, and nothing is trained or staged.

    Args:
        call: the request, which says where to start and where to end, and the run's environment.
        place: where the run's home and the user's code are.

    Returns:
        The work since the last commit; nothing is staged after a stop, a rewind or a finish.

    Raises:
        DamagedCheckpoint: the checkpoint to start from differs from the log.
        ModelError: the user's model cannot be trained, or its callbacks fail before the first step.
        StepFailed: a step or a callback failed.
        BlowUp: the loss blew up, or loss or weights are NaN or infinite, and `train.on_blowup` is stop.
        StaleWriter: another writer moved the tip before a commit in the segment's middle.
    """
    request = call.request
    return run_uninterrupted(
        lambda stops: _run(call, place, stops),
        request.spec.stop,
        within_seconds=request.stop_within_seconds,
        telemetry=place.telemetry,
    )


def forget_trainer() -> None:
    """Drop the warm trainer, so that the next segment restores from storage."""
    WARM_TRAINER.forget()


def _run(call: TrainSegmentCall, place: Place, stops: Stops) -> SegmentResult:
    request = call.request
    saver = Saver(home=place.home, spec=request.spec, telemetry=place.telemetry)
    interval = CommitInterval(request, saver, telemetry=place.telemetry, clock=place.clock)
    stops.unsaved_work = False
    interval.begin_cause("build")
    accelerator = acquire(request.spec.accelerator, call.recorded, deterministic=request.spec.train.deterministic)
    recipe = Recipe(spec=request.spec, dataset=request.dataset, code_folder=place.code_folder)
    trainer = WARM_TRAINER.take(recipe, storage=place.root, accelerator=accelerator)
    for prepare in (_restore, _compile):
        stop = agreed_stop(stops, accelerator)
        if stop is not None:
            return interval.result(None, stop)
        prepare(trainer, request, interval, place)
    stops.unsaved_work = True
    interval.begin_cause("train")
    try:
        # An error of a callback before the first step is an error in the run file, not in a step.
        with nullcontext() if interval.start.step == 0 else invalid_input_as_step_failed():
            ended = trainer.begin(place.home, interval.start)
        if ended is not None:
            result = interval.finish(ended, accelerator)
        elif request.until_step == interval.start.step:
            result = interval.result(None, "finished")
        else:
            with invalid_input_as_step_failed():
                result = _train(trainer, request, interval, stops, place)
    except BlowUp as fault:
        if request.spec.train.on_blowup == "stop":
            raise
        result = interval.rewind(fault, accelerator)
    WARM_TRAINER.keep(trainer)
    return result


def _restore(trainer: Trainer, request: SegmentRequest, interval: CommitInterval, place: Place) -> None:
    interval.begin_cause("restore")
    trainer.restore(place.home, request.start)
    trainer.seek(request.start.step + request.skipped_batches)


def _compile(trainer: Trainer, request: SegmentRequest, interval: CommitInterval, place: Place) -> None:
    interval.begin_cause("compile")
    trainer.compile(RunLog(place.home), request.base, place.telemetry)


def _train(
    trainer: Trainer, request: SegmentRequest, interval: CommitInterval, stops: Stops, place: Place
) -> SegmentResult:
    """Run inner loops up to the segment's end. Each ends at every absolute step where something is due."""
    train, clock = request.spec.train, place.clock
    began = clock()
    # Half of the promised response time, because the next inner loop may be slower than the last.
    longest = min(_INNER_LOOP_SECONDS, request.spec.stop.answer_seconds / 2)
    steps_per_second = 0.0
    watch = _loss_watch(request, place)
    reason: BorderReason = "segment_end"
    while trainer.state.step < request.until_step:
        step = trainer.state.step
        end = min(request.until_step, next_multiple(train.log_every_steps, step))
        stop = stops.requested
        decision = LoopDecision(
            stop=None if stop is None else stop.reason,
            grace_left=stops.grace_left(),
            segment_is_over=train.segment_seconds is not None
            and clock() - began >= train.segment_seconds
            and step > interval.start.step,
            commit_is_due=interval.commit_is_due(step),
            steps=min(end - step, steps_within(longest, steps_per_second)),
        ).agreed(trainer.accelerator)
        if decision.stop is not None:
            if math.isfinite(decision.grace_left):
                PROCESS_DEADLINE.start(decision.grace_left)  # the notice may be for another host
            if step > interval.start.step:
                interval.commit_if_it_fits(trainer, decision.stop, grace_left=decision.grace_left)
            return interval.result(None, decision.stop)
        if decision.segment_is_over:
            reason = "segment_seconds"
            break
        if decision.commit_is_due:
            interval.commit(trainer, "interval")
            interval.begin_cause("train")
        inner_began = clock()
        inner = trainer.run(decision.steps, segment=request.number)
        inner_seconds = seconds_between(inner_began, clock())
        interval.add_inner_loop(inner, inner_seconds)
        steps_per_second = decision.steps / max(inner_seconds, 1e-9)
        if trainer.state.step % train.log_every_steps == 0:
            row = trainer.read_metrics()
            watch.check(row)
            interval.log(row)
            if trainer.take_row(row):
                break  # the next segment starts here, and logs that the run is finished
        place.telemetry.emit(
            Training(
                step=trainer.state.step,
                target=train.steps,
                metrics=interval.metrics,
                examples_per_second=steps_per_second * train.global_batch_size,
                input_wait_seconds=inner.input_wait_seconds,
            )
        )
    return interval.result(interval.stage(trainer), reason)


def _loss_watch(request: SegmentRequest, place: Place) -> LossWatch:
    factor = request.spec.train.blowup_factor
    if factor is None:
        return LossWatch(None)
    log = RunLog(place.home)
    return LossWatch(factor, recent_rows(log, log.entry(request.base).head, MEDIAN_ROWS))
