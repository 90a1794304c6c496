"""A remote stage in its own process: devices, answer after a stop, time budget, attempt record."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from baton.flows import stage_process
from baton.flows.stage_process import CALLS, WORK, StageProcess, run_stage
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import SegmentResult
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.stage_calls import (
    PrepareDataCall,
    RemoteContext,
    RemoteTrainSegmentCall,
    TrainSegmentCall,
    pack,
)
from baton.tasks.foundation.errors import AcceleratorLost, NonFinite, StorageError
from baton.tasks.foundation.log.attempts import read_attempts
from baton.tasks.foundation.log.stage_results import find_segment, take_error
from baton.tasks.foundation.machine import devices
from baton.tasks.foundation.machine.hang import HangWatch
from baton.tasks.foundation.machine.threads import run_uninterrupted
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.telemetry.events import Ended, Sink
from baton.tasks.foundation.telemetry.ledger import Ledger
from baton.tasks.stages import STAGES, TRAIN_SEGMENT
from tests.support.checkout import CHECKOUT
from tests.support.event_recorder import EventRecorder
from tests.support.fake_prefect_api import DATASET, LauncherHarness, on_the_tip, run_with_code
from tests.support.fake_run import FakeRun
from tests.support.sigterm_raises import sigterm_raises


class SignalReceived(BaseException):
    pass


class FakeRunner:
    """A runner whose only stage is a function."""

    remote: frozenset[str] = frozenset()

    def __init__(self, work: Any) -> None:
        self.work = work

    def run(self, _stage: Any, call: Any, _place: Place) -> Any:
        return self.work(call)


def process_of(harness: LauncherHarness, work: Any, telemetry: Sink | None = None) -> StageProcess:
    ledger, spec = Ledger(), harness.file.spec
    return StageProcess(
        spec=spec,
        context=RemoteContext(code_folder=str(harness.file.folder)),
        place=replace(harness.place, telemetry=telemetry or EventRecorder()),
        runner=FakeRunner(work),
        ledger=ledger,
        watch=HangWatch(spec.stop, ledger=ledger, telemetry=EventRecorder()),
        flow_run="f1",
    )


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LauncherHarness:
    """A launcher on a fake API, and devices that nothing acquires."""
    TRAIN_SEGMENT.load()  # imported below, it would keep the replacement for later tests
    harness = LauncherHarness(run_with_code(tmp_path))
    acquired = SimpleNamespace(kind="cpu", replicas=2, hosts=1, environment=harness.run.head.environment)
    monkeypatch.setattr(devices, "acquire", lambda *_, **_settings: acquired)
    return harness


def call_of(harness: LauncherHarness, **changes: Any) -> RemoteTrainSegmentCall:
    values = {"spec": harness.file.spec, "request": harness.request, "recorded": harness.run.head.environment}
    return RemoteTrainSegmentCall(**{**values, **changes})


@pytest.mark.parametrize(("kind", "error"), [("tpu", AcceleratorLost), ("cpu", tf.errors.UnavailableError)])
def test_lost_devices_are_a_lost_accelerator(
    harness: LauncherHarness, monkeypatch: pytest.MonkeyPatch, kind: str, error: type[Exception]
) -> None:
    acquired = SimpleNamespace(
        kind=kind, replicas=8, hosts=1, has_servers=False, link=None, environment=harness.run.head.environment
    )
    monkeypatch.setattr(devices, "acquire", lambda *_, **_settings: acquired)

    def lost(_call: TrainSegmentCall) -> SegmentResult:
        raise tf.errors.UnavailableError(None, None, "Socket closed")

    with pytest.raises(error, match="Socket closed"):
        process_of(harness, lost).run(TRAIN_SEGMENT, harness.segment_call)


def test_signal_during_staging_does_not_lose_the_answer(harness: LauncherHarness) -> None:
    result, trained = on_the_tip(harness), []

    def train_segment(call: TrainSegmentCall) -> SegmentResult:
        def work(_: object) -> SegmentResult:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # the upload is under way
            trained.append(call)
            return result

        return run_uninterrupted(work, call.request.spec.stop)

    with sigterm_raises(SignalReceived), pytest.raises(SignalReceived):
        stage_process.train(call_of(harness), process_of(harness, train_segment))
    assert find_segment(harness.run.home, harness.request) == result
    # If Prefect schedules the stage again before the commit, it does not train a second time.
    assert stage_process.train(call_of(harness), process_of(harness, train_segment)) == result
    assert len(trained) == 1


def test_environment_that_differs_from_the_log_is_reported(harness: LauncherHarness) -> None:
    recorder, result = EventRecorder(), on_the_tip(harness)
    recorded = harness.run.head.environment.model_copy(update={"replicas": 8})
    stage_process.train(call_of(harness, recorded=recorded), process_of(harness, lambda _: result, recorder))
    assert "stages.init_or_restore" in recorder.text
    assert "replicas: 8 there, 2 here" in recorder.text


def test_time_budget_runs_while_the_stage_is_queued(harness: LauncherHarness) -> None:
    request = harness.request.model_copy(update={"stop_within_seconds": 3600.0})

    def seconds_left(ago: timedelta) -> float:
        call = call_of(harness, request=request, asked_at=(datetime.now(UTC) - ago).isoformat())
        found = stage_process.request_with_time_left(call).stop_within_seconds
        assert found is not None
        return found

    assert seconds_left(timedelta(minutes=10)) == pytest.approx(3000, abs=60)
    assert seconds_left(timedelta(hours=2)) == 0
    assert seconds_left(-timedelta(hours=2)) == 3600  # a clock that is behind does not extend the budget


def call_text(run: FakeRun, folder: Path, attempt: str | None) -> str:
    spec = load_run_file(run.run_file()).spec.model_copy(update={"storage": run.root.uri})
    return pack(PrepareDataCall(spec=spec), RemoteContext(code_folder=str(folder), attempt=attempt))


@pytest.mark.parametrize("attempt", ["a" * 32, None])
def test_attempt_record_is_written_only_within_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: str | None
) -> None:
    """Otherwise an evaluation that is killed repeatedly would count as attempts of the run and stop it."""
    run = FakeRun(tmp_path).train(100)
    at_work: list[str | None] = []

    def work(_call: PrepareDataCall, process: StageProcess) -> DatasetRef:
        at_work.extend(record.within for record in read_attempts(process.place.home).records)
        return DATASET

    monkeypatch.setitem(WORK, "prepare_data", work)
    text = call_text(run, tmp_path, attempt)
    ended = run_stage("prepare_data", text, flow_run="f1", telemetry=EventRecorder())
    assert ended == Ended(exit_code=0, result="DatasetRef")
    assert at_work == [record.within for record in read_attempts(run.home).records] == [attempt] * (attempt is not None)


def test_error_is_written_for_the_waiting_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path).train(100)

    def work(_call: PrepareDataCall, _process: StageProcess) -> DatasetRef:
        raise NonFinite("the loss is not finite at step 7", step=7)

    monkeypatch.setitem(WORK, "prepare_data", work)
    text = call_text(run, tmp_path, None)
    ended = run_stage("prepare_data", text, flow_run="f1", telemetry=EventRecorder())
    report = take_error(run.home, "f1")
    assert report is not None
    assert (ended.exit_code, ended.error) == (NonFinite.exit_code, report)
    assert (report.error, report.message) == ("NonFinite", "the loss is not finite at step 7")
    error = report.to_error()
    assert isinstance(error, NonFinite)
    assert error.step == 7


def test_error_that_cannot_be_written_is_said_with_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path).train(100)

    def work(_call: PrepareDataCall, _process: StageProcess) -> DatasetRef:
        raise NonFinite("the loss is not finite at step 7", step=7)

    def away(*_: object) -> None:
        raise StorageError("no space left on device\nmore")

    monkeypatch.setattr(stage_process, "write_error", away)
    monkeypatch.setitem(WORK, "prepare_data", work)
    text = call_text(run, tmp_path, None)
    error = run_stage("prepare_data", text, flow_run="f1", telemetry=EventRecorder()).error
    assert error is not None
    hint = "hint: the error could not be written to the run's home: no space left on device"
    assert error.message == str(error.to_error()) == f"the loss is not finite at step 7\n{hint}"


@pytest.mark.parametrize("stage", CALLS)
def test_call_that_is_not_a_json_object_is_refused(stage: str) -> None:
    error = run_stage(stage, "[]", flow_run="f1", telemetry=EventRecorder()).error
    assert error is not None
    assert error.error == "InvalidInput"


def test_every_stage_has_a_call() -> None:
    assert list(CALLS) == [stage.name for stage in STAGES]


def test_program_imports_only_what_every_image_has() -> None:
    code = (
        "import sys, baton.flows.train, baton.flows.stage_process; print(*{each.split('.')[0] for each in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert not {"tensorflow", "keras", "numpy", "h5py", "sklearn", "prefect"} & set(done.stdout.split())
