"""What the trainer does for `--stage`: one stage, called by a flow run (`with_prefect/stage_flows.py`), which waits.

The call comes as JSON. The answer, or the error that ended the stage, goes to the run's home, where the process that
asked for the stage looks for it: neither depends on Prefect. The stage is imported when it runs, so an image needs only
the packages of its stage.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from baton.flows.process_start import fast_imports
from baton.flows.runner import InProcess, Runner
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
from baton.tasks.foundation.machine.hang import HangWatch
from baton.tasks.foundation.machine.threads import run_uninterrupted
from baton.tasks.foundation.model.saved_code import module_digest
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.opening import open_storage
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE
from baton.tasks.foundation.telemetry.events import Ended, Note, Phase, Several, Sink, warnings_as_notes
from baton.tasks.foundation.telemetry.ledger import Ledger
from baton.tasks.foundation.user_functions import require_function
from baton.tasks.stages import CHECKPOINT_TO_GCS, EVALUATE, INIT_OR_RESTORE, PREPARE_DATA, TRAIN_SEGMENT

C = TypeVar("C", bound=StageCall)
A = TypeVar("A", bound=Contract)

_TO_REPORT_SECONDS = 10.0


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


# Stage -> the class of its call from another process.
CALLS: Final[Mapping[str, type[StageCall]]] = {
    PREPARE_DATA.name: PREPARE_DATA.call,
    INIT_OR_RESTORE.name: INIT_OR_RESTORE.call,
    TRAIN_SEGMENT.name: RemoteTrainSegmentCall,
    CHECKPOINT_TO_GCS.name: RemoteCheckpointToGcsCall,
    EVALUATE.name: EVALUATE.call,
}
# Stage -> what runs it and writes its answer. The call is of its class in `CALLS`.
WORK: Final[dict[str, Callable[[Any, StageProcess], Contract]]] = {
    PREPARE_DATA.name: lambda call, process: process.run(PREPARE_DATA, call),
    INIT_OR_RESTORE.name: _init_or_restore,
    TRAIN_SEGMENT.name: train,
    CHECKPOINT_TO_GCS.name: _commit,
    EVALUATE.name: lambda call, process: process.run(EVALUATE, call),
}


def run_stage(name: str, text: str, *, flow_run: str, telemetry: Sink) -> Ended:
    """Run a stage for a flow run. It writes its answer to the run's home.

    Args:
        name: of the stage, such as train_segment.
        text: the call and its context, in JSON.
        flow_run: id of the flow run, the name of the answer.
        telemetry: receives the events.

    Returns:
        A line about the answer; or the report of a `BatonError`, which is written to the home.
    """
    home: Storage | None = None
    try:
        call, context = unpack(CALLS[name], text)
        folder = Path(context.code_folder)
        require_same_code(context.code, folder)
        storage = open_storage(call.spec.storage, relative_to=folder)
        home = storage.at(call.spec.run)
        with ExitStack() as stack:
            ledger = stack.enter_context(Ledger())
            stack.enter_context(PROCESS_DEADLINE.for_command(call.spec.stop.grace_seconds))
            watch = stack.enter_context(HangWatch(call.spec.stop, ledger=ledger, telemetry=telemetry))
            sinks = Several((telemetry, ledger, watch))
            stack.enter_context(warnings_as_notes(sinks))
            place = Place.of(storage, call.spec.run, code_folder=folder, telemetry=sinks)
            head = place.log.head()
            if head is not None and context.attempt is not None:
                ledger.open(home, head, within=context.attempt)
            process = StageProcess(
                spec=call.spec, context=context, place=replace(place, profiler=ledger.profiler), runner=InProcess(),
                ledger=ledger, watch=watch, flow_run=flow_run,
            )  # fmt: skip
            answer = WORK[name](call, process)
            ledger.end("complete")
    except BatonError as fault:
        report = ErrorReport.of(fault)
        if home is not None and (why := _report(home, flow_run, report)):
            hint = f"{report.message}\nhint: the error could not be written to the run's home: {why}"
            report = report.model_copy(update={"message": hint})
        return Ended(exit_code=fault.exit_code, error=report)
    return Ended(exit_code=0, result=_summary(answer))


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


def _report(home: Storage, flow_run: str, report: ErrorReport) -> str:
    """Write an error for the waiting process; why that failed, or nothing."""
    try:
        write_error(home.with_deadline(_TO_REPORT_SECONDS), flow_run, report)
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
