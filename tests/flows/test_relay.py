"""A relay with only remote stages: which commits it continues from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.flows.admit import Admitted, admit
from baton.flows.opened_run import OpenedRun
from baton.flows.relay import relay
from baton.flows.result import Goal, RelayResult
from baton.tasks.foundation.contracts.log_entry import SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import StaleWriter
from baton.tasks.foundation.log.appends import stale_writer
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.stages import STAGES
from tests.support.event_recorder import EventRecorder
from tests.support.fake_prefect_api import DATASET, run_with_code
from tests.support.fake_run import FakeRun
from tests.support.ledger_records import record_of

OUR_ATTEMPT, OTHER_ATTEMPT = "a" * 32, "b" * 32


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return run_with_code(tmp_path)


class FakeRunner:
    """Answers every stage itself; `train_segment` replaces the training."""

    remote = frozenset(stage.name for stage in STAGES)

    def __init__(self, run: FakeRun, train_segment: Callable[[SegmentRequest], SegmentResult]) -> None:
        self.train_segment = train_segment
        self.fake_run = run

    def run(self, stage: Stage[Any, Any], call: Any, _place: Place) -> Any:
        if stage.name == "train_segment":
            return self.train_segment(call.request)
        if stage.name == "evaluate":
            return self.fake_run.evaluate(0.5)
        return {"prepare_data": DATASET, "init_or_restore": self.fake_run.head}[stage.name]


def train(run: FakeRun, runner: FakeRunner, telemetry: EventRecorder, **goal: float) -> RelayResult:
    opened = OpenedRun.open(load_run_file(run.run_file(steps=300)))
    admitted = admit(opened, Goal.of(opened.spec, **goal), telemetry=telemetry)
    assert isinstance(admitted, Admitted)
    return relay(admitted, runner, telemetry=telemetry, attempt=OUR_ATTEMPT)


def train_beside_another_stage(run: FakeRun, *, within: str) -> RelayResult:
    """Start the first segment twice. The first process, which belongs to the attempt `within`, commits first."""

    def train_segment(request: SegmentRequest) -> SegmentResult:
        start = request.start.step
        if start == 100:
            run.commit(150)
            record = record_of("f" * 32, mark="100", from_step=start, committed_step=150, within=within)
            run.home.write(f"attempts/{record.attempt}.json", record.to_json())
            raise stale_writer(run.log, run.head, step=200, base=request.base)
        run.train(request.until_step)
        return SegmentResult.superseded(request)

    recorder = EventRecorder()
    result = train(run, FakeRunner(run, train_segment), recorder)
    assert "it was committed by a stage that this command started, continuing from it" in recorder.text
    assert [note.rpartition("-")[0] for note in recorder.notes if note.startswith("continues")] == [
        "continues from step 100, checkpoint 00000100-00000001",
        "continues from step 150, checkpoint 00000150-00000002",
    ]
    return result


def test_commit_of_a_lost_stage_is_continued(run: FakeRun) -> None:
    assert train_beside_another_stage(run, within=OUR_ATTEMPT).step == 300
    assert [entry.body.checkpoint.step for entry in run.log.entries() if entry.body.kind == "checkpoint"] == [
        0, 100, 150, 200, 300,
    ]  # fmt: skip


def test_stage_whose_clock_is_ahead_ends_the_command(run: FakeRun) -> None:
    """By its clock, the time budget of the stage is used up, so it trains no step. A second call would not help."""
    numbers: list[int] = []

    def train_segment(request: SegmentRequest) -> SegmentResult:
        numbers.append(request.number)
        assert len(numbers) == 1
        result = SegmentResult.superseded(request)
        return result.model_copy(update={"exit_reason": "time_budget"})

    result = train(run, FakeRunner(run, train_segment), EventRecorder(), max_seconds=3600.0)
    assert (result.exit_reason, result.stopped, result.step) == ("time_budget", True, 100)


def test_commit_of_another_command_is_not_continued(run: FakeRun) -> None:
    with pytest.raises(StaleWriter, match="Another process trains the same run"):
        train_beside_another_stage(run, within=OTHER_ATTEMPT)
    assert run.tip.step == 150
