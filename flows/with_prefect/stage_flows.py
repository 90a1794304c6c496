"""Five flows, one for each stage, so that each can run in its own container. remote_stage.py starts them.

A flow runs its stage in a trainer process (`flows/stage_process.py`) and shows in Prefect what that says. So the
stage's process imports no Prefect, this one imports no stage, and a stage that crashes or is killed leaves a flow run
that says so.
"""

from pathlib import Path

from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Crashed

from baton.flows.opened_run import OpenedRun
from baton.flows.process import mask_library_output
from baton.flows.stage_process import CALLS
from baton.flows.with_prefect.record import PrefectRunLogger, failed, state_of, supervise, tags_of
from baton.flows.with_prefect.task_runs import logger_of_stage
from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.stage_calls import ErrorReport, unpack
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.stage import label_of
from baton.tasks.foundation.storage.local_files import temporary_folder

mask_library_output()


@flow(name="prepare-data")
def prepare_data(call: str) -> State[Contract]:
    """Make a run's dataset, unless it exists. Started by train-run, not by hand.

    Args:
        call: PrepareDataCall of tasks/foundation/contracts/stage_calls.py with its RemoteContext, in JSON.
    """
    return supervised("prepare_data", call)


@flow(name="init-or-restore")
def init_or_restore(call: str) -> State[Contract]:
    """Begin a run, or find the checkpoint that it continues from. Started by train-run, not by hand.

    Args:
        call: InitOrRestoreCall of tasks/foundation/contracts/stage_calls.py with its RemoteContext, in JSON.
    """
    return supervised("init_or_restore", call)


@flow(name="train-segment")
def train_segment(call: str) -> State[Contract]:
    """Train one segment. Started by train-run, not by hand.

    Args:
        call: RemoteTrainSegmentCall of tasks/foundation/contracts/stage_calls.py with its RemoteContext, in JSON.
    """
    return supervised("train_segment", call)


@flow(name="checkpoint-to-gcs")
def checkpoint_to_gcs(call: str) -> State[Contract]:
    """Verify and commit a segment's staged checkpoint. Started by train-run, not by hand.

    Args:
        call: RemoteCheckpointToGcsCall of tasks/foundation/contracts/stage_calls.py with its RemoteContext, in JSON.
    """
    return supervised("checkpoint_to_gcs", call)


@flow(name="evaluate")
def evaluate(call: str) -> State[Contract]:
    """Evaluate a committed checkpoint. Started by train-run, not by hand.

    Args:
        call: EvaluateCall of tasks/foundation/contracts/stage_calls.py with its RemoteContext, in JSON.
    """
    return supervised("evaluate", call)


def supervised(stage: str, text: str) -> State[Contract]:
    """Run a stage in a trainer, as the current flow run.

    Args:
        stage: its name, such as train_segment.
        text: the call and its context, in JSON.

    Returns:
        The last state: Completed; Failed with the name of a `BatonError`, by which the waiting process knows it; or
        Crashed if the trainer did not come to its end.

    Raises:
        BaseException: what a signal's handler raised, once the trainer has ended.
    """
    try:
        call, context = unpack(CALLS[stage], text)
        run = OpenedRun.of(call.spec, Path(context.code_folder))
    except BatonError as fault:
        return _failed(ErrorReport.of(fault))
    logger = PrefectRunLogger(logger_of_stage)
    with tags(*tags_of(run.spec)), temporary_folder("baton-call-") as folder:
        file = folder / "call.json"  # too long for an argument
        file.write_text(text, encoding="utf-8")
        words = ["--stage", stage, "--call", str(file), "--flow-run", str(flow_run.id)]
        outcome = supervise(words, run, logger=logger, only_progress=True)
    what = f"{label_of(stage)} of {run.spec.run}"
    if outcome.ended is not None and outcome.ended.stopped:  # by a signal that only the trainer received
        return Crashed(message=str(outcome.error(what)))
    ended = outcome.end(what)
    if ended.result:
        return Completed(message=ended.result)
    if ended.error is not None and ended.error.is_expected:
        return _failed(ended.error)
    return state_of(ended, run.spec)


def _failed(report: ErrorReport) -> State[Contract]:
    """The last state of a flow run with an error that the waiting process is to raise, by its name and its message."""
    return failed(report.to_error()).model_copy(update={"name": report.error, "message": report.message})
