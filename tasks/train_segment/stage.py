"""The stage train-segment: trains from a committed checkpoint and stages the next one."""

import uuid
from collections.abc import Sequence
from functools import partial

from baton.tasks.foundation.contracts.log_entry import SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.stage_calls import TrainSegmentCall
from baton.tasks.foundation.errors import BlowUp
from baton.tasks.foundation.log.appends import log_values
from baton.tasks.foundation.machine.devices import acquire
from baton.tasks.foundation.machine.stops import Stops, agreed_stop
from baton.tasks.foundation.machine.threads import run_uninterrupted
from baton.tasks.foundation.model.step import invalid_input_as_step_failed
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.state.warm_state import Recipe
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.train_segment.interval import CommitInterval
from baton.tasks.train_segment.loop import train
from baton.tasks.train_segment.trainer import Trainer, put_back_trainer, take_trainer


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
        partial(_run, call, place),
        request.spec.stop,
        within_seconds=request.stop_within_seconds,
        telemetry=place.telemetry,
    )


def _run(call: TrainSegmentCall, place: Place, stops: Stops) -> SegmentResult:
    request = call.request
    interval = CommitInterval(request, place)
    stops.unsaved_work = False
    interval.work.begin_cause("build")
    accelerator = acquire(request.spec.accelerator, call.recorded, deterministic=request.spec.train.deterministic)
    recipe = Recipe(spec=request.spec, dataset=request.dataset, code_folder=place.code_folder)
    trainer = take_trainer(recipe, storage=place.root, accelerator=accelerator)
    try:
        for prepare in (_restore, partial(_compile, accept=call.accept)):
            stop = agreed_stop(stops, accelerator)
            if stop is not None:
                interval.wait_for_save(accelerator)
                return interval.result(stop)
            prepare(trainer, interval, place)
        stops.unsaved_work = True
        with invalid_input_as_step_failed():
            result = _without_steps(trainer, request, interval, place) or train(
                trainer, request, interval, stops, place
            )
    except BlowUp as found:
        fault = interval.earliest(found, accelerator)
        if request.spec.train.on_blowup == "stop":
            raise fault from (None if fault is found else found)
        result = interval.rewind(fault, accelerator)
    put_back_trainer(trainer)
    if result.staged is None:
        return result
    # Another process may commit it, and says what this one has read.
    return result.model_copy(update={"read": place.log.reads_to_log(place.log.require_head())})


def _restore(trainer: Trainer, interval: CommitInterval, place: Place) -> None:
    interval.work.begin_cause("restore")
    if not trainer.accelerator.all_agree(trainer.warm.holds(interval.start)):
        interval.wait_for_save(trainer.accelerator)  # it is restored from the store
    if trainer.restore(place.home, interval.start):
        place.log.note_read(interval.start.path)
    trainer.seek(interval.start.step + interval.skipped_batches, place.telemetry)


def _compile(trainer: Trainer, interval: CommitInterval, place: Place, *, accept: Sequence[str]) -> None:
    interval.work.begin_cause("compile")
    if trainer.traced is None:
        interval.wait_for_save(trainer.accelerator)
        for text in () if trainer.callbacks is None else trainer.callbacks.notes:
            place.telemetry.emit(Note(text=text))
    trainer.compile(place.log, interval.base, place.telemetry, accept=accept)


def _without_steps(
    trainer: Trainer, request: SegmentRequest, interval: CommitInterval, place: Place
) -> SegmentResult | None:
    """Call the callbacks that are due at the start; None if steps follow, because the callbacks do not end the run."""
    nothing_to_train = request.until_step == interval.start.step
    if nothing_to_train or trainer.needs_evaluation(interval.start):
        interval.wait_for_save(trainer.accelerator)
    interval.work.begin_cause("train")
    ended = trainer.begin(place.log, interval.start)
    logged = trainer.take_logged()
    if ended is None and not nothing_to_train:
        interval.work.log_values(logged)
        return None
    interval.wait_for_save(trainer.accelerator)
    if trainer.accelerator.is_chief:  # no commit follows
        log_values(place.log, interval.start, logged, attempt=uuid.uuid4().hex)
    trainer.end_training()
    return interval.result("finished") if ended is None else interval.finish(ended, trainer.accelerator)
