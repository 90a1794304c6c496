"""Prefect's API, played state by state, and a launcher that asks it."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Pending, Running, Scheduled

from flows.launching.launcher import Launcher, forgetting
from flows.launching.remote_stage import Elsewhere
from flows.launching.stage_results import write_answer
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.log_entry import Entry
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.segment import MetricRow, SegmentRequest, SegmentResult
from tasks.foundation.contracts.stage_calls import (
    CheckpointToGcsCall,
    EvaluateCall,
    PrepareDataCall,
    StageCall,
    TrainSegmentCall,
)
from tasks.foundation.errors import (
    InvalidInput,
)
from tasks.foundation.telemetry.events import Event, Note
from tests.support.fake_run import FakeRun

DATASET = DatasetRef(
    folder="datasets/0123456789ab",
    content_digest="c" * 64,
    train_examples=10,
    validation_examples=10,
    already_prepared=True,
)
MOST_THAT_PREFECT_TAKES = 1 << 19
Play = Callable[["Api", UUID, StageCall], list[State | None]]


class Api:
    """Prefect's API, played: each flow run that is started takes the next play, which gives its states in turn."""

    def __init__(self, run: FakeRun, *plays: Play) -> None:
        self.run = run
        self.plays = list(plays)
        self.states: dict[UUID, list[State | None]] = {}
        self.started: list[dict[str, Any]] = []
        self.cancelled: list[UUID] = []
        self.left: dict[UUID, Mapping[str, Any]] = {}
        self.after_cancel: list[State | None] = [Cancelled()]

    def start(self, deployment: str, parameters: dict[str, Any], **facts: Any) -> UUID:
        text = json.dumps(parameters, allow_nan=False)  # as Prefect's client will
        assert len(text) < MOST_THAT_PREFECT_TAKES
        found = uuid.uuid4()
        self.started.append({"deployment": deployment, "id": found, "call": json.loads(parameters["call"]), **facts})
        keys = self.started[-1]["call"]
        asked = {"result": CheckpointToGcsCall, "request": TrainSegmentCall, "checkpoint": EvaluateCall}
        call: type[StageCall] = next((kind for key, kind in asked.items() if key in keys), PrepareDataCall)
        told = call.from_json(parameters["call"].encode(), where="call", error=InvalidInput)
        self.states[found] = self.plays.pop(0)(self, found, told)
        return found

    def require_deployment(self, name: str, *, of: str) -> None:
        """Every deployment is there."""

    def state(self, flow_run: UUID) -> State | None:
        states = self.states[flow_run]
        return states.pop(0) if len(states) > 1 else states[0]

    def cancel(self, flow_run: UUID) -> None:
        self.cancelled.append(flow_run)
        self.states[flow_run] = list(self.after_cancel)

    def unfinished(self, tags: Sequence[str], wanted: Callable[[Mapping[str, Any]], bool]) -> list[UUID]:
        assert "run:digits" in tags
        return [flow_run for flow_run, parameters in self.left.items() if wanted(parameters)]


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    @property
    def text(self) -> str:
        return "\n".join(event.text for event in self.events if isinstance(event, Note))


def answers(answer: Any, *states: State | None) -> Play:
    def play(api: Api, flow_run: UUID, _call: StageCall) -> list[State | None]:
        write_answer(api.run.home, str(flow_run), answer)
        return list(states) or [Scheduled(), Pending(), Running(), Completed()]

    return play


def ends(*states: State | None) -> Play:
    return lambda *_: list(states)


def run_with_code(folder: Path) -> FakeRun:
    (folder / "model.py").write_text("def build_model():\n    pass\n")
    return FakeRun(folder).train(100)


class Asked:
    """A launcher on a played API."""

    def __init__(
        self, run: FakeRun, *plays: Play, stop: Mapping[str, Any] | None = None, attempt: str | None = "a" * 32
    ) -> None:
        names = ("prepare_data", "train_segment", "checkpoint_to_gcs")
        settings = [f"stages.{name}={name.replace('_', '-')}/docker" for name in names]
        self.file = load_run_file(
            run.run_file(), [*settings, *(f"stop.{key}={value}" for key, value in (stop or {}).items())]
        )
        self.run, self.api, self.heard = run, Api(run, *plays), Heard()
        self.slept = 0.0
        elsewhere = Elsewhere(
            flow_runs=self.api,  # type: ignore[arg-type]
            attempt=attempt,
            clock=lambda: time.monotonic() + self.slept,
            sleep=self.sleep,
        )
        self.launcher = Launcher(self.file, elsewhere)

    def until(self, seconds: float) -> None:
        """Have a time budget."""
        elsewhere = replace(self.launcher.elsewhere, until=self.launcher.elsewhere.clock() + seconds)
        self.launcher = Launcher(self.file, elsewhere)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        time.sleep(0.001)  # lets a signal's handler note it

    def prepare(self) -> DatasetRef:
        return self.launcher.prepare_data(
            self.file.spec, code_folder=self.file.folder, storage=self.run.root, telemetry=self.heard
        )

    @property
    def request(self) -> SegmentRequest:
        head = self.run.head
        return SegmentRequest(
            spec=self.file.spec, dataset=DATASET, start=self.run.tip, base=head.base, skipped_batches=0, until_step=200,
            number=1,
        )  # fmt: skip

    def train(self) -> SegmentResult:
        return self.launcher.train_segment(
            self.request,
            code_folder=self.file.folder,
            storage=self.run.root,
            recorded=self.run.head.environment,
            telemetry=self.heard,
        )

    def commit(self, result: SegmentResult) -> Entry:
        commit = forgetting(self.launcher.checkpoint_to_gcs)
        return commit(self.request, result, storage=self.run.root, telemetry=self.heard)


def on_the_tip(asked: Asked) -> SegmentResult:
    """What a segment stages that starts from the tip as it is now."""
    result = staged(asked.run)
    assert result.staged is not None
    return result.model_copy(update={"staged": result.staged.model_copy(update={"base": asked.request.base})})


def staged(run: FakeRun, loss: float = 0.5) -> SegmentResult:
    return SegmentResult(
        staged=run.tip, parent=run.tip.path, exit_reason="segment_end", examples=0, seconds={},
        history=(MetricRow(step=150, metrics={"loss": loss}),),
    )  # fmt: skip
