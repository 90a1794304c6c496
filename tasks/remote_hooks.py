"""What is special about some stages when they run in another process."""

from datetime import UTC, datetime

from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Evaluation, SegmentResult
from baton.tasks.foundation.contracts.stage_calls import (
    CheckpointToGcsCall,
    EvaluateCall,
    RemoteCheckpointToGcsCall,
    RemoteTrainSegmentCall,
    TrainSegmentCall,
)
from baton.tasks.foundation.log.stage_results import drop_segment, find_segment, hand_on
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.telemetry.events import Committed, Evaluated, Note


def remote_segment_call(call: TrainSegmentCall, _place: Place) -> RemoteTrainSegmentCall:
    """The call with the time of day, so that the time in a queue counts for the segment's time budget."""
    asked_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return RemoteTrainSegmentCall(
        spec=call.spec, request=call.request, recorded=call.recorded, accept=call.accept, asked_at=asked_at
    )


def ready_segment(call: TrainSegmentCall, place: Place) -> SegmentResult | None:
    """The result of a segment that needs no training.

    Superseded if another process has moved the tip; the staged checkpoint if an earlier attempt trained the segment but
    stopped before the commit.
    """
    request = call.request
    if place.log.require_head().base != request.base:
        return SegmentResult.superseded(request)
    found = find_segment(place.home, request)
    if found is not None and found.staged is not None:
        text = f"step {found.staged.step} was staged by an earlier attempt; committing it without training it again"
        place.telemetry.emit(Note(text=text))
    return found


def remote_checkpoint_call(call: CheckpointToGcsCall, place: Place) -> RemoteCheckpointToGcsCall:
    """The call with the path of the result, which is written to the home."""
    return RemoteCheckpointToGcsCall(spec=call.spec, request=call.request, result=hand_on(place.home, call.result))


def drop_segment_of(call: CheckpointToGcsCall, place: Place) -> None:
    """Delete the segment's result from the home: it is committed, or can never be."""
    drop_segment(place.home, call.result)


def emit_commit(entry: Entry, place: Place) -> None:
    """Report the commit in this process too; the stage reported it in another one."""
    if isinstance(entry.body, Commit):
        place.telemetry.emit(Committed.of(entry.body))


def remote_evaluate_call(call: EvaluateCall, _place: Place) -> EvaluateCall:
    """The call with the devices of `stages.evaluate.accelerator`, if the run file names some."""
    devices = call.spec.stages.evaluate.accelerator
    if devices is None:
        return call
    return call.model_copy(update={"spec": call.spec.model_copy(update={"accelerator": devices})})


def emit_evaluation(done: Evaluation, place: Place) -> None:
    """Report the evaluation in this process too; the stage reported it in another one."""
    place.telemetry.emit(Evaluated(step=done.checkpoint.step, metrics=done.metrics, examples=done.examples, on=done.on))
