"""A stage asked of flow runs that fail, crash, vanish, are cancelled or answer late: what is asked next, what is said.

Prefect's API is played here, state by state; test_stages_elsewhere.py has a real server, worker and real kills.
"""

import math
import os
import signal
import threading
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Failed, Running, Scheduled

from flows.relay import StageStopped
from tasks.foundation.contracts.stage_calls import StageCall
from tasks.foundation.errors import (
    BatonError,
    BlowUp,
    DamagedCheckpoint,
    ModelError,
    NoProgress,
    SourceError,
    StaleWriter,
    StepFailed,
    StorageError,
)
from tasks.foundation.stops.uninterrupted import run_uninterrupted
from tests.support.fake_prefect_api import DATASET, Api, Asked, answers, ends, run_with_code, staged
from tests.support.fake_run import FakeRun
from tests.support.ledger_records import record_of
from tests.support.sigterm_raises import sigterm_raises


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return run_with_code(tmp_path)


def test_a_stage_is_asked_by_json_and_its_answer_is_taken(run: FakeRun) -> None:
    asked = Asked(run, answers(DATASET))
    assert asked.prepare() == DATASET
    (started,) = asked.api.started
    assert started["deployment"] == "prepare-data/docker"
    assert started["name"] == "digits prepare-data"
    assert set(started["tags"]) == {"baton", "run:digits", "stage:prepare-data"}
    assert started["call"]["spec"]["storage"] == run.root.uri
    assert started["call"]["attempt"] == "a" * 32
    assert not list(run.home.files("answers"))
    assert asked.api.cancelled == []


def test_a_metric_that_is_nan_comes_back_as_it_was(run: FakeRun) -> None:
    asked = Asked(run, answers(staged(run, loss=math.nan)))
    assert math.isnan(asked.train().history[0].metrics["loss"])


def test_each_try_has_a_key_of_its_own_that_names_the_attempt(run: FakeRun) -> None:
    asked = Asked(run, ends(Running(), Crashed()), ends(None), answers(staged(run)))
    assert asked.train() == staged(run)
    keys = [started["key"] for started in asked.api.started]
    assert len(set(keys)) == 3
    assert all(key.startswith("a" * 32) for key in keys)
    assert "ended without an answer (Crashed" in asked.heard.text
    assert "is not known to Prefect any more" in asked.heard.text


def test_an_answer_counts_whatever_became_of_its_flow_run(run: FakeRun) -> None:
    for end in (Crashed(), Failed(), Cancelled(), None):
        asked = Asked(run, answers(staged(run), Running(), end))
        assert asked.train() == staged(run)


def test_completed_without_an_answer_is_asked_for_again(run: FakeRun) -> None:
    asked = Asked(run, ends(Completed()), answers(DATASET))
    assert asked.prepare() == DATASET
    assert f"not in {run.home.uri}" in asked.heard.text


@pytest.mark.parametrize("kind", [StaleWriter, ModelError, StepFailed, SourceError, DamagedCheckpoint])
def test_an_error_is_the_same_error_here(run: FakeRun, kind: type[BatonError]) -> None:
    asked = Asked(run, ends(Running(), Failed(name=kind.__name__, message="the tip moved")))
    with pytest.raises(kind, match="the tip moved") as caught:
        asked.prepare()
    assert type(caught.value) is kind
    assert len(asked.api.started) == 1


def test_a_blow_up_is_one_here_too(run: FakeRun) -> None:
    with pytest.raises(BlowUp, match="not finite at step 7"):
        Asked(run, ends(Failed(name="NonFinite", message="the loss is not finite at step 7"))).train()


def test_what_is_no_error_of_batons_is_told_and_not_tried_again(run: FakeRun) -> None:
    asked = Asked(run, ends(Failed(message="ImportError: no module named flows")))
    with pytest.raises(BatonError, match="ImportError") as caught:
        asked.prepare()
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("name", ["AcceleratorLost", "StoreUnreachable"])
def test_a_stage_whose_machine_goes_is_asked_for_again(run: FakeRun, name: str) -> None:
    asked = Asked(run, ends(Failed(name=name, message="the machine goes")), answers(staged(run)))
    assert asked.train() == staged(run)


def test_what_a_killed_stage_had_committed_is_gone_on_from(run: FakeRun) -> None:
    def commits_and_dies(api: Api, _flow_run: UUID, _call: StageCall) -> list[State | None]:
        api.run.commit(150)
        return [Running(), Crashed()]

    result = Asked(run, commits_and_dies).train()
    assert (result.staged, result.exit_reason) == (None, "superseded")


def test_a_stage_that_nobody_begins_is_waited_for_and_it_is_said_once(run: FakeRun) -> None:
    asked = Asked(run, answers(DATASET, *[Scheduled()] * 300, Running(), Completed()))
    assert asked.prepare() == DATASET
    assert asked.heard.text.count("prepare-data has not begun after 120 s") == 1


def test_one_that_ran_and_waits_for_another_machine_has_begun(run: FakeRun) -> None:
    asked = Asked(run, ends(Running(), *[Scheduled()] * 300, Crashed()), answers(DATASET))
    assert asked.prepare() == DATASET
    assert "has not begun" not in asked.heard.text


def test_one_that_has_answered_and_is_scheduled_again_is_not_waited_for(run: FakeRun) -> None:
    asked = Asked(run, answers(DATASET, Running(), *[Scheduled()] * 300, Running(), Completed()))
    assert asked.prepare() == DATASET
    assert asked.api.cancelled == [asked.api.started[0]["id"]]


def test_what_has_not_begun_when_the_time_is_over_is_not_waited_for(run: FakeRun) -> None:
    asked = Asked(run, ends(Scheduled()))
    asked.until(0.05)
    with pytest.raises(StageStopped, match=r"was told to go \(time budget\)") as caught:
        asked.prepare()
    assert caught.value.reason == "time_budget"
    assert len(asked.api.cancelled) == 1
    # And what comes after it is not begun.
    with pytest.raises(StageStopped, match=r"was not begun \(time budget\)"):
        asked.prepare()
    assert len(asked.api.started) == 1


def test_what_runs_when_the_time_is_over_is_let_finish(run: FakeRun) -> None:
    asked = Asked(run, answers(DATASET, *[Running()] * 900, Completed()))
    assert run_uninterrupted(lambda _: asked.prepare(), asked.file.spec.stop, within_seconds=0.2) == DATASET
    assert asked.api.cancelled == []
    # One that trains was given the budget: it stops by itself, and has its time for a last commit.
    asked = Asked(run, answers(staged(run), *[Running()] * 250, Completed()))
    assert run_uninterrupted(lambda _: asked.train(), asked.file.spec.stop, within_seconds=0.2) == staged(run)
    assert asked.api.cancelled == []


def test_one_that_trains_on_beyond_its_time_is_told_to_go(run: FakeRun) -> None:
    asked = Asked(run, ends(Running()))
    asked.api.after_cancel = [Cancelled()]
    with pytest.raises(StageStopped, match="was told to go"):
        run_uninterrupted(lambda _: asked.train(), asked.file.spec.stop, within_seconds=0.2)
    assert asked.slept > 200


def test_who_was_told_to_go_and_has_committed_is_gone_on_from(run: FakeRun) -> None:
    left = staged(run).model_copy(update={"staged": None, "exit_reason": "sigterm"})
    asked = Asked(run, answers(left, Running(), Crashed()), answers(staged(run)))
    assert asked.train() == staged(run)
    asked = Asked(run, answers(left, Running(), Cancelled()))
    with pytest.raises(StageStopped) as caught:
        asked.train()
    assert caught.value.reason == "cancelled"
    assert not [path for path in run.home.files("answers") if asked.api.started[0]["id"].hex in path]


def test_tries_that_bring_nothing_come_to_an_end(run: FakeRun) -> None:
    asked = Asked(run, *[ends(Crashed())] * 9, stop={"attempts_without_progress": 3})
    with pytest.raises(NoProgress, match="3 tries in a row"):
        asked.prepare()
    assert len(asked.api.started) == 3


def test_attempts_of_dead_stages_are_diagnosed(run: FakeRun) -> None:
    def dies(api: Api, flow_run: UUID, call: StageCall) -> list[State | None]:
        record = record_of(str(flow_run), mark="100", from_step=100, committed_step=100, within=call.attempt)
        api.run.home.write(f"attempts/{flow_run}.json", record.to_json())
        return [Crashed()]

    asked = Asked(run, *[dies] * 9, stop={"attempts_without_progress": 2})
    with pytest.raises(NoProgress, match="died without a word in train"):
        asked.train()
    assert len(asked.api.started) == 2


def test_what_is_no_part_of_a_run_is_asked_for_again_though_the_run_is_stuck(run: FakeRun) -> None:
    for letter in "abc":
        record = record_of(letter * 32, mark="100", from_step=100, committed_step=100)
        run.home.write(f"attempts/{record.attempt}.json", record.to_json())
    asked = Asked(run, ends(Crashed()), answers(DATASET), stop={"attempts_without_progress": 3}, attempt=None)
    assert asked.prepare() == DATASET


def test_a_cancelled_stage_stops_the_command(run: FakeRun) -> None:
    asked = Asked(run, ends(Running(), Cancelled()))
    with pytest.raises(StageStopped) as caught:
        asked.train()
    assert caught.value.reason == "cancelled"
    assert len(asked.api.started) == 1


def test_a_cancelled_stage_whose_worker_is_dead_stops_the_command_too(run: FakeRun) -> None:
    asked = Asked(run, ends(Running(), Cancelling()))
    with pytest.raises(StageStopped, match="not heard of") as caught:
        asked.train()
    assert caught.value.reason == "cancelled"


class PrefectReported(BaseException):
    pass


def test_whoever_is_told_to_go_has_its_stage_go_and_waits_for_it(run: FakeRun) -> None:
    def is_told(api: Api, _flow_run: UUID, _call: StageCall) -> list[State | None]:
        api.after_cancel = [Running(), Running(), Cancelled()]
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return [Running()]

    asked = Asked(run, is_told)
    with sigterm_raises(PrefectReported), pytest.raises(PrefectReported):
        asked.train()
    assert asked.api.cancelled == [asked.api.started[0]["id"]]
    (states,) = asked.api.states.values()
    assert len(states) == 1  # it was waited for


def test_a_store_that_is_away_holds_up_nobody_who_leaves(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise StorageError("the store does not answer")

    monkeypatch.setattr("flows.launching.remote_stage.take_answer", away)
    asked = Asked(run, ends(Scheduled()))
    asked.until(0.05)
    with pytest.raises(StageStopped, match="time budget"):
        asked.prepare()


def test_a_stage_that_does_not_go_is_not_waited_for_for_ever(run: FakeRun) -> None:
    def is_told(api: Api, _flow_run: UUID, _call: StageCall) -> list[State | None]:
        api.after_cancel = [Running()]
        os.kill(os.getpid(), signal.SIGTERM)
        return [Running()]

    with sigterm_raises(PrefectReported), pytest.raises(PrefectReported):
        Asked(run, is_told, stop={"grace_seconds": 2}).train()
