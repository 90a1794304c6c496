"""The five stages, in the order of a run. A stage is imported when it is loaded."""

from collections.abc import Callable

from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import Entry, Environment, Evaluation, Head, SegmentResult
from baton.tasks.foundation.contracts.stage_calls import (
    CheckpointToGcsCall,
    EvaluateCall,
    InitOrRestoreCall,
    PrepareDataCall,
    TrainSegmentCall,
)
from baton.tasks.foundation.stage import Place, RemoteHooks, Stage
from baton.tasks.remote_hooks import (
    drop_segment_of,
    emit_commit,
    emit_evaluation,
    ready_segment,
    remote_checkpoint_call,
    remote_evaluate_call,
    remote_segment_call,
)


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
        remote_call=remote_segment_call,
        ready_answer=ready_segment,
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
        remote_call=remote_checkpoint_call,
        on_answer=emit_commit,
        drop_input=drop_segment_of,
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
    remote=RemoteHooks(remote_call=remote_evaluate_call, on_answer=emit_evaluation),
)

STAGES = (PREPARE_DATA, INIT_OR_RESTORE, TRAIN_SEGMENT, CHECKPOINT_TO_GCS, EVALUATE)
