"""The stage train-segment: trains from a committed checkpoint and stages the next one."""

import math
from collections.abc import Sequence
from functools import partial

from tasks.foundation.contracts.log_entry import BorderReason, MetricRow, SegmentRequest, SegmentResult, StopReason
from tasks.foundation.contracts.run_spec import EpochLength, next_multiple
from tasks.foundation.contracts.stage_calls import TrainSegmentCall
from tasks.foundation.errors import BlowUp
from tasks.foundation.machine.devices import acquire
from tasks.foundation.machine.stops import Stops, agreed_stop
from tasks.foundation.machine.threads import run_uninterrupted
from tasks.foundation.model.step import invalid_input_as_step_failed
from tasks.foundation.runlog.history import recent_rows
from tasks.foundation.stage import Place
from tasks.foundation.state.warm_state import Recipe
from tasks.foundation.storage.transfers import PROCESS_DEADLINE
from tasks.foundation.telemetry.events import Note, Training, Waiting
from tasks.foundation.telemetry.ledger import seconds_between
from tasks.train_segment.callbacks import MEDIAN_ROWS, LossWatch
from tasks.train_segment.interval import CommitInterval
from tasks.train_segment.loop import LoopDecision, steps_within
from tasks.train_segment.trainer import WARM_TRAINER, Trainer

# An inner loop is not longer than this, so that the progress bar moves.
_INNER_LOOP_SECONDS = 1.0


def train_segment(call: TrainSegmentCall, place: Place) -> SegmentResult:
    """Train from `request.start` to the absolute step `request.until_step`, and stage the state there.

    After a request to stop (a signal, a notice of the metadata server, the time budget), it ends the inner loop,
    commits the trained steps if the grace period is long enough, and returns with the reason. An exception of a signal
    handler is raised after that. Model, loop and data belong to the work thread of `run_uninterrupted`. If start and
    end are the same step, callbacks are called with its evaluation and at the end of the training; nothing is trained.

    Args:
        call: the request, which says where to start and where to end, and the run's environment.
        place: where the run's home and the user's code are.

    Returns:
        The work since the last commit. With `place.saves`, its checkpoint is being written while this returns
        (`in_flight`). After a stop, a rewind or a finish there is none, and everything is committed.

    Raises:
        DamagedCheckpoint: the checkpoint to start from differs from the log.
        ModelError: the user's model cannot be trained, or its callbacks fail before the first step.
        IdentityChanged: the train step computes with other values than that of the process before.
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
    interval = CommitInterval(request, place)
    stops.unsaved_work = False
    interval.work.begin_cause("build")
    accelerator = acquire(request.spec.accelerator, call.recorded, deterministic=request.spec.train.deterministic)
    recipe = Recipe(spec=request.spec, dataset=request.dataset, code_folder=place.code_folder)
    trainer = WARM_TRAINER.take(recipe, storage=place.root, accelerator=accelerator)
    try:
        for prepare in (_restore, partial(_compile, accept=call.accept)):
            stop = agreed_stop(stops, accelerator)
            if stop is not None:
                interval.wait_for_save(accelerator)
                return interval.result(stop)
            prepare(trainer, interval, place)
        stops.unsaved_work = True
        result = _train_segment(trainer, request, interval, stops, place)
    except BlowUp as found:
        fault = interval.earliest(found, accelerator)
        if request.spec.train.on_blowup == "stop":
            raise fault from (None if fault is found else found)
        result = interval.rewind(fault, accelerator)
    WARM_TRAINER.keep(trainer)
    if result.staged is None:
        return result
    # Another process may commit it, and says what this one has read.
    return result.model_copy(update={"read_whole": place.log.whole_reads.waiting()})


def _train_segment(
    trainer: Trainer, request: SegmentRequest, interval: CommitInterval, stops: Stops, place: Place
) -> SegmentResult:
    """Call the callbacks that are due at the start, and train unless they end the run."""
    if request.until_step == interval.start.step or trainer.needs_evaluation(interval.start):
        interval.wait_for_save(trainer.accelerator)
    interval.work.begin_cause("train")
    with invalid_input_as_step_failed():
        ended = trainer.begin(place.log, interval.start)
    if ended is not None:
        interval.wait_for_save(trainer.accelerator)
        with invalid_input_as_step_failed():
            trainer.end_training()
        return interval.finish(ended, trainer.accelerator)
    if request.until_step == interval.start.step:
        with invalid_input_as_step_failed():
            trainer.end_training()
        return interval.result("finished")
    with invalid_input_as_step_failed():
        return _train(trainer, request, interval, stops, place)


def _restore(trainer: Trainer, interval: CommitInterval, place: Place) -> None:
    interval.work.begin_cause("restore")
    if not trainer.accelerator.all_agree(trainer.has(interval.start)):
        interval.wait_for_save(trainer.accelerator)  # it is restored from the store
    if trainer.restore(place.home, interval.start):
        place.log.whole_reads.add(interval.start)
    trainer.seek(interval.start.step + interval.skipped_batches, place.telemetry)


def _compile(trainer: Trainer, interval: CommitInterval, place: Place, *, accept: Sequence[str]) -> None:
    interval.work.begin_cause("compile")
    if trainer.traced is None:
        interval.wait_for_save(trainer.accelerator)
        for text in () if trainer.callbacks is None else trainer.callbacks.notes:
            place.telemetry.emit(Note(text=text))
    trainer.compile(place.log, interval.base, place.telemetry, accept=accept)


def _train(
    trainer: Trainer, request: SegmentRequest, interval: CommitInterval, stops: Stops, place: Place
) -> SegmentResult:
    """Run inner loops up to the segment's end. Each ends at every absolute step where something is due."""
    train, clock = request.spec.train, place.clock
    began = clock()
    # Half of the promised response time, because the next inner loop may be slower than the last.
    longest = min(_INNER_LOOP_SECONDS, request.spec.stop.answer_seconds / 2)
    steps_per_second = 0.0
    watch = _loss_watch(trainer, interval, place)
    epoch = EpochLength(
        train_examples=request.dataset.train_examples,
        global_batch_size=train.global_batch_size,
        drop_remainder=train.drop_remainder,
    )
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
            commit_is_due=interval.commit_is_due(step, trainer.cadence),
            steps=min(end - step, steps_within(longest, steps_per_second)),
            save_failed=place.saves is not None and place.saves.failed,
        ).agreed(trainer.accelerator)
        if decision.save_failed:
            interval.raise_failed_save(trainer.accelerator)
        if decision.stop is not None:
            return _stop(decision.stop, decision.grace_left, trainer, interval)
        if decision.segment_is_over:
            reason = "segment_seconds"
            break
        if decision.commit_is_due:
            interval.commit(trainer, "interval")
            interval.work.begin_cause("train")
        inner_began = clock()
        inner = trainer.run(decision.steps, segment=request.number)
        inner_seconds = seconds_between(inner_began, clock())
        interval.work.add_inner_loop(inner, inner_seconds)
        interval.reserve_memory(trainer)
        steps_per_second = decision.steps / max(inner_seconds, 1e-9)
        if trainer.state.step % train.log_every_steps == 0:
            row = trainer.read_metrics()
            watch.check(row)
            interval.work.log(row)
            if trainer.callbacks is not None:
                place.telemetry.emit(Waiting(on="callbacks"))
            if trainer.take_row(row):
                break  # the next segment starts here, and logs that the run is finished
        place.telemetry.emit(
            Training(
                step=trainer.state.step,
                target=train.target,
                epoch=epoch.after(trainer.state.step),
                segment=request.number,
                metrics=interval.work.metrics,
                examples_per_second=steps_per_second * train.global_batch_size,
                input_wait_seconds=inner.input_wait_seconds,
            )
        )
    return interval.end(trainer, reason)


def _stop(reason: StopReason, grace_left: float, trainer: Trainer, interval: CommitInterval) -> SegmentResult:
    """Commit what was trained, if the grace period is long enough, and wait for what is in flight."""
    if math.isfinite(grace_left):
        PROCESS_DEADLINE.start(grace_left)  # the notice may be for another host
    if trainer.state.step > interval.start.step:
        interval.commit_if_it_fits(trainer, reason, grace_left=grace_left)
    interval.wait_for_save(trainer.accelerator)
    return interval.result(reason)


def _loss_watch(trainer: Trainer, interval: CommitInterval, place: Place) -> LossWatch:
    """The losses before the state in memory: kept from the segment before, or read from the log."""
    if trainer.loss_watch is not None:
        return trainer.loss_watch
    factor = trainer.recipe.spec.train.blowup_factor
    rows: list[MetricRow] = []
    if factor is not None:
        interval.wait_for_save(trainer.accelerator)
        rows = recent_rows(place.log, place.log.entry(interval.base).head, MEDIAN_ROWS)
    watch = LossWatch(factor, rows)
    trainer.keep_watch(watch)
    return watch
