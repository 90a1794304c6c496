"""What a stage elsewhere is told, and what becomes of work that was left behind."""

import json
import uuid
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Cancelling, Completed, Failed, Pending, Running, Scheduled

from flows.goal import preflight
from flows.launching.launcher import Launcher, code_digests, stages_of
from flows.launching.stage_flows import require_same_code
from flows.launching.stage_results import hand_on, handed_on, write_answer
from flows.relay import StageStopped
from tasks.foundation.contracts.log_entry import Change
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.segment import MetricRow
from tasks.foundation.contracts.stage_calls import CheckpointToGcsCall, PrepareDataCall, StageCall, TrainSegmentCall
from tasks.foundation.errors import (
    AcceleratorError,
    DamagedCheckpoint,
    InvalidInput,
    ModelError,
)
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.stops.uninterrupted import run_uninterrupted
from tests.support.fake_prefect_api import DATASET, Api, Asked, Heard, answers, ends, on_the_tip, run_with_code, staged
from tests.support.fake_run import FakeRun


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return run_with_code(tmp_path)


def test_a_segment_that_was_left_behind_is_taken(run: FakeRun) -> None:
    asked = Asked(run)
    request, left = asked.request, on_the_tip(asked)
    tip = left.staged
    assert tip is not None
    beside = [
        left.model_copy(update={"parent": "checkpoints/another"}),
        left.model_copy(update={"staged": tip.model_copy(update={"base": request.base - 1})}),
        left.model_copy(update={"staged": tip.model_copy(update={"step": request.until_step + 1})}),
        left.model_copy(update={"staged": None}),
        DATASET,
    ]
    for number, other in enumerate(beside):
        write_answer(run.home, f"{number}", other)
    write_answer(run.home, "left", left)
    assert asked.train() == left
    assert asked.api.started == []
    # What nobody can use any more is cleared away; this one stays until it is committed.
    assert [path.rpartition("/")[2] for path in sorted(run.home.files("answers"))] == [
        "0.json", "2.json", "3.json", "4.json", "left.json",
    ]  # fmt: skip


def test_what_was_staged_before_a_change_that_was_accepted_is_not_taken(run: FakeRun) -> None:
    asked = Asked(run, answers(staged(run)))
    write_answer(run.home, "left", on_the_tip(asked))
    changed = Change(environment=run.head.environment, identity={"train.seed": 1}, accepted=("train.seed",))
    run.log.append(lambda _: changed, attempt=uuid.uuid4().hex)
    asked.train()
    assert len(asked.api.started) == 1
    assert "answers/left.json" not in run.home.files("answers")


def test_what_is_trained_is_handed_on_until_it_is_committed(run: FakeRun) -> None:
    asked = Asked(run)
    result, entry = on_the_tip(asked), RunLog(run.home).entry(run.head.number)
    asked.api.plays = [answers(result), answers(entry)]
    assert asked.train() == result
    # This process dies here: the next one trains nothing, and commits.
    again = Asked(run, answers(entry))
    assert again.train() == result
    assert again.api.started == []
    assert again.commit(result) == entry
    assert not list(run.home.files("answers"))


def test_a_long_segment_can_be_committed_elsewhere(run: FakeRun) -> None:
    asked = Asked(run)
    rows = tuple(
        MetricRow(step=100 + n, metrics={f"metric_{k}": 0.1234567890123 for k in range(8)}) for n in range(6000)
    )
    result, entry = on_the_tip(asked).model_copy(update={"history": rows}), run.log.entry(run.head.number)
    handed = []

    def commits(api: Api, flow_run: UUID, call: StageCall) -> list[State | None]:
        assert isinstance(call, CheckpointToGcsCall)
        handed.append(handed_on(run.home, call.result))
        return answers(entry)(api, flow_run, call)

    asked.api.plays = [commits]
    assert asked.commit(result) == entry
    assert handed == [result]
    assert not list(run.home.files("answers"))


def test_a_long_segment_that_was_trained_elsewhere_lies_there_once(run: FakeRun) -> None:
    asked = Asked(run)
    result = on_the_tip(asked)
    asked.api.plays = [answers(result)]
    assert hand_on(run.home, asked.train()) == f"answers/{asked.api.started[0]['id']}.json"
    assert len(list(run.home.files("answers"))) == 1


def test_what_proves_damaged_is_not_handed_on(run: FakeRun) -> None:
    asked = Asked(run)
    result = on_the_tip(asked)
    asked.api.plays = [answers(result), ends(Failed(name="DamagedCheckpoint", message="other bytes")), answers(result)]
    with pytest.raises(DamagedCheckpoint):
        asked.commit(asked.train())
    asked.train()
    assert len(asked.api.started) == 3


@pytest.mark.parametrize("state", [Pending(), Running()])
def test_a_commit_is_not_told_to_go(run: FakeRun, state: State) -> None:
    asked = Asked(run)
    result, entry = on_the_tip(asked), RunLog(run.home).entry(run.head.number)
    asked.api.plays = [answers(entry, *[state] * 5, Completed())]
    stop = asked.file.spec.stop
    assert run_uninterrupted(lambda _: asked.commit(result), stop, within_seconds=1e-9) == entry
    assert asked.api.cancelled == []


def test_a_commit_that_nobody_begins_is_left_to_itself(run: FakeRun) -> None:
    asked = Asked(run, ends(Scheduled()))
    with pytest.raises(StageStopped, match="goes on by itself") as caught:
        run_uninterrupted(lambda _: asked.commit(on_the_tip(asked)), asked.file.spec.stop, within_seconds=1e-9)
    assert caught.value.reason == "time_budget"
    assert asked.api.cancelled == []


def test_what_is_not_begun_yet_is_not_begun_any_more(run: FakeRun) -> None:
    asked = Asked(run)
    with pytest.raises(StageStopped, match="was not begun"):
        run_uninterrupted(lambda _: asked.train(), asked.file.spec.stop, within_seconds=1e-9)
    assert asked.api.started == []


def test_orphans_are_told_to_go_before_a_segment_is_asked_for(run: FakeRun) -> None:
    asked = Asked(run)
    ours, others, elsewheres = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()
    told = {**asked.launcher._told("train_segment", run.root), "request": asked.request}
    call = TrainSegmentCall(**told, recorded=run.head.environment)
    other = call.model_copy(update={"spec": call.spec.model_copy(update={"run": "another"})})
    moved = call.model_copy(update={"spec": call.spec.model_copy(update={"storage": "gs://elsewhere"})})
    for flow_run, each in ((ours, call), (others, other), (elsewheres, moved)):
        # Of another version, it may say what this one does not know.
        asked.api.left[flow_run] = {"call": json.dumps({**json.loads(each.model_dump_json()), "mood": "good"})}
    asked.api.left[uuid.uuid4()] = {"call": "by hand"}
    asked.api.states[ours] = [Running()]

    def goes_with_a_commit(api: Api, *_: Any) -> None:
        api.run.commit(170)
        api.states[ours] = [Cancelled()]

    asked.api.cancel = lambda flow_run: (asked.api.cancelled.append(flow_run), goes_with_a_commit(asked.api))  # type: ignore[method-assign,func-returns-value,assignment]
    result = asked.train()
    assert asked.api.cancelled == [ours]
    assert result.exit_reason == "superseded"
    assert asked.api.started == []


def test_an_orphan_that_was_told_to_go_is_waited_for(run: FakeRun) -> None:
    asked = Asked(run, answers(staged(run)))
    told = asked.launcher._told("train_segment", run.root)
    call = TrainSegmentCall(**told, request=asked.request, recorded=run.head.environment)
    flow_run = uuid.uuid4()
    asked.api.left[flow_run] = {"call": call.model_dump_json()}
    asked.api.states[flow_run] = [Cancelling(), Cancelling(), Cancelled()]
    asked.train()
    assert asked.api.cancelled == []
    assert len(asked.api.states[flow_run]) == 1


def test_other_code_is_refused_where_the_stage_runs(run: FakeRun, tmp_path: Path) -> None:
    asked = Asked(run)
    call = PrepareDataCall(**asked.launcher._told("prepare_data", run.root))
    assert set(call.code) == {"model.py:build_model"}
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ModelError, match=r"model\.py"):
        require_same_code(call, other)
    (other / "model.py").write_text("# only a comment more\ndef build_model():\n    pass\n")
    require_same_code(call, other)
    (other / "model.py").write_text("def build_model():\n    return 1\n")
    with pytest.raises(InvalidInput, match="other code"):
        require_same_code(call, other)
    assert code_digests(asked.file.spec, other) != call.code


def test_what_a_run_file_can_hold_arrives_as_it_was(run: FakeRun) -> None:
    options = "{when: 2026-01-31, rate: 1e-3, most: .inf, none: null, many: [1, 1.0, '1', true], deep: {a: b}}"
    asked = Asked(run, answers(DATASET))
    settings = ["train.class_weight={0: 1, 7: 2.5}", "init.weights=[{source: a.keras, rename: {a: b}}]"]
    file = load_run_file(run.run_file(), [f"data.options={options}", *settings, "stages.prepare_data=a/b"])
    launcher = Launcher(file, asked.launcher.elsewhere)
    call = PrepareDataCall(**{**launcher._told("prepare_data", run.root), "code": {}})
    back = PrepareDataCall.from_json(call.model_dump_json().encode(), where="call", error=InvalidInput)
    assert back == call
    assert repr(back.spec.data.options) == repr(file.spec.data.options)


def test_another_folder_of_the_code_may_be_named(run: FakeRun) -> None:
    asked = Asked(run, answers(DATASET))
    file = load_run_file(run.run_file(), ["stages.prepare_data={deployment: a/b, code_folder: /code}"])
    Launcher(file, asked.launcher.elsewhere).prepare_data(
        file.spec, code_folder=file.folder, storage=run.root, telemetry=asked.heard
    )
    assert asked.api.started[0]["call"]["code_folder"] == "/code"


def test_a_deployment_of_another_flow_is_refused_before_anybody_is_asked(run: FakeRun) -> None:
    file = load_run_file(run.run_file(), ["stages.train_segment=train-run/docker"])
    with pytest.raises(InvalidInput, match=r"of the flow train-run.*name train-segment/docker"):
        stages_of(file, lambda _: print, attempt="a" * 32, telemetry=Heard())


def test_devices_to_evaluate_on_must_share_the_batch(run: FakeRun) -> None:
    there = "stages.evaluate={deployment: evaluate/docker, accelerator: {kind: cpu, replicas: 3}}"
    with pytest.raises(AcceleratorError, match="not divisible by 3 replicas"):
        preflight(load_run_file(run.run_file(), [there]))
