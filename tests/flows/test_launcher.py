"""What is sent to a remote stage, and how the work of earlier attempts is used or dropped."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from baton.flows.admit import preflight
from baton.flows.opened_run import OpenedRun
from baton.flows.remote_stage import FlowRunState, code_digests, runner_for
from baton.flows.result import Goal
from baton.flows.runner import InProcess, StageStopped
from baton.flows.stage_process import require_same_code
from baton.flows.train import train
from baton.tasks.foundation.contracts.log_entry import Change, MetricRow
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.stage_calls import (
    PrepareDataCall,
    RemoteCheckpointToGcsCall,
    RemoteContext,
    StageCall,
    pack,
    unpack,
)
from baton.tasks.foundation.errors import AcceleratorError, DamagedCheckpoint, InvalidInput, ModelError
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.log.stage_results import hand_on, handed_on, write_answer
from baton.tasks.foundation.machine.threads import run_uninterrupted
from baton.tasks.stages import PREPARE_DATA
from tests.support.event_recorder import EventRecorder
from tests.support.fake_prefect_api import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    DATASET,
    PENDING,
    RUNNING,
    SCHEDULED,
    Api,
    LauncherHarness,
    answers,
    ends,
    failed,
    on_the_tip,
    run_with_code,
    staged,
)
from tests.support.fake_run import FakeRun


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return run_with_code(tmp_path)


def test_staged_segment_of_an_earlier_attempt_is_used(run: FakeRun) -> None:
    harness = LauncherHarness(run)
    request, left = harness.request, on_the_tip(harness)
    tip = left.staged
    assert tip is not None
    unusable = [
        left.model_copy(update={"parent": "checkpoints/another"}),
        left.model_copy(update={"staged": tip.model_copy(update={"base": request.base - 1})}),
        left.model_copy(update={"staged": tip.model_copy(update={"step": request.until_step + 1})}),
        left.model_copy(update={"staged": None}),
        DATASET,
    ]
    for number, other in enumerate(unusable):
        write_answer(run.home, f"{number}", other)
    write_answer(run.home, "left", left)
    assert harness.train() == left
    assert harness.api.started == []
    # Unusable results are deleted; this one is kept until it is committed.
    assert [path.rpartition("/")[2] for path in sorted(run.home.files("answers"))] == [
        "0.json", "2.json", "3.json", "4.json", "left.json",
    ]  # fmt: skip


def test_segment_staged_before_an_accepted_change_is_dropped(run: FakeRun) -> None:
    harness = LauncherHarness(run, answers(staged(run)))
    write_answer(run.home, "left", on_the_tip(harness))
    changed = Change(environment=run.head.environment, identity={"train.seed": 1}, accepted=("train.seed",))
    run.log.append(lambda _: changed, attempt=uuid.uuid4().hex)
    harness.train()
    assert len(harness.api.started) == 1
    assert "answers/left.json" not in run.home.files("answers")


def test_staged_segment_is_kept_until_it_is_committed(run: FakeRun) -> None:
    harness = LauncherHarness(run)
    result, entry = on_the_tip(harness), RunLog(run.home).entry(run.head.number)
    harness.api.plays = [answers(result), answers(entry)]
    assert harness.train() == result
    # This process dies here. The next one commits the result without training.
    again = LauncherHarness(run, answers(entry))
    assert again.train() == result
    assert again.api.started == []
    assert again.commit(result) == entry
    assert not list(run.home.files("answers"))


def test_long_segment_is_committed_in_another_process(run: FakeRun) -> None:
    harness = LauncherHarness(run)
    rows = tuple(
        MetricRow(step=100 + n, metrics={f"metric_{k}": 0.1234567890123 for k in range(8)}) for n in range(6000)
    )
    result, entry = on_the_tip(harness).model_copy(update={"history": rows}), run.log.entry(run.head.number)
    handed = []

    def commits(api: Api, flow_run: str, call: StageCall) -> list[FlowRunState | None]:
        assert isinstance(call, RemoteCheckpointToGcsCall)
        handed.append(handed_on(run.home, call.result))
        return answers(entry)(api, flow_run, call)

    harness.api.plays = [commits]
    assert harness.commit(result) == entry
    assert handed == [result]
    assert not list(run.home.files("answers"))


def test_result_of_a_remote_segment_is_stored_once(run: FakeRun) -> None:
    harness = LauncherHarness(run)
    result = on_the_tip(harness)
    harness.api.plays = [answers(result)]
    assert hand_on(run.home, harness.train()) == f"answers/{harness.api.started[0]['id']}.json"
    assert len(list(run.home.files("answers"))) == 1


def test_damaged_segment_is_dropped(run: FakeRun) -> None:
    harness = LauncherHarness(run)
    result = on_the_tip(harness)
    harness.api.plays = [
        answers(result),
        ends(failed(name="DamagedCheckpoint", message="other bytes")),
        answers(result),
    ]
    with pytest.raises(DamagedCheckpoint):
        harness.commit(harness.train())
    harness.train()
    assert len(harness.api.started) == 3


@pytest.mark.parametrize("state", [PENDING, RUNNING])
def test_running_commit_is_not_cancelled(run: FakeRun, state: FlowRunState) -> None:
    harness = LauncherHarness(run)
    result, entry = on_the_tip(harness), RunLog(run.home).entry(run.head.number)
    harness.api.plays = [answers(entry, *[state] * 5, COMPLETED)]
    stop = harness.file.spec.stop
    assert run_uninterrupted(lambda _: harness.commit(result), stop, within_seconds=1e-9) == entry
    assert harness.api.cancelled == []


def test_queued_commit_is_not_cancelled(run: FakeRun) -> None:
    harness = LauncherHarness(run, ends(SCHEDULED))
    with pytest.raises(StageStopped, match="continues by itself") as caught:
        run_uninterrupted(lambda _: harness.commit(on_the_tip(harness)), harness.file.spec.stop, within_seconds=1e-9)
    assert caught.value.reason == "time_budget"
    assert harness.api.cancelled == []


def test_stage_is_not_started_after_a_stop(run: FakeRun) -> None:
    harness = LauncherHarness(run)
    with pytest.raises(StageStopped, match="was not started"):
        run_uninterrupted(lambda _: harness.train(), harness.file.spec.stop, within_seconds=1e-9)
    assert harness.api.started == []


def test_orphans_are_cancelled_before_a_segment_starts(run: FakeRun) -> None:
    harness = LauncherHarness(run)
    ours, other_run, other_storage = (str(uuid.uuid4()) for _ in range(3))
    changes: dict[str, dict[str, str]] = {
        ours: {}, other_run: {"run": "another"}, other_storage: {"storage": "gs://elsewhere"},
    }  # fmt: skip
    for flow_run, changed in changes.items():
        call = json.loads(harness.sent())
        # Another version may have sent keys that this version does not know.
        harness.api.left[flow_run] = {
            "call": json.dumps({**call, "spec": {**call["spec"], **changed}, "unknown_key": "x"})
        }
    harness.api.left[str(uuid.uuid4())] = {"call": "by hand"}
    harness.api.states[ours] = [RUNNING]

    def commits_and_ends(api: Api, *_: Any) -> None:
        api.run.commit(170)
        api.states[ours] = [CANCELLED]

    harness.api.cancel = lambda *, flow_run: (harness.api.cancelled.append(flow_run), commits_and_ends(harness.api))  # type: ignore[method-assign,func-returns-value,assignment]
    result = harness.train()
    assert harness.api.cancelled == [ours]
    assert result.exit_reason == "superseded"
    assert harness.api.started == []


def test_cancelled_orphan_is_waited_for(run: FakeRun) -> None:
    harness = LauncherHarness(run, answers(staged(run)))
    flow_run = str(uuid.uuid4())
    harness.api.left[flow_run] = {"call": harness.sent()}
    harness.api.states[flow_run] = [CANCELLING, CANCELLING, CANCELLED]
    harness.train()
    assert harness.api.cancelled == []
    assert len(harness.api.states[flow_run]) == 1


def test_changed_user_code_is_refused_by_the_stage(run: FakeRun, tmp_path: Path) -> None:
    harness = LauncherHarness(run)
    digests = json.loads(harness.sent())["code"]
    assert set(digests) == {"model.py:build_model"}
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ModelError, match=r"model\.py"):
        require_same_code(digests, other)
    (other / "model.py").write_text("# only a comment more\ndef build_model():\n    pass\n")
    require_same_code(digests, other)
    (other / "model.py").write_text("def build_model():\n    return 1\n")
    with pytest.raises(InvalidInput, match="differs from the code"):
        require_same_code(digests, other)
    assert code_digests(harness.file.spec, other) != digests


def test_run_file_values_survive_the_call(run: FakeRun) -> None:
    options = "{when: 2026-01-31, rate: 1e-3, most: .inf, none: null, many: [1, 1.0, '1', true], deep: {a: b}}"
    settings = ["train.class_weight={0: 1, 7: 2.5}", "init.weights=[{source: a.keras, rename: {a: b}}]"]
    file = load_run_file(run.run_file(), [f"data.options={options}", *settings, "stages.prepare_data=a/b"])
    call, context = PrepareDataCall(spec=file.spec), RemoteContext(code_folder="/code", attempt="a" * 32)
    back = unpack(PrepareDataCall, pack(call, context))
    assert back == (call, context)
    assert repr(back[0].spec.data.options) == repr(file.spec.data.options)


def test_code_folder_of_the_deployment_is_sent(run: FakeRun) -> None:
    harness = LauncherHarness(run, answers(DATASET))
    file = load_run_file(run.run_file(), ["stages.prepare_data={deployment: a/b, code_folder: /code}"])
    harness.launcher.run(PREPARE_DATA, PrepareDataCall(spec=file.spec), harness.place)
    assert harness.api.started[0]["call"]["code_folder"] == "/code"


def test_deployment_of_another_flow_is_refused(run: FakeRun) -> None:
    file = load_run_file(run.run_file(), ["stages.train_segment=train-run/docker"])
    with pytest.raises(InvalidInput, match=r"of the flow train-run.*use train-segment/docker"):
        runner_for(file.spec, InProcess(), ask=Api(run), attempt="a" * 32, telemetry=EventRecorder())


def test_deployments_are_refused_where_nobody_asks_prefect(run: FakeRun) -> None:
    opened = OpenedRun.open(load_run_file(run.run_file(), ["stages.evaluate=evaluate/docker"]))
    with pytest.raises(InvalidInput, match=r"stages\.evaluate\.deployment: .*baton run .*or remove the key"):
        train(opened, Goal.of(opened.spec), telemetry=EventRecorder())


def test_evaluation_devices_must_divide_the_batch(run: FakeRun) -> None:
    remote = "stages.evaluate={deployment: evaluate/docker, accelerator: {kind: cpu, replicas: 3}}"
    with pytest.raises(AcceleratorError, match="not divisible by 3 replicas"):
        preflight(OpenedRun.open(load_run_file(run.run_file(), [remote])))
