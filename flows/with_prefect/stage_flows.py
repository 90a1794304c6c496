"""Five flows, one for each stage, so that each can run in its own container. remote_stage.py starts them.

A stage is imported when its flow runs, so an image needs only the packages of its stage.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed

from baton.flows.opened_run import OpenedRun
from baton.flows.process import keep_main_module_from_children, mask_library_output
from baton.flows.process_start import fast_imports
from baton.flows.runner import InProcess, Runner
from baton.flows.with_prefect.artifacts import ArtifactPublisher
from baton.flows.with_prefect.internals import worker_shield
from baton.flows.with_prefect.record import PrefectRunLogger, failed
from baton.flows.with_prefect.task_runs import PrefectTasks, logger_of_stage
from baton.tasks.foundation.checkpoint.save import AsyncSaves
from baton.tasks.foundation.checkpoint.verify import PREFETCHED_CHECKPOINT
from baton.tasks.foundation.contracts.attempt import utc_time
from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.log_entry import Entry, Environment, Head, SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import (
    CheckpointToGcsCall,
    ErrorReport,
    InitOrRestoreCall,
    RemoteCheckpointToGcsCall,
    RemoteContext,
    RemoteTrainSegmentCall,
    StageCall,
    TrainSegmentCall,
    unpack,
)
from baton.tasks.foundation.errors import BatonError, FileMissing, InvalidInput, StaleWriter, StorageError
from baton.tasks.foundation.log.stage_results import handed_on, write_answer, write_error
from baton.tasks.foundation.machine.environment import quiet_tensorflow
from baton.tasks.foundation.machine.hang import HangWatch
from baton.tasks.foundation.machine.threads import run_uninterrupted
from baton.tasks.foundation.machine.tpu import announce_tpu
from baton.tasks.foundation.model.saved_code import module_digest
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.opening import open_storage
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE
from baton.tasks.foundation.telemetry.events import Note, Phase, Several, warnings_as_notes
from baton.tasks.foundation.telemetry.ledger import Ledger
from baton.tasks.foundation.user_functions import require_function
from baton.tasks.stages import CHECKPOINT_TO_GCS, EVALUATE, INIT_OR_RESTORE, PREPARE_DATA, TRAIN_SEGMENT

quiet_tensorflow()
mask_library_output()
announce_tpu()  # before a stage imports TensorFlow

C = TypeVar("C", bound=StageCall)
A = TypeVar("A", bound=Contract)

_TO_REPORT_SECONDS = 10.0


@flow(name="prepare-data")
def prepare_data(call: str) -> State[Contract]:
    """Make a run's dataset, unless it exists. Started by train-run, not by hand.

    Args:
        call: PrepareDataCall of tasks/foundation/contracts/stage_calls.py with its RemoteContext, in JSON.
    """
    return answered(PREPARE_DATA.call, call, lambda given, process: process.run(PREPARE_DATA, given))


@flow(name="init-or-restore")
def init_or_restore(call: str) -> State[Contract]:
    """Begin a run, or find the checkpoint that it continues from. Started by train-run, not by hand.

    Args:
        call: InitOrRestoreCall of tasks/foundation/contracts/stage_calls.py with its RemoteContext, in JSON.
    """
    return answered(INIT_OR_RESTORE.call, call, _init_or_restore)


@flow(name="train-segment")
def train_segment(call: str) -> State[Contract]:
    """Train one segment. Started by train-run, not by hand.

    Args:
        call: RemoteTrainSegmentCall of tasks/foundation/contracts/stage_calls.py with its RemoteContext, in JSON.
    """
    return answered(RemoteTrainSegmentCall, call, train)


@flow(name="checkpoint-to-gcs")
def checkpoint_to_gcs(call: str) -> State[Contract]:
    """Verify and commit a segment's staged checkpoint. Started by train-run, not by hand.

    Args:
        call: RemoteCheckpointToGcsCall of tasks/foundation/contracts/stage_calls.py with its RemoteContext, in JSON.
    """
    return answered(RemoteCheckpointToGcsCall, call, _commit)


@flow(name="evaluate")
def evaluate(call: str) -> State[Contract]:
    """Evaluate a committed checkpoint. Started by train-run, not by hand.

    Args:
        call: EvaluateCall of tasks/foundation/contracts/stage_calls.py with its RemoteContext, in JSON.
    """
    return answered(EVALUATE.call, call, lambda given, process: process.run(EVALUATE, given))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProcess:
    """The process of one remote stage.

    Attributes:
        spec: the run file.
        context: what came with the call.
        place: where the stage runs.
        runner: runs it.
        ledger: accounts for its seconds.
        watch: ends the process if it hangs.
        flow_run: id of its flow run, the name of its answer.
    """

    spec: RunSpec
    context: RemoteContext
    place: Place
    runner: Runner
    ledger: Ledger
    watch: HangWatch
    flow_run: str

    def run(self, stage: Stage[C, A], call: C) -> A:
        """Run the stage on its devices, and write its answer."""
        with self.devices(stage, call):
            answer = self.run_here(stage, call)
        return self.write(answer)

    def run_here(self, stage: Stage[C, A], call: C) -> A:
        """Run the stage; the caller sets up its devices and writes its answer."""
        if stage.phase is not None:
            self.place.telemetry.emit(Phase(cause=stage.phase))
        return self.runner.run(stage, call, self.place)

    @contextmanager
    def devices(self, stage: Stage[C, A], call: C) -> Iterator[Environment | None]:
        """Set up the stage's devices, and give their environment; None if it needs none.

        Raises:
            AcceleratorLost: devices were lost; another try helps.
        """
        if stage.environment is None:
            yield None
            return
        with fast_imports():
            from baton.tasks.foundation.machine.devices import acquire, may_be_lost  # not in every image

            stage.load()
        recorded = stage.environment(call, self.place)
        accelerator = acquire(self.spec.accelerator, recorded, deterministic=self.spec.train.deterministic)
        with may_be_lost(accelerator):
            yield accelerator.environment

    def write(self, answer: A) -> A:
        """Write the answer to the run's home."""
        write_answer(self.place.home, self.flow_run, answer)
        return answer


def _init_or_restore(call: InitOrRestoreCall, process: StageProcess) -> Head:
    with process.devices(INIT_OR_RESTORE, call):
        head = process.run_here(INIT_OR_RESTORE, call)
    process.ledger.open(process.place.home, head, within=process.context.attempt)  # a new run had no home before
    return process.write(head)


def train(call: RemoteTrainSegmentCall, process: StageProcess) -> SegmentResult:
    """Train a segment, unless it is trained already. Its answer is written even if this process is asked to stop."""
    segment = TrainSegmentCall.of(request_with_time_left(call), call.recorded, call.accept)
    # The flow run may have started a second time, or too late. This is known before an accelerator is used.
    ready = TRAIN_SEGMENT.remote.ready_answer(segment, process.place)
    if ready is not None:
        return process.write(ready)
    PREFETCHED_CHECKPOINT.begin(process.place.home, segment.request.start)

    def work() -> SegmentResult:
        # The answer names a staged checkpoint, so only commits within the segment run beside the training.
        with AsyncSaves(across_segments=False) as saves:
            process.watch.follow_saves(lambda: saves.busy, saves.seconds_of_save)
            place = replace(process.place, saves=saves)
            result = replace(process, place=place).run_here(TRAIN_SEGMENT, segment)
        if result.staged is not None:
            process.ledger.staged(result.staged.path)
        return process.write(result)

    telemetry = process.place.telemetry
    with process.devices(TRAIN_SEGMENT, segment) as environment:
        here = call.recorded if environment is None else environment.in_run_of(call.recorded)
        if here != call.recorded:
            telemetry.emit(Note(text=_environment_warning(call.recorded, here), warning=True))
        # A signal between staging and the answer would lose a segment that is trained already.
        return run_uninterrupted(lambda _: work(), call.spec.stop, telemetry=telemetry)


def _commit(call: RemoteCheckpointToGcsCall, process: StageProcess) -> Entry:
    try:
        result = handed_on(process.place.home, call.result)
    except FileMissing as fault:
        raise StaleWriter(
            f"{process.place.home.uri}: {call.result} is gone, so another process has committed what was trained from "
            f"step {call.request.start.step}; run again to continue from the newest commit"
        ) from fault
    return process.run(CHECKPOINT_TO_GCS, CheckpointToGcsCall(spec=call.spec, request=call.request, result=result))


def request_with_time_left(call: RemoteTrainSegmentCall) -> SegmentRequest:
    """The request; its time budget has run since it was made, also while the flow run waited for a machine."""
    budget = call.request.stop_within_seconds
    if budget is None or call.asked_at is None:
        return call.request
    waited = max((datetime.now(UTC) - utc_time(call.asked_at)).total_seconds(), 0.0)  # another machine's clock
    return call.request.model_copy(update={"stop_within_seconds": max(budget - waited, 0.0)})


def answered(kind: type[C], text: str, work: Callable[[C, StageProcess], Contract]) -> State[Contract]:
    """Run the work of a stage's flow, which writes its answer.

    Args:
        kind: class of the call.
        text: the call and its context, in JSON.

    Returns:
        Completed, or Failed with the name of a `BatonError`, whose report is written to the home.
    """
    keep_main_module_from_children(only_of="prefect")
    home: Storage | None = None
    try:
        call, context = unpack(kind, text)
        folder = Path(context.code_folder)
        require_same_code(context.code, folder)
        storage = open_storage(call.spec.storage, relative_to=folder)
        home = storage.at(call.spec.run)
        with ExitStack() as stack:
            stack.enter_context(tags("baton", f"run:{call.spec.run}"))
            stack.enter_context(worker_shield())
            ledger = stack.enter_context(Ledger())
            stack.enter_context(PROCESS_DEADLINE.for_command(call.spec.stop.grace_seconds))
            logger = PrefectRunLogger(logger_of_stage)
            watch = stack.enter_context(HangWatch(call.spec.stop, ledger=ledger, telemetry=logger))
            others = Several((logger, ledger, watch))
            run = OpenedRun.of(call.spec, folder, root=storage)
            home, log = run.home, run.log
            publisher = stack.enter_context(ArtifactPublisher(run, only_progress=True, notes=others))
            tasks = stack.enter_context(PrefectTasks(others))
            telemetry = Several((tasks, others, publisher))
            stack.enter_context(warnings_as_notes(telemetry))
            place = Place(
                root=storage, home=home, log=log, code_folder=folder, telemetry=telemetry, profiler=ledger.profiler
            )
            head = log.head()
            if head is not None and context.attempt is not None:
                ledger.open(home, head, within=context.attempt)
            process = StageProcess(
                spec=call.spec, context=context, place=place, runner=InProcess(), ledger=ledger,
                watch=watch, flow_run=str(flow_run.id),
            )  # fmt: skip
            answer = work(call, process)
            ledger.end("complete")
    except BatonError as fault:
        message = str(fault)
        if home is not None and (why := _report(home, str(flow_run.id), fault)):
            message = f"{message}\nhint: the error could not be written to the run's home: {why}"
        # The waiting process reads the name and the message.
        return failed(fault).model_copy(update={"name": type(fault).__name__, "message": message})
    return Completed(message=_summary(answer))


def require_same_code(digests: Mapping[str, str], folder: Path) -> None:
    """Refuse code that differs from the code the run was started with; another image would train another model.

    Args:
        digests: as `code_digests` returns them.

    Raises:
        InvalidInput: a function of the run file is missing, or differs.
    """
    for reference, digest in digests.items():
        require_function(reference, folder)
        if module_digest(reference, folder) != digest:
            raise InvalidInput(
                f"{reference} in {folder} differs from the code that the flow train-run was started with; mount the "
                "same folder, or rebuild the image"
            )


def _report(home: Storage, flow_run: str, fault: BatonError) -> str:
    """Write an error for the waiting process; why that failed, or nothing."""
    try:
        write_error(home.with_deadline(_TO_REPORT_SECONDS), flow_run, ErrorReport.of(fault))
    except StorageError as away:
        return str(away).partition("\n")[0]
    return ""


def _environment_warning(recorded: Environment, here: Environment) -> str:
    changed = "; ".join(f"{key}: {there} there, {own} here" for key, (there, own) in recorded.changes_to(here).items())
    return (
        "this environment differs from the one in the log, which is that of init-or-restore; run "
        f"stages.init_or_restore where stages.train_segment runs: {changed}"
    )


def _summary(answer: Contract) -> str:
    """One line about an answer, for Prefect's pages."""
    if not isinstance(answer, SegmentResult):
        return type(answer).__name__
    return answer.exit_reason.replace("_", " ") if answer.staged is None else f"step {answer.staged.step} is staged"
