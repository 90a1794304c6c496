"""A stage elsewhere: its devices, its answer when it is told to go, its time, its attempts."""

import os
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from prefect import task
from prefect.logging import disable_run_logger

import tasks.train_segment.task as train_segment_room
from flows.launching import stage_flows
from flows.launching.stage_results import find_segment
from tasks.foundation.accelerator import strategy
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.segment import SegmentRequest, SegmentResult
from tasks.foundation.contracts.stage_calls import StageCall, TrainSegmentCall
from tasks.foundation.errors import AcceleratorLost
from tasks.foundation.runlog.attempts import read_attempts
from tasks.foundation.stops.stops import Stops
from tasks.foundation.stops.uninterrupted import run_uninterrupted
from tasks.foundation.telemetry.events import Silent
from tasks.foundation.telemetry.ledger import Ledger
from tests.support.fake_prefect_api import Asked, Heard, on_the_tip, run_with_code
from tests.support.fake_run import FakeRun
from tests.support.sigterm_raises import sigterm_raises


@task
def lost_in_the_middle(**_: Any) -> None:
    raise tf.errors.UnavailableError(None, None, "Socket closed")


@pytest.mark.parametrize(("kind", "error"), [("tpu", AcceleratorLost), ("cpu", tf.errors.UnavailableError)])
def test_devices_that_go_are_a_lost_accelerator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, error: type[Exception]
) -> None:
    monkeypatch.setattr(
        strategy, "acquire", lambda *_, **_settings: SimpleNamespace(kind=kind, replicas=8, hosts=1, environment=None)
    )
    monkeypatch.setattr(stage_flows, "Prefect", lambda: SimpleNamespace(is_there=lambda _: False))
    run = FakeRun(tmp_path)
    place = stage_flows._Place(
        spec=load_run_file(run.run_file()).spec, code_folder=tmp_path, storage=run.root, home=run.home, ledger=Ledger(),
        telemetry=Silent(), flow_run="0",
    )  # fmt: skip
    with pytest.raises(error, match="Socket closed"), place.devices(None):
        place.do(lost_in_the_middle, recorded=None)


class Gone(BaseException):
    pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    """A run with code, and devices that need no TensorFlow."""
    asked = Asked(run_with_code(tmp_path))
    acquired = SimpleNamespace(kind="cpu", replicas=2, hosts=1, environment=asked.run.head.environment)
    monkeypatch.setattr(strategy, "acquire", lambda *_, **_settings: acquired)
    monkeypatch.setattr(stage_flows, "Prefect", lambda: SimpleNamespace(is_there=lambda _: False))
    return asked


def place_of(asked: Asked, telemetry: Any) -> stage_flows._Place:
    return stage_flows._Place(
        spec=asked.file.spec, code_folder=asked.file.folder, storage=asked.run.root, home=asked.run.home,
        ledger=Ledger(), telemetry=telemetry, flow_run="f1",
    )  # fmt: skip


def call_of(asked: Asked, **more: Any) -> TrainSegmentCall:
    told = asked.launcher._told("train_segment", asked.run.root)
    return TrainSegmentCall(**told, **{"request": asked.request, "recorded": asked.run.head.environment, **more})


def test_who_is_told_to_go_while_it_stages_answers_all_the_same(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    result, trained = on_the_tip(asked), []

    @task
    def train_segment(request: SegmentRequest, **_: Any) -> SegmentResult:
        def work(_: Stops) -> SegmentResult:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # uploading
            trained.append(request)
            return result

        return run_uninterrupted(work, request.spec.stop)

    monkeypatch.setattr(train_segment_room, "train_segment_task", train_segment)
    with sigterm_raises(Gone), pytest.raises(Gone):
        stage_flows._train(call_of(asked), place_of(asked, Silent()))
    assert find_segment(asked.run.home, asked.request) == result
    # Scheduled again and executed before anybody has committed it, it is not trained twice.
    assert stage_flows._train(call_of(asked), place_of(asked, Silent())) == result
    assert len(trained) == 1


def test_a_stage_in_another_environment_than_the_logs_says_so(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    heard, result = Heard(), on_the_tip(asked)
    monkeypatch.setattr(train_segment_room, "train_segment_task", task(lambda *_, **__: result, name="train-segment"))
    stage_flows._train(
        call_of(asked, recorded=asked.run.head.environment.model_copy(update={"replicas": 8})), place_of(asked, heard)
    )
    assert "stages.init_or_restore" in heard.text
    assert "replicas: 8 there, 2 here" in heard.text


def test_the_time_budget_goes_on_while_a_machine_is_waited_for(asked: Asked) -> None:
    request = asked.request.model_copy(update={"stop_within_seconds": 3600.0})

    def left(ago: timedelta) -> float:
        told = call_of(asked, request=request, asked_at=(datetime.now(UTC) - ago).isoformat())
        found = stage_flows._in_what_is_left_of_its_time(told).stop_within_seconds
        assert found is not None
        return found

    assert left(timedelta(minutes=10)) == pytest.approx(3000, abs=60)
    assert left(timedelta(hours=2)) == 0
    assert left(-timedelta(hours=2)) == 3600  # a clock that is wrong gives no more than was granted


@pytest.mark.parametrize("attempt", ["a" * 32, None])
def test_only_what_is_part_of_an_attempt_is_one(tmp_path: Path, attempt: str | None) -> None:
    """So that evaluating once more, killed again and again, does not stop the run."""
    run = FakeRun(tmp_path).train(100)
    spec = load_run_file(run.run_file()).spec.model_copy(update={"storage": run.root.uri})
    call = StageCall(spec=spec, code_folder=str(tmp_path), attempt=attempt)
    at_work: list[str | None] = []

    def work(_told: StageCall, place: stage_flows._Place) -> Head:
        at_work.extend(record.within for record in read_attempts(place.home).records)
        return run.head

    with disable_run_logger():
        assert stage_flows._answered(StageCall, call.model_dump_json(), work).is_completed()
    assert at_work == [record.within for record in read_attempts(run.home).records] == [attempt] * (attempt is not None)
