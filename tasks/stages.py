"""The five stages, in the order of a run, and what is special about some of them when they run in another process.

A stage is imported when it is loaded.
"""

from collections.abc import Callable
from datetime import UTC, datetime

from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Environment, Evaluation, Head, SegmentResult
from baton.tasks.foundation.contracts.stage_calls import (
    CheckpointToGcsCall,
    EvaluateCall,
    InitOrRestoreCall,
    PrepareDataCall,
    RemoteCheckpointToGcsCall,
    RemoteTrainSegmentCall,
    TrainSegmentCall,
)
from baton.tasks.foundation.log.stage_results import drop_segment, find_segment, hand_on
from baton.tasks.foundation.stage import Place, RemoteHooks, Stage
from baton.tasks.foundation.telemetry.events import Committed, Evaluated, Note


def _load_prepare_data() -> Callable[[PrepareDataCall, Place], DatasetRef]:
    from baton.tasks.prepare_data.stage import prepare_data

    return prepare_data


def _load_init_or_restore() -> Callable[[InitOrRestoreCall, Place], Head]:
    from baton.tasks.init_or_restore.stage import init_or_restore

    return init_or_restore


def _load_train_segment() -> Callable[[TrainSegmentCall, Place], SegmentResult]:
    from baton.tasks.train_segment.stage import train_segment

    return train_segment


def _load_checkpoint_to_gcs() -> Callable[[CheckpointToGcsCall, Place], Entry]:
    from baton.tasks.checkpoint_to_gcs.stage import checkpoint_to_gcs

    return checkpoint_to_gcs


def _load_evaluate() -> Callable[[EvaluateCall, Place], Evaluation]:
    from baton.tasks.evaluate.stage import evaluate

    return evaluate


def _environment_of_head(_call: InitOrRestoreCall, place: Place) -> Environment | None:
    head = place.log.head()
    return None if head is None else head.environment


def _remote_segment_call(call: TrainSegmentCall, _place: Place) -> RemoteTrainSegmentCall:
    """The call with the time of day, so that the time in a queue counts for the segment's time budget."""
    asked_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return RemoteTrainSegmentCall(
        spec=call.spec, request=call.request, recorded=call.recorded, accept=call.accept, asked_at=asked_at
    )


def _ready_segment(call: TrainSegmentCall, place: Place) -> SegmentResult | None:
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


def _remote_checkpoint_call(call: CheckpointToGcsCall, place: Place) -> RemoteCheckpointToGcsCall:
    """The call with the path of the result, which is written to the home."""
    return RemoteCheckpointToGcsCall(spec=call.spec, request=call.request, result=hand_on(place.home, call.result))


def _drop_segment_of(call: CheckpointToGcsCall, place: Place) -> None:
    """Delete the segment's result from the home: it is committed, or can never be."""
    drop_segment(place.home, call.result)


def _emit_commit(entry: Entry, place: Place) -> None:
    """Report the commit in this process too; the stage reported it in another one."""
    if isinstance(entry.body, Commit):
        place.telemetry.emit(Committed.of(entry.body))


def _remote_evaluate_call(call: EvaluateCall, _place: Place) -> EvaluateCall:
    """The call with the devices of `stages.evaluate.accelerator`, if the run file names some."""
    devices = call.spec.stages.evaluate.accelerator
    if devices is None:
        return call
    return call.model_copy(update={"spec": call.spec.model_copy(update={"accelerator": devices})})


def _emit_evaluation(done: Evaluation, place: Place) -> None:
    """Report the evaluation in this process too; the stage reported it in another one."""
    place.telemetry.emit(Evaluated(step=done.checkpoint.step, metrics=done.metrics, examples=done.examples, on=done.on))


PREPARE_DATA = Stage(
    name="prepare_data",
    call=PrepareDataCall,
    answer=DatasetRef,
    load=_load_prepare_data,
    subject=lambda call: call.spec.data.source_words,
    phase="prepare-data",
)
INIT_OR_RESTORE = Stage(
    name="init_or_restore",
    call=InitOrRestoreCall,
    answer=Head,
    load=_load_init_or_restore,
    subject=lambda call: call.spec.run,
    phase="build",
    environment=_environment_of_head,
)
TRAIN_SEGMENT = Stage(
    name="train_segment",
    call=TrainSegmentCall,
    answer=SegmentResult,
    load=_load_train_segment,
    aim=lambda call: f"to step {call.request.until_step}",
    subject=lambda call: f"to step {call.request.until_step}",
    environment=lambda call, _place: call.recorded,
    remote=RemoteHooks(
        remote_call=_remote_segment_call,
        ready_answer=_ready_segment,
        starts_command=lambda call: call.request.number == 1,
    ),
)


def _staged(call: CheckpointToGcsCall) -> str:
    return "" if call.result.staged is None else f"step {call.result.staged.step}"


CHECKPOINT_TO_GCS = Stage(
    name="checkpoint_to_gcs",
    call=CheckpointToGcsCall,
    answer=Entry,
    load=_load_checkpoint_to_gcs,
    aim=_staged,
    subject=_staged,
    # Cancelling it would lose a trained segment.
    remote=RemoteHooks(
        remote_call=_remote_checkpoint_call,
        on_answer=_emit_commit,
        drop_input=_drop_segment_of,
        cancellable=False,
        needs_code=False,
    ),
)


def _evaluated(call: EvaluateCall) -> str:
    """What a call evaluates; the validation set needs no word."""
    step = f"step {call.checkpoint.step}"
    return step if call.on == "validation" else f"{step} on the {call.on} set"


EVALUATE = Stage(
    name="evaluate",
    call=EvaluateCall,
    answer=Evaluation,
    load=_load_evaluate,
    aim=_evaluated,
    subject=_evaluated,
    phase="evaluate",
    environment=lambda call, _place: call.recorded,
    remote=RemoteHooks(remote_call=_remote_evaluate_call, on_answer=_emit_evaluation),
)

STAGES = (PREPARE_DATA, INIT_OR_RESTORE, TRAIN_SEGMENT, CHECKPOINT_TO_GCS, EVALUATE)
