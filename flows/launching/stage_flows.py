"""Five small flows, one per stage, so that each can run in its own container. launcher.py starts them.

A room is imported when its flow runs, so an image holds what its stage needs and no more.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from prefect import Task, flow, tags
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from flows.launching.stage_results import find_segment, handed_on, write_answer
from flows.prefect_compat.lease_shield import lease_shield
from flows.prefect_compat.prefect_offline import Prefect, PrefectReported
from flows.prefect_ui.artifact_publisher import ArtifactPublisher
from flows.prefect_ui.run_logger import PrefectRunLogger
from tasks.foundation.accelerator.environment import quiet_tensorflow
from tasks.foundation.accelerator.tpu_environment import announce_tpu
from tasks.foundation.contracts.attempt import utc_time
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.segment import SegmentRequest, SegmentResult
from tasks.foundation.contracts.stage_calls import (
    CheckpointToGcsCall,
    EvaluateCall,
    InitOrRestoreCall,
    PrepareDataCall,
    StageCall,
    TrainSegmentCall,
)
from tasks.foundation.errors import BatonError, FileMissing, InvalidInput, StaleWriter
from tasks.foundation.model.code_digest import module_digest
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.stops.stops import Stops
from tasks.foundation.stops.uninterrupted import run_uninterrupted
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.deadline import LEAVING
from tasks.foundation.storage.opening import open_storage
from tasks.foundation.telemetry.events import Note, Phase, Several, Sink
from tasks.foundation.telemetry.ledger import Ledger
from tasks.foundation.telemetry.log_handler import warnings_as_notes
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
        call: what train-run asks for, a PrepareDataCall of tasks/foundation/contracts/stage_calls.py in JSON.
    """

    def work(told: PrepareDataCall, place: "_Place") -> Contract:
        from tasks.prepare_data.task import prepare_data_task

        place.telemetry.emit(Phase(cause="prepare-data"))
        return place.answers(place.do(prepare_data_task, told.spec, code_folder=place.code_folder))

    return _answered(PrepareDataCall, call, work)


@flow(name="init-or-restore")
def init_or_restore(call: str) -> Any:
    """Begin a run, or find the checkpoint that it goes on from. Started by train-run, not by hand.

    Args:
        call: what train-run asks for, an InitOrRestoreCall of tasks/foundation/contracts/stage_calls.py in JSON.
    """

    def work(told: InitOrRestoreCall, place: "_Place") -> Contract:
        from tasks.init_or_restore.task import init_or_restore_task

        place.telemetry.emit(Phase(cause="build"))
        head = RunLog(place.home).head()
        with place.devices(None if head is None else head.environment):
            head = place.do(
                init_or_restore_task,
                told.spec,
                told.dataset,
                code_folder=place.code_folder,
                accept=told.accept,
                suspicious=told.suspicious,
            )
        place.ledger.open(place.home, head, within=told.attempt)  # of a fresh run, there was no home before
        return place.answers(head)

    return _answered(InitOrRestoreCall, call, work)


@flow(name="train-segment")
def train_segment(call: str) -> Any:
    """Train one segment. Started by train-run, not by hand.

    Args:
        call: what train-run asks for, a TrainSegmentCall of tasks/foundation/contracts/stage_calls.py in JSON.
    """
    return _answered(TrainSegmentCall, call, _train)


@flow(name="checkpoint-to-gcs")
def checkpoint_to_gcs(call: str) -> Any:
    """Verify and commit what a segment staged. Started by train-run, not by hand.

    Args:
        call: what train-run asks for, a CheckpointToGcsCall of tasks/foundation/contracts/stage_calls.py in JSON.
    """

    def work(told: CheckpointToGcsCall, place: "_Place") -> Contract:
        from tasks.checkpoint_to_gcs.task import checkpoint_to_gcs_task

        try:
            result = handed_on(place.home, told.result)
        except FileMissing as fault:
            raise StaleWriter(
                f"{place.home.uri}: {told.result} is gone, so another process has committed what was trained from step "
                f"{told.request.start.step}; run again to continue from the newest commit"
            ) from fault
        return place.answers(place.do(checkpoint_to_gcs_task, told.request, result))

    return _answered(CheckpointToGcsCall, call, work)


@flow(name="evaluate")
def evaluate(call: str) -> Any:
    """Evaluate a committed checkpoint. Started by train-run, not by hand.

    Args:
        call: what train-run asks for, an EvaluateCall of tasks/foundation/contracts/stage_calls.py in JSON.
    """

    def work(told: EvaluateCall, place: "_Place") -> Contract:
        from tasks.evaluate.task import evaluate_task

        place.telemetry.emit(Phase(cause="evaluate"))
        with place.devices(told.recorded):
            done = place.do(
                evaluate_task,
                told.spec,
                told.dataset,
                told.checkpoint,
                code_folder=place.code_folder,
                recorded=told.recorded,
            )
        return place.answers(done)

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
    flow_run: str

    def do(self, stage: Task[..., Any], *given: Any, **named: Any) -> Any:
        """Run a stage here; Prefect is told of it, if it can be."""
        return PrefectReported(stage, Prefect())(*given, storage=self.storage, telemetry=self.telemetry, **named)

    @contextmanager
    def devices(self, as_in: Environment | None) -> Iterator[Environment]:
        """With the accelerator; gives its environment. Devices that go are `AcceleratorLost`: another try helps."""
        from tasks.foundation.accelerator.strategy import acquire, may_be_lost  # not in every image

        accelerator = acquire(self.spec.accelerator, as_in, deterministic=self.spec.train.deterministic)
        with may_be_lost(accelerator):
            yield accelerator.environment

    def answers(self, answer: Contract) -> Contract:
        """Leave the answer."""
        write_answer(self.home, self.flow_run, answer)
        return answer


def _answered(kind: type[C], call: str, work: Callable[[C, _Place], Contract]) -> State[Any]:
    """Do the work, which leaves its answer; an error of Baton's is the state's name, so that it is the same there."""
    try:
        told = kind.from_json(call.encode(), where="call", error=InvalidInput, unknown_keys="forbid")
        folder = Path(told.code_folder)
        require_same_code(told, folder)
        storage = open_storage(told.spec.storage, relative_to=folder)
        home = storage.at(told.spec.run)
        with ExitStack() as stack:
            stack.enter_context(tags(*TAGS, f"run:{told.spec.run}"))
            stack.enter_context(lease_shield())
            ledger = stack.enter_context(Ledger())
            stack.enter_context(LEAVING.of_a_command(told.spec.stop.grace_seconds))
            others = Several((PrefectRunLogger(), ledger))
            shown = stack.enter_context(ArtifactPublisher(told.spec, home, parts=("progress",), said=others))
            telemetry = Several((others, shown))
            stack.enter_context(warnings_as_notes(telemetry))
            head = RunLog(home).head()
            if head is not None and told.attempt is not None:
                ledger.open(home, head, within=told.attempt)
            place = _Place(
                spec=told.spec, code_folder=folder, storage=storage, home=home, ledger=ledger, telemetry=telemetry,
                flow_run=str(flow_run.id),
            )  # fmt: skip
            answer = work(told, place)
            ledger.end("complete")
    except BatonError as fault:
        return Failed(name=type(fault).__name__, message=str(fault))
    return Completed(message=_words(answer))


def _train(told: TrainSegmentCall, place: _Place) -> Contract:
    """A segment, unless it is trained already; its answer is left whoever asks this process to go meanwhile."""
    request = _in_what_is_left_of_its_time(told)
    # Executed again, or too late: known before an accelerator is touched.
    if RunLog(place.home).require_head().base != request.base:
        return place.answers(SegmentResult.superseded(request))
    before = find_segment(place.home, request)
    if before is not None:
        return place.answers(before)
    from tasks.train_segment.task import train_segment_task

    def work(_: Stops) -> Contract:
        result = place.do(train_segment_task, request, code_folder=place.code_folder, recorded=told.recorded)
        if result.staged is not None:
            place.ledger.hands_on(result.staged.path)
        return place.answers(result)

    with place.devices(told.recorded) as environment:
        if environment != told.recorded:
            old, new = told.recorded.model_dump(), environment.model_dump()
            changed = "; ".join(f"{key}: {old[key]} there, {new[key]} here" for key in new if new[key] != old[key])
            text = (
                "this is another environment than the log's, which is that of init-or-restore; have "
                f"stages.init_or_restore run where stages.train_segment does: {changed}"
            )
            place.telemetry.emit(Note(text=text, warning=True))
        # A signal between staging and the answer would lose a segment that is trained already.
        return run_uninterrupted(work, told.spec.stop, telemetry=place.telemetry)


def _in_what_is_left_of_its_time(told: TrainSegmentCall) -> SegmentRequest:
    """The request, whose time budget went on while the flow run waited for a machine."""
    budget = told.request.stop_within_seconds
    if budget is None or told.asked_at is None:
        return told.request
    waited = max((datetime.now(UTC) - utc_time(told.asked_at)).total_seconds(), 0.0)  # another machine's clock
    return told.request.model_copy(update={"stop_within_seconds": max(budget - waited, 0.0)})


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
