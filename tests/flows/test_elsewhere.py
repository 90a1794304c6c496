"""A stage asked of flow runs that fail, crash, vanish, are cancelled or answer late: what is asked next, what is said.

Prefect's API is played here, state by state; test_stages_elsewhere.py has a real server, worker and real kills.
"""

import json
import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import httpx
import pytest
from fake_run import FakeRun
from ledger_making import record_of
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Failed, Pending, Running, Scheduled

from flows.answers import forget_segments, write_answer
from flows.elsewhere import Elsewhere
from flows.flow_runs import FlowRuns
from flows.goal import preflight
from flows.launch import Launcher, code_digests, forgetting, stages_of
from flows.relay import StageStopped
from flows.stages import require_same_code
from tasks.foundation.contracts.call import CheckpointToGcsCall, PrepareDataCall, StageCall, TrainSegmentCall
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.log_entry import Entry
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.contracts.segment import MetricRow, SegmentRequest, SegmentResult
from tasks.foundation.errors import (
    AcceleratorError,
    BatonError,
    BlowUp,
    DamagedCheckpoint,
    InvalidInput,
    ModelError,
    NoProgress,
    SourceError,
    StageLost,
    StaleWriter,
)
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.stops.holding import hold
from tasks.foundation.telemetry.events import Event, Note

DATASET = DatasetRef(
    folder="datasets/0123456789ab",
    content_digest="c" * 64,
    train_examples=10,
    validation_examples=10,
    already_prepared=True,
)
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
        json.dumps(parameters, allow_nan=False)  # as Prefect's client will
        found = uuid.uuid4()
        self.started.append({"deployment": deployment, "id": found, "call": json.loads(parameters["call"]), **facts})
        keys = self.started[-1]["call"]
        call = CheckpointToGcsCall if "result" in keys else TrainSegmentCall if "request" in keys else PrepareDataCall
        told = call.from_json(parameters["call"].encode(), where="call", error=InvalidInput)
        self.states[found] = self.plays.pop(0)(self, found, told)
        return found

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


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    (tmp_path / "model.py").write_text("def build_model():\n    pass\n")
    return FakeRun(tmp_path).train(100)


class Asked:
    """A launcher on a played API."""

    def __init__(self, run: FakeRun, *plays: Play, stop: Mapping[str, Any] | None = None) -> None:
        names = ("prepare_data", "train_segment", "checkpoint_to_gcs")
        settings = [f"stages.{name}={name.replace('_', '-')}/docker" for name in names]
        self.file = load_run_file(
            run.run_file(), [*settings, *(f"stop.{key}={value}" for key, value in (stop or {}).items())]
        )
        self.run, self.api, self.heard = run, Api(run, *plays), Heard()
        self.slept = 0.0
        elsewhere = Elsewhere(
            flow_runs=self.api,  # type: ignore[arg-type]
            attempt="a" * 32,
            clock=lambda: self.slept,
            sleep=self.sleep,
        )
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


@pytest.mark.parametrize("kind", [StaleWriter, ModelError, SourceError, DamagedCheckpoint])
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


def test_devices_that_go_are_asked_for_again(run: FakeRun) -> None:
    asked = Asked(run, ends(Failed(name="AcceleratorLost", message="the TPU is gone")), answers(staged(run)))
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


def test_what_was_staged_before_a_change_is_forgotten(run: FakeRun) -> None:
    asked = Asked(run, answers(staged(run)))
    write_answer(run.home, "left", on_the_tip(asked))
    forget_segments(run.home)
    asked.train()
    assert len(asked.api.started) == 1


class Told(BaseException):
    pass


@contextmanager
def handler() -> Iterator[None]:
    def handle(*_: object) -> None:
        raise Told

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def test_whoever_is_told_to_go_has_its_stage_go_and_waits_for_it(run: FakeRun) -> None:
    def is_told(api: Api, _flow_run: UUID, _call: StageCall) -> list[State | None]:
        api.after_cancel = [Running(), Running(), Cancelled()]
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return [Running()]

    asked = Asked(run, is_told)
    with handler(), pytest.raises(Told):
        asked.train()
    assert asked.api.cancelled == [asked.api.started[0]["id"]]
    (states,) = asked.api.states.values()
    assert len(states) == 1  # it was waited for


def test_a_stage_that_does_not_go_is_not_waited_for_for_ever(run: FakeRun) -> None:
    def is_told(api: Api, _flow_run: UUID, _call: StageCall) -> list[State | None]:
        api.after_cancel = [Running()]
        os.kill(os.getpid(), signal.SIGTERM)
        return [Running()]

    with handler(), pytest.raises(Told):
        Asked(run, is_told, stop={"grace_seconds": 2}).train()


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
    assert hold(lambda _: asked.commit(result), stop, within_seconds=1e-9) == entry
    assert asked.api.cancelled == []


def test_a_commit_that_nobody_begins_is_left_to_itself(run: FakeRun) -> None:
    asked = Asked(run, ends(Scheduled()))
    with pytest.raises(StageStopped, match="goes on by itself") as caught:
        hold(lambda _: asked.commit(on_the_tip(asked)), asked.file.spec.stop, within_seconds=1e-9)
    assert caught.value.reason == "time_budget"
    assert asked.api.cancelled == []


def test_what_is_not_begun_yet_is_not_begun_any_more(run: FakeRun) -> None:
    asked = Asked(run)
    with pytest.raises(StageStopped, match="was not begun"):
        hold(lambda _: asked.train(), asked.file.spec.stop, within_seconds=1e-9)
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


def test_flow_runs_that_were_cancelled_long_ago_are_not_waited_for() -> None:
    now = datetime.now(UTC)
    states = [Running(), Cancelling(timestamp=now), Cancelling(timestamp=now - timedelta(hours=1))]
    found = [SimpleNamespace(id=number, state=state, parameters={}) for number, state in enumerate(states)]
    client = SimpleNamespace(read_flow_runs=lambda **_: found)
    runs = FlowRuns(telemetry=Heard(), connect=lambda: nullcontext(client))  # type: ignore[arg-type]
    assert runs.unfinished(["baton"], lambda _: True) == [0, 1]


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


def test_an_api_that_is_away_is_waited_for_and_at_last_given_up() -> None:
    heard, slept = Heard(), [0.0]

    def sleep(seconds: float) -> None:
        slept[0] += seconds

    runs = FlowRuns(telemetry=heard, connect=nullcontext, clock=lambda: slept[0], sleep=sleep)  # type: ignore[arg-type]
    times = []

    def comes_back(_client: object) -> str:
        times.append(slept[0])
        if len(times) < 4:
            raise httpx.ConnectError("refused")
        return "here"

    assert hold(lambda _: runs._patiently(comes_back), StopSpec()) == "here"
    assert times == sorted(set(times))
    assert heard.text.count("does not answer") == 1

    def stays_away(_client: object) -> str:
        raise httpx.ConnectError("refused")

    began = slept[0]
    with pytest.raises(StageLost) as caught:
        hold(lambda _: runs._patiently(stays_away), StopSpec())
    assert caught.value.exit_code == 3
    assert slept[0] - began >= 600

    # Whoever has been told to go has not that much time.
    began = slept[0]
    with pytest.raises(StageLost):
        hold(lambda _: runs._patiently(stays_away), StopSpec(), within_seconds=1e-9)
    assert slept[0] - began < 30
