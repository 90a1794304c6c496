"""Five small flows, one per stage, so that each can run in a container of its own. flows/launch.py starts them.

A room is imported when its flow runs, so an image holds what its stage needs and no more.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prefect import Task, flow, tags
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from flows.answers import write_answer
from flows.prefect_away import Prefect, Told
from flows.showing import Shown
from flows.telling import PrefectLog
from flows.uninterrupted import uninterrupted
from tasks.foundation.accelerator.environment import quiet_tensorflow
from tasks.foundation.accelerator.tpu_environment import announce_tpu
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.call import (
    CheckpointToGcsCall,
    EvaluateCall,
    InitOrRestoreCall,
    PrepareDataCall,
    StageCall,
    TrainSegmentCall,
)
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.segment import SegmentResult
from tasks.foundation.errors import BatonError, InvalidInput
from tasks.foundation.model.code_digest import module_digest
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.opening import open_storage
from tasks.foundation.telemetry.events import Phase, Several, Sink
from tasks.foundation.telemetry.ledger import Ledger
from tasks.foundation.telemetry.logged import warnings_as_notes
from tasks.foundation.user_code import require_function

quiet_tensorflow()
announce_tpu()  # before a room imports TensorFlow

TAGS = ("baton",)

C = TypeVar("C", bound=StageCall)


def stage_name(stage: str) -> str:
    """What Prefect calls a stage: train-segment for train_segment."""
    return stage.replace("_", "-")


def tags_of(run: str, stage: str) -> tuple[str, ...]:
    """Tags of a stage's flow runs."""
    return (*TAGS, f"run:{run}", f"stage:{stage_name(stage)}")


@flow(name="prepare-data")
def prepare_data(call: str) -> Any:
    """Make a run's dataset, unless it is there. Started by train-run, not by hand.

    Args:
        call: what train-run asks for, a PrepareDataCall of tasks/foundation/contracts/call.py in JSON.
    """

    def work(told: PrepareDataCall, place: "_Place") -> Any:
        from tasks.prepare_data.task import prepare_data_task

        place.telemetry.emit(Phase(cause="prepare-data"))
        return place.do(prepare_data_task, told.spec, code_folder=place.code_folder)

    return _answered(PrepareDataCall, call, work)


@flow(name="init-or-restore")
def init_or_restore(call: str) -> Any:
    """Begin a run, or find the checkpoint that it goes on from. Started by train-run, not by hand.

    Args:
        call: what train-run asks for, an InitOrRestoreCall of tasks/foundation/contracts/call.py in JSON.
    """

    def work(told: InitOrRestoreCall, place: "_Place") -> Any:
        from tasks.init_or_restore.task import init_or_restore_task

        place.telemetry.emit(Phase(cause="build"))
        head = RunLog(place.home).head()
        head = place.do_on_devices(
            None if head is None else head.environment,
            init_or_restore_task,
            told.spec,
            told.dataset,
            code_folder=place.code_folder,
            accept=told.accept,
            suspicious=told.suspicious,
        )
        place.ledger.open(place.home, head, within=told.attempt)  # of a fresh run, there was no home before
        return head

    return _answered(InitOrRestoreCall, call, work)


@flow(name="train-segment")
def train_segment(call: str) -> Any:
    """Train one segment. Started by train-run, not by hand.

    Args:
        call: what train-run asks for, a TrainSegmentCall of tasks/foundation/contracts/call.py in JSON.
    """

    def work(told: TrainSegmentCall, place: "_Place") -> Any:
        request = told.request
        if RunLog(place.home).require_head().base != request.base:
            # Executed again after it had committed, or too late: known before an accelerator is touched.
            return SegmentResult.superseded(request)
        from tasks.train_segment.task import train_segment_task

        result = place.do_on_devices(
            told.recorded,
            train_segment_task,
            request,
            code_folder=place.code_folder,
            recorded=told.recorded,
        )
        if result.staged is not None:
            place.ledger.hands_on(result.staged.path)
        return result

    return _answered(TrainSegmentCall, call, work)


@flow(name="checkpoint-to-gcs")
def checkpoint_to_gcs(call: str) -> Any:
    """Verify and commit what a segment staged. Started by train-run, not by hand.

    Args:
        call: what train-run asks for, a CheckpointToGcsCall of tasks/foundation/contracts/call.py in JSON.
    """

    def work(told: CheckpointToGcsCall, place: "_Place") -> Any:
        from tasks.checkpoint_to_gcs.task import checkpoint_to_gcs_task

        return place.do(checkpoint_to_gcs_task, told.request, told.result)

    return _answered(CheckpointToGcsCall, call, work)


@flow(name="evaluate")
def evaluate(call: str) -> Any:
    """Evaluate a committed checkpoint. Started by train-run, not by hand.

    Args:
        call: what train-run asks for, an EvaluateCall of tasks/foundation/contracts/call.py in JSON.
    """

    def work(told: EvaluateCall, place: "_Place") -> Any:
        from tasks.evaluate.task import evaluate_task

        place.telemetry.emit(Phase(cause="evaluate"))
        return place.do_on_devices(
            told.recorded,
            evaluate_task,
            told.spec,
            told.dataset,
            told.checkpoint,
            code_folder=place.code_folder,
            recorded=told.recorded,
        )

    return _answered(EvaluateCall, call, work)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a stage runs, and who is told."""

    spec: RunSpec
    code_folder: Path
    storage: Storage
    home: Storage
    ledger: Ledger
    telemetry: Sink

    def do(self, stage: Task[..., Any], *given: Any, **named: Any) -> Any:
        """Run a stage here; Prefect is told of it, if it can be."""
        return Told(stage, Prefect())(*given, storage=self.storage, telemetry=self.telemetry, **named)

    def do_on_devices(self, as_in: Environment | None, stage: Task[..., Any], /, *given: Any, **named: Any) -> Any:
        """The same with the accelerator; devices that go are `AcceleratorLost`, for which another try helps."""
        from tasks.foundation.accelerator.strategy import acquire, may_be_lost  # not in every image

        with may_be_lost(acquire(self.spec.accelerator, as_in)):
            return self.do(stage, *given, **named)


def _answered(kind: type[C], call: str, work: Callable[[C, _Place], Any]) -> State[Any]:
    """Do the work and leave its answer; an error of Baton's is the name of the state, so that it is the same there."""
    try:
        told = kind.from_json(call.encode(), where="call", error=InvalidInput)
        folder = Path(told.code_folder)
        require_same_code(told, folder)
        storage = open_storage(told.spec.storage, relative_to=folder)
        home = storage.at(told.spec.run)
        with ExitStack() as stack:
            stack.enter_context(tags(*TAGS, f"run:{told.spec.run}"))
            stack.enter_context(uninterrupted())
            ledger = stack.enter_context(Ledger())
            others = Several((PrefectLog(), ledger))
            shown = stack.enter_context(Shown(told.spec, home, parts=("progress",), said=others))
            telemetry = Several((others, shown))
            stack.enter_context(warnings_as_notes(telemetry))
            head = RunLog(home).head()
            if head is not None and told.attempt is not None:
                ledger.open(home, head, within=told.attempt)
            place = _Place(
                spec=told.spec, code_folder=folder, storage=storage, home=home, ledger=ledger, telemetry=telemetry
            )
            answer: Contract = work(told, place)
            ledger.end("complete")
        write_answer(home, str(flow_run.id), answer)
    except BatonError as fault:
        return Failed(name=type(fault).__name__, message=str(fault))
    return Completed(message=_words(answer))


def require_same_code(told: StageCall, folder: Path) -> None:
    """Refuse code that is not what the run was started with: another image would quietly train another model.

    Raises:
        InvalidInput: a function of the run file is not there, or is another.
    """
    for reference, digest in told.code.items():
        require_function(reference, folder)
        if module_digest(reference, folder) != digest:
            raise InvalidInput(
                f"{reference} in {folder} is other code than the flow train-run was started with; mount the same "
                "folder, or build the image anew"
            )


def _words(answer: Contract) -> str:
    """A line about an answer, for Prefect's pages."""
    if not isinstance(answer, SegmentResult):
        return type(answer).__name__
    return answer.exit_reason.replace("_", " ") if answer.staged is None else f"step {answer.staged.step} is staged"
