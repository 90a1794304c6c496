"""Flow runs of a stage that fail, crash, vanish, are cancelled or answer late.

What Prefect answers is a fake here; end_to_end/test_prefect_worker.py has a real server, a real worker and real kills.
"""

import math
import os
import signal
import threading
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from baton.flows.remote_stage import FlowRuns, FlowRunState
from baton.flows.runner import StageStopped
from baton.tasks.foundation.contracts.log_entry import Change
from baton.tasks.foundation.contracts.run_spec import StopSpec
from baton.tasks.foundation.contracts.stage_calls import ErrorReport, StageCall
from baton.tasks.foundation.errors import (
    BatonError,
    DamagedCheckpoint,
    ModelError,
    NonFinite,
    NoProgress,
    SourceError,
    StageLost,
    StaleWriter,
    StepFailed,
    StorageError,
)
from baton.tasks.foundation.log.stage_results import write_error
from baton.tasks.foundation.machine.threads import run_uninterrupted
from baton.tasks.foundation.telemetry.events import Ask, Unreachable
from tests.support.event_recorder import EventRecorder
from tests.support.fake_prefect_api import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    CRASHED,
    DATASET,
    FAILED,
    RUNNING,
    SCHEDULED,
    Api,
    LauncherHarness,
    answers,
    ends,
    failed,
    run_with_code,
    staged,
    state,
)
from tests.support.fake_run import FakeRun
from tests.support.ledger_records import record_of
from tests.support.sigterm_raises import sigterm_raises


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return run_with_code(tmp_path)


def test_call_is_sent_as_json_and_answer_is_returned(run: FakeRun) -> None:
    harness = LauncherHarness(run, answers(DATASET))
    assert harness.prepare() == DATASET
    (started,) = harness.api.started
    assert started["deployment"] == "prepare-data/docker"
    assert started["name"] == "digits prepare-data"
    assert set(started["tags"]) == {"baton", "run:digits", "stage:prepare-data"}
    assert started["call"]["spec"]["storage"] == run.root.uri
    assert started["call"]["attempt"] == "a" * 32
    assert not list(run.home.files("answers"))
    assert harness.api.cancelled == []


@pytest.mark.parametrize(("seed", "variables"), [(7, {"PYTHONHASHSEED": "7"}), (None, {})])
def test_stage_gets_the_hash_seed_of_its_run(run: FakeRun, seed: int | None, variables: dict[str, str]) -> None:
    environment = run.head.environment.model_copy(update={"hash_seed": seed})
    run.log.append(lambda _: Change(environment=environment, identity=None, accepted=()), attempt="a")
    harness = LauncherHarness(run, answers(DATASET))
    harness.prepare()
    (started,) = harness.api.started
    assert started["environment"] == variables


def test_nan_metric_survives_the_answer(run: FakeRun) -> None:
    harness = LauncherHarness(run, answers(staged(run, loss=math.nan)))
    assert math.isnan(harness.train().history[0].metrics["loss"])


def test_each_try_has_its_own_idempotency_key(run: FakeRun) -> None:
    harness = LauncherHarness(run, ends(RUNNING, CRASHED), ends(None), answers(staged(run)))
    assert harness.train() == staged(run)
    keys = [started["key"] for started in harness.api.started]
    assert len(set(keys)) == 3
    assert all(key.startswith("a" * 32) for key in keys)
    assert "ended without an answer (Crashed" in harness.recorder.text
    assert "is not known to Prefect any more" in harness.recorder.text


def test_answer_is_used_whatever_the_last_state_is(run: FakeRun) -> None:
    for end in (CRASHED, FAILED, CANCELLED, None):
        harness = LauncherHarness(run, answers(staged(run), RUNNING, end))
        assert harness.train() == staged(run)


def test_completed_without_answer_is_tried_again(run: FakeRun) -> None:
    harness = LauncherHarness(run, ends(COMPLETED), answers(DATASET))
    assert harness.prepare() == DATASET
    assert f"not in {run.home.uri}" in harness.recorder.text


@pytest.mark.parametrize("kind", [StaleWriter, ModelError, StepFailed, SourceError, DamagedCheckpoint])
def test_error_keeps_its_class(run: FakeRun, kind: type[BatonError]) -> None:
    harness = LauncherHarness(run, ends(RUNNING, failed(name=kind.__name__, message="the tip moved")))
    with pytest.raises(kind, match="the tip moved") as caught:
        harness.prepare()
    assert type(caught.value) is kind
    assert len(harness.api.started) == 1


def test_error_keeps_its_class_and_fields(run: FakeRun) -> None:
    def fails(api: Api, flow_run: str, _call: StageCall) -> list[FlowRunState | None]:
        fault = NonFinite("the loss is not finite at step 7", step=7)
        write_error(api.run.home, flow_run, ErrorReport.of(fault))
        return [failed(name="NonFinite", message=str(fault))]

    with pytest.raises(NonFinite, match=r"not finite at step 7 \(in train-segment to step 200") as caught:
        LauncherHarness(run, fails).train()
    assert caught.value.step == 7
    assert not list(run.home.files("answers"))


def test_stage_without_a_home_reports_only_the_class(run: FakeRun) -> None:
    """The state does not have the field `step` that NonFinite needs, so a base class is raised."""
    with pytest.raises(BatonError, match="not finite at step 7") as caught:
        LauncherHarness(run, ends(failed(name="NonFinite", message="the loss is not finite at step 7"))).train()
    assert type(caught.value) is BatonError


def test_unexpected_failure_is_not_tried_again(run: FakeRun) -> None:
    harness = LauncherHarness(run, ends(failed(message="ImportError: no module named flows")))
    with pytest.raises(BatonError, match="ImportError") as caught:
        harness.prepare()
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("name", ["AcceleratorLost", "StoreUnreachable"])
def test_stage_that_lost_its_machine_is_tried_again(run: FakeRun, name: str) -> None:
    harness = LauncherHarness(run, ends(failed(name=name, message="the machine goes")), answers(staged(run)))
    assert harness.train() == staged(run)


def test_commit_of_a_killed_stage_is_continued(run: FakeRun) -> None:
    def commits_and_dies(api: Api, _flow_run: str, _call: StageCall) -> list[FlowRunState | None]:
        api.run.commit(150)
        return [RUNNING, CRASHED]

    result = LauncherHarness(run, commits_and_dies).train()
    assert (result.staged, result.exit_reason) == (None, "superseded")


def test_queued_stage_is_reported_once(run: FakeRun) -> None:
    harness = LauncherHarness(run, answers(DATASET, *[SCHEDULED] * 300, RUNNING, COMPLETED))
    assert harness.prepare() == DATASET
    assert harness.recorder.text.count("prepare-data has not started after 120 s") == 1


def test_rescheduled_stage_is_not_reported_as_queued(run: FakeRun) -> None:
    harness = LauncherHarness(run, ends(RUNNING, *[SCHEDULED] * 300, CRASHED), answers(DATASET))
    assert harness.prepare() == DATASET
    assert "has not started" not in harness.recorder.text


def test_rescheduled_stage_with_an_answer_is_cancelled(run: FakeRun) -> None:
    harness = LauncherHarness(run, answers(DATASET, RUNNING, *[SCHEDULED] * 300, RUNNING, COMPLETED))
    assert harness.prepare() == DATASET
    assert harness.api.cancelled == [harness.api.started[0]["id"]]


def test_queued_stage_is_cancelled_at_end_of_time_budget(run: FakeRun) -> None:
    harness = LauncherHarness(run, ends(SCHEDULED))
    harness.until(0.05)
    with pytest.raises(StageStopped, match=r"was cancelled \(time budget\)") as caught:
        harness.prepare()
    assert caught.value.reason == "time_budget"
    assert len(harness.api.cancelled) == 1
    # No later stage is started.
    with pytest.raises(StageStopped, match=r"was not started \(time budget\)"):
        harness.prepare()
    assert len(harness.api.started) == 1


def test_running_stage_may_finish_after_the_time_budget(run: FakeRun) -> None:
    harness = LauncherHarness(run, answers(DATASET, *[RUNNING] * 900, COMPLETED))
    assert run_uninterrupted(lambda _: harness.prepare(), harness.file.spec.stop, within_seconds=0.2) == DATASET
    assert harness.api.cancelled == []
    # A segment knows the budget and stops by itself, with time for a last commit.
    harness = LauncherHarness(run, answers(staged(run), *[RUNNING] * 250, COMPLETED))
    assert run_uninterrupted(lambda _: harness.train(), harness.file.spec.stop, within_seconds=0.2) == staged(run)
    assert harness.api.cancelled == []


def test_segment_far_beyond_its_time_budget_is_cancelled(run: FakeRun) -> None:
    harness = LauncherHarness(run, ends(RUNNING))
    harness.api.after_cancel = [CANCELLED]
    with pytest.raises(StageStopped, match="was cancelled"):
        run_uninterrupted(lambda _: harness.train(), harness.file.spec.stop, within_seconds=0.2)
    assert harness.slept > 200


def test_stopped_stage_is_tried_again_unless_cancelled(run: FakeRun) -> None:
    left = staged(run).model_copy(update={"staged": None, "exit_reason": "sigterm"})
    harness = LauncherHarness(run, answers(left, RUNNING, CRASHED), answers(staged(run)))
    assert harness.train() == staged(run)
    harness = LauncherHarness(run, answers(left, RUNNING, CANCELLED))
    with pytest.raises(StageStopped) as caught:
        harness.train()
    assert caught.value.reason == "cancelled"
    assert not [path for path in run.home.files("answers") if harness.api.started[0]["id"] in path]


def test_number_of_tries_without_result_is_limited(run: FakeRun) -> None:
    harness = LauncherHarness(run, *[ends(CRASHED)] * 9, stop={"attempts_without_progress": 3})
    with pytest.raises(NoProgress, match="3 tries in a row"):
        harness.prepare()
    assert len(harness.api.started) == 3


def test_repeated_crashes_of_a_stage_are_diagnosed(run: FakeRun) -> None:
    def dies(api: Api, flow_run: str, _call: StageCall) -> list[FlowRunState | None]:
        record = record_of(flow_run, mark="100", from_step=100, committed_step=100, within="a" * 32)
        api.run.home.write(f"attempts/{flow_run}.json", record.to_json())
        return [CRASHED]

    harness = LauncherHarness(run, *[dies] * 9, stop={"attempts_without_progress": 2})
    with pytest.raises(NoProgress, match="killed or crashed in train"):
        harness.train()
    assert len(harness.api.started) == 2


def test_stage_outside_an_attempt_ignores_the_runs_attempts(run: FakeRun) -> None:
    for letter in "abc":
        record = record_of(letter * 32, mark="100", from_step=100, committed_step=100)
        run.home.write(f"attempts/{record.attempt}.json", record.to_json())
    harness = LauncherHarness(run, ends(CRASHED), answers(DATASET), stop={"attempts_without_progress": 3}, attempt=None)
    assert harness.prepare() == DATASET


def test_cancelled_stage_stops_the_command(run: FakeRun) -> None:
    harness = LauncherHarness(run, ends(RUNNING, CANCELLED))
    with pytest.raises(StageStopped) as caught:
        harness.train()
    assert caught.value.reason == "cancelled"
    assert len(harness.api.started) == 1


def test_cancelled_stage_without_worker_stops_the_command(run: FakeRun) -> None:
    harness = LauncherHarness(run, ends(RUNNING, CANCELLING))
    with pytest.raises(StageStopped, match="not reported") as caught:
        harness.train()
    assert caught.value.reason == "cancelled"


class SignalReceived(BaseException):
    pass


def test_signal_cancels_the_stage_and_waits_for_its_end(run: FakeRun) -> None:
    def is_signalled(api: Api, _flow_run: str, _call: StageCall) -> list[FlowRunState | None]:
        api.after_cancel = [RUNNING, RUNNING, CANCELLED]
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return [RUNNING]

    harness = LauncherHarness(run, is_signalled)
    with sigterm_raises(SignalReceived), pytest.raises(SignalReceived):
        harness.train()
    assert harness.api.cancelled == [harness.api.started[0]["id"]]
    (states,) = harness.api.states.values()
    assert len(states) == 1  # the command waited for the stage's last state


def test_unreachable_store_does_not_delay_a_stop(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise StorageError("the store does not answer")

    monkeypatch.setattr("baton.flows.remote_stage.take_answer", unreachable)
    harness = LauncherHarness(run, ends(SCHEDULED))
    harness.until(0.05)
    with pytest.raises(StageStopped, match="time budget"):
        harness.prepare()


def test_wait_for_a_cancelled_stage_is_limited(run: FakeRun) -> None:
    def is_signalled(api: Api, _flow_run: str, _call: StageCall) -> list[FlowRunState | None]:
        api.after_cancel = [RUNNING]
        os.kill(os.getpid(), signal.SIGTERM)
        return [RUNNING]

    with sigterm_raises(SignalReceived), pytest.raises(SignalReceived):
        LauncherHarness(run, is_signalled, stop={"grace_seconds": 2}).train()


def test_unreachable_api_is_retried_for_a_limited_time() -> None:
    recorder, slept = EventRecorder(), [0.0]

    def sleep(seconds: float) -> None:
        slept[0] += seconds

    def asking(ask: Ask, *, within_seconds: float | None = None) -> object:
        runs = FlowRuns(ask=ask, telemetry=recorder, clock=lambda: slept[0], sleep=sleep)
        facts: dict[str, Any] = {"name": "a", "tags": [], "key": "k", "environment": {}}
        return run_uninterrupted(lambda _: runs.start("a/b", {}, **facts), StopSpec(), within_seconds=within_seconds)

    times = []

    def comes_back(*_: object) -> str:
        times.append(slept[0])
        if len(times) < 4:
            raise Unreachable("Prefect's API is not responding (refused)")
        return "here"

    assert asking(comes_back) == "here"
    assert times == sorted(set(times))
    assert recorder.text.count("is not responding") == 1

    def stays_unreachable(*_: object) -> str:
        raise Unreachable("Prefect's API is not responding (refused)")

    began = slept[0]
    with pytest.raises(StageLost) as caught:
        asking(stays_unreachable)
    assert caught.value.exit_code == 3
    assert slept[0] - began >= 600

    # After a stop request, a process retries for only a few seconds.
    began = slept[0]
    with pytest.raises(StageLost):
        asking(stays_unreachable, within_seconds=1e-9)
    assert slept[0] - began < 30


def test_flow_runs_cancelled_long_ago_count_as_finished() -> None:
    now = datetime.now(UTC)
    states = [RUNNING, state("Cancelling", at=now), state("Cancelling", at=now - timedelta(hours=1))]
    found = [{"id": str(number), "state": asdict(each), "parameters": {}} for number, each in enumerate(states)]
    runs = FlowRuns(ask=lambda *_: found, telemetry=EventRecorder())
    assert runs.unfinished(["baton"], lambda _: True) == ["0", "1"]
