"""A fake of what Prefect's API answers, which plays flow runs state by state, and a launcher that asks it."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton.flows.remote_stage import FlowRuns, FlowRunState, Launcher, RemoteStages
from baton.flows.runner import InProcess
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import Entry, MetricRow, SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.stage_calls import (
    CheckpointToGcsCall,
    EvaluateCall,
    InitOrRestoreCall,
    PrepareDataCall,
    RemoteCheckpointToGcsCall,
    RemoteTrainSegmentCall,
    StageCall,
    TrainSegmentCall,
    unpack,
)
from baton.tasks.foundation.log.stage_results import write_answer
from baton.tasks.foundation.stage import Place
from baton.tasks.stages import CHECKPOINT_TO_GCS, PREPARE_DATA, TRAIN_SEGMENT
from tests.support.event_recorder import EventRecorder
from tests.support.fake_run import FakeRun

DATASET = DatasetRef(
    folder="datasets/0123456789ab",
    content_digest="c" * 64,
    train_examples=10,
    validation_examples=10,
    already_prepared=True,
)
MOST_THAT_PREFECT_TAKES = 1 << 19
Play = Callable[["Api", str, StageCall], list[FlowRunState | None]]


def state(name: str, message: str | None = None, *, kind: str = "", at: datetime | None = None) -> FlowRunState:
    """A state as Prefect calls it, of the type that has its name unless another one is given."""
    timestamp = (at or datetime.now(UTC)).isoformat()
    return FlowRunState(type=kind or name.upper(), name=name, message=message, timestamp=timestamp)


SCHEDULED, PENDING, RUNNING, CANCELLING = map(state, ("Scheduled", "Pending", "Running", "Cancelling"))
COMPLETED, FAILED, CRASHED, CANCELLED = map(state, ("Completed", "Failed", "Crashed", "Cancelled"))


def failed(name: str = "Failed", message: str | None = None) -> FlowRunState:
    return state(name, message, kind="FAILED")


class Api:
    """Answers as `with_prefect/flow_runs.py`; each flow run that is started takes the next play, its states in turn."""

    def __init__(self, run: FakeRun, *plays: Play) -> None:
        self.run = run
        self.plays = list(plays)
        self.states: dict[str, list[FlowRunState | None]] = {}
        self.started: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.left: dict[str, Mapping[str, Any]] = {}
        self.after_cancel: list[FlowRunState | None] = [CANCELLED]

    def __call__(self, request: str, arguments: Mapping[str, Any]) -> object:
        """Answer; questions and answers are JSON, as between processes."""
        return json.loads(json.dumps(getattr(self, request)(**json.loads(json.dumps(arguments)))))

    def start(self, *, deployment: str, parameters: dict[str, Any], **facts: Any) -> str:
        text = json.dumps(parameters, allow_nan=False)  # as Prefect's client will
        assert len(text) < MOST_THAT_PREFECT_TAKES
        found = str(uuid.uuid4())
        self.started.append({"deployment": deployment, "id": found, "call": json.loads(parameters["call"]), **facts})
        keys = self.started[-1]["call"]
        kinds: dict[str, type[StageCall]] = {
            "result": RemoteCheckpointToGcsCall, "request": RemoteTrainSegmentCall, "checkpoint": EvaluateCall,
            "dataset": InitOrRestoreCall,
        }  # fmt: skip
        kind = next((kind for key, kind in kinds.items() if key in keys), PrepareDataCall)
        call, _ = unpack(kind, parameters["call"])
        self.states[found] = self.plays.pop(0)(self, found, call)
        return found

    def require_deployment(self, *, name: str, of: str) -> None:
        """Every deployment is there."""

    def state(self, *, flow_run: str) -> dict[str, Any] | None:
        states = self.states[flow_run]
        found = states.pop(0) if len(states) > 1 else states[0]
        return None if found is None else asdict(found)

    def cancel(self, *, flow_run: str) -> None:
        self.cancelled.append(flow_run)
        self.states[flow_run] = list(self.after_cancel)

    def unfinished(self, *, tags: Sequence[str]) -> list[dict[str, Any]]:
        assert "run:digits" in tags
        return [{"id": each, "parameters": parameters, "state": None} for each, parameters in self.left.items()]


def answers(answer: Any, *states: FlowRunState | None) -> Play:
    def play(api: Api, flow_run: str, _call: StageCall) -> list[FlowRunState | None]:
        write_answer(api.run.home, flow_run, answer)
        return list(states) or [SCHEDULED, PENDING, RUNNING, COMPLETED]

    return play


def ends(*states: FlowRunState | None) -> Play:
    return lambda *_: list(states)


def run_with_code(folder: Path) -> FakeRun:
    (folder / "model.py").write_text("def build_model():\n    pass\n")
    return FakeRun(folder).train(100)


class LauncherHarness:
    """A launcher on a fake of Prefect's API."""

    def __init__(
        self, run: FakeRun, *plays: Play, stop: Mapping[str, Any] | None = None, attempt: str | None = "a" * 32
    ) -> None:
        names = ("prepare_data", "train_segment", "checkpoint_to_gcs")
        settings = [f"stages.{name}={name.replace('_', '-')}/docker" for name in names]
        self.file = load_run_file(
            run.run_file(), [*settings, *(f"stop.{key}={value}" for key, value in (stop or {}).items())]
        )
        self.run, self.api, self.recorder = run, Api(run, *plays), EventRecorder()
        self.slept = 0.0
        flow_runs = FlowRuns(ask=self.api, telemetry=self.recorder, clock=self.clock, sleep=self.sleep)
        self.launcher = Launcher(local=InProcess(), stages=RemoteStages(flow_runs=flow_runs, attempt=attempt))

    def until(self, seconds: float) -> None:
        """Have a time budget."""
        stages = self.launcher.stages
        self.launcher = replace(self.launcher, stages=replace(stages, until=self.clock() + seconds))

    @property
    def place(self) -> Place:
        return Place.of(self.run.root, self.file.spec.run, code_folder=self.file.folder, telemetry=self.recorder)

    def clock(self) -> float:
        return time.monotonic() + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        time.sleep(0.001)  # lets a signal's handler note it

    def prepare(self) -> DatasetRef:
        return self.launcher.run(PREPARE_DATA, PrepareDataCall(spec=self.file.spec), self.place)

    @property
    def request(self) -> SegmentRequest:
        head = self.run.head
        return SegmentRequest(
            spec=self.file.spec, dataset=DATASET, start=self.run.tip, base=head.base, skipped_batches=0, until_step=200,
            number=1,
        )  # fmt: skip

    @property
    def segment_call(self) -> TrainSegmentCall:
        return TrainSegmentCall.of(self.request, self.run.head.environment)

    def train(self) -> SegmentResult:
        return self.launcher.run(TRAIN_SEGMENT, self.segment_call, self.place)

    def commit(self, result: SegmentResult) -> Entry:
        return self.launcher.run(CHECKPOINT_TO_GCS, CheckpointToGcsCall.of(self.request, result), self.place)

    def sent(self, call: TrainSegmentCall | None = None) -> str:
        """A segment's call as JSON, as it is sent."""
        return self.launcher.stages.remote_call(TRAIN_SEGMENT, call or self.segment_call, self.place).text


def on_the_tip(harness: LauncherHarness) -> SegmentResult:
    """What a segment stages that starts from the tip as it is now."""
    result = staged(harness.run)
    assert result.staged is not None
    return result.model_copy(update={"staged": result.staged.model_copy(update={"base": harness.request.base})})


def staged(run: FakeRun, loss: float = 0.5) -> SegmentResult:
    return SegmentResult(
        staged=run.tip, parent=run.tip.path, exit_reason="segment_end", examples=0, seconds={},
        history=(MetricRow(step=150, metrics={"loss": loss}),),
    )  # fmt: skip
