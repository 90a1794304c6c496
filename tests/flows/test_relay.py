"""A relay whose stages all run in other processes: whose commits it goes on from."""

from pathlib import Path
from typing import Any

import pytest

from flows.goal import Goal, RelayResult
from flows.relay import Stages, relay
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.segment import SegmentRequest, SegmentResult
from tasks.foundation.errors import StaleWriter
from tasks.foundation.runlog.commits import stale_writer
from tests.support.fake_prefect_api import DATASET, Heard, run_with_code
from tests.support.fake_run import FakeRun
from tests.support.ledger_records import record_of

OURS, ANOTHERS = "a" * 32, "b" * 32


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return run_with_code(tmp_path)


def stages(run: FakeRun, train_segment: Any) -> Stages:
    def head(*_: object, **__: object) -> Head:
        return run.head

    def nothing(*_: object, **__: object) -> None:
        pass

    return Stages(
        prepare_data=lambda *_, **__: DATASET,
        init_or_restore=head,
        train_segment=train_segment,
        checkpoint_to_gcs=nothing,
        evaluate=lambda *_, **__: run.evaluate(0.5),
        elsewhere=frozenset(Stages.names()),
    )


def trains_beside(run: FakeRun, *, within: str) -> RelayResult:
    """The first segment is asked for a second time, and the first one, waited for by `within`, commits before it."""

    def train_segment(request: SegmentRequest, **_: object) -> SegmentResult:
        start = request.start.step
        if start == 100:
            run.commit(150)
            record = record_of("f" * 32, mark="100", from_step=start, committed_step=150, within=within)
            run.home.write(f"attempts/{record.attempt}.json", record.to_json())
            raise stale_writer(run.log, run.head, step=200, base=request.base)
        run.train(request.until_step)
        return SegmentResult.superseded(request)

    spec = load_run_file(run.run_file(steps=300))
    heard = Heard()
    result = relay(spec, Goal.of(spec.spec), stages(run, train_segment), telemetry=heard, attempt=OURS)
    assert "It was a stage of this very command" in heard.text
    return result


def test_a_stage_that_was_taken_for_dead_and_commits_first_is_gone_on_from(run: FakeRun) -> None:
    assert trains_beside(run, within=OURS).step == 300
    assert [entry.body.checkpoint.step for entry in run.log.entries() if entry.body.kind == "checkpoint"] == [
        0, 100, 150, 200, 300,
    ]  # fmt: skip


def test_a_stage_whose_clock_is_hours_ahead_is_not_started_again_and_again(run: FakeRun) -> None:
    """It takes the time budget for used up, and trains nothing."""
    asked: list[int] = []

    def train_segment(request: SegmentRequest, **_: object) -> SegmentResult:
        asked.append(request.number)
        assert len(asked) == 1
        result = SegmentResult.superseded(request)
        return result.model_copy(update={"exit_reason": "time_budget"})

    spec = load_run_file(run.run_file(steps=300))
    goal = Goal.of(spec.spec, max_seconds=3600.0)
    result = relay(spec, goal, stages(run, train_segment), telemetry=Heard(), attempt=OURS)
    assert (result.exit_reason, result.stopped, result.step) == ("time_budget", True, 100)


def test_another_command_that_commits_first_wins(run: FakeRun) -> None:
    with pytest.raises(StaleWriter, match="Another process trains the same run"):
        trains_beside(run, within=ANOTHERS)
    assert run.tip.step == 150
