"""The flows of deployments; the names of their flow runs; and the run that the command trains in a flow run."""

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import Flow
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.logging import disable_run_logger
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from baton.flows.evaluating import Chosen, Step, chosen_of, differences, evaluate_again
from baton.flows.opened_run import OpenedRun
from baton.flows.result import RelayResult
from baton.flows.runner import StageStopped
from baton.flows.supervisor import Outcome
from baton.flows.with_prefect import record
from baton.flows.with_prefect import run_flows as module
from baton.flows.with_prefect.artifacts import ArtifactPublisher
from baton.flows.with_prefect.record import supervise
from baton.flows.with_prefect.run_flows import (
    evaluate_best,
    evaluated,
    stopped,
    train_as_train_run,
    train_run,
    verify,
)
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import Evaluation
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import (
    BatonError,
    DamagedCheckpoint,
    IdentityChanged,
    InvalidInput,
    NoSuchRun,
    RunAtWork,
    RunFileError,
    RunLogError,
)
from baton.tasks.foundation.telemetry.events import Committed, Ended, Sink
from tests.flows.with_prefect.test_artifacts import FakeArtifactStore
from tests.support.event_recorder import EventRecorder
from tests.support.fake_prefect_api import CANCELLED, COMPLETED, DATASET, Api, Play, answers, ends, run_with_code
from tests.support.fake_run import FakeRun, flip_a_byte

REACHED = Ended(
    exit_code=3,
    result=RelayResult(
        run="digits", home="/runs/digits", step=150, checkpoint="c", state_digest="d", segments=1, target=400,
        report=None, metrics={}, exit_reason="until_step",
    ).model_dump_json(),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_server() -> Iterator[None]:
    """Without an address, Prefect would start a server for the task runs of stages."""
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}):
        yield


@pytest.mark.parametrize("flow", [train_run, evaluate_best, verify])
@pytest.mark.parametrize(
    ("file", "overrides", "name"),
    [
        ("run.yaml", None, "digits"),
        ("run.yaml", ["run=other"], "other"),
        ("run.yaml", ["train.stepz=3"], "run.yaml"),
        ("not-there.yaml", [], "not-there.yaml"),
        ("", [], "."),
    ],
)
def test_flow_run_is_named_after_the_run_or_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flow: Flow[..., Any], *, file: str, overrides: Any, name: str
) -> None:
    FakeRun(tmp_path).run_file()
    given = {"run_file": str(tmp_path / file) if file else "", "overrides": overrides}
    monkeypatch.setattr(module, "flow_run", SimpleNamespace(parameters=given))
    assert callable(flow.flow_run_name)
    target = " → 400" if flow is train_run and not name.endswith((".yaml", ".")) else ""
    assert flow.flow_run_name() == f"{name}{target}"
    if name.endswith((".yaml", ".")):
        state = flow.fn(**given)
        assert state.is_failed()
        assert str(state.message).startswith("RunFileError: ")
        assert "\n" not in str(state.message)  # the engine prints it with repr
        assert isinstance(state.data, RunFileError)


def test_flow_run_that_trains_is_named_after_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"run_file": str(FakeRun(tmp_path).run_file()), "overrides": None, "until_step": 150}
    monkeypatch.setattr(module, "flow_run", SimpleNamespace(parameters=given))
    assert callable(train_run.flow_run_name)
    assert train_run.flow_run_name() == "digits → 150"
    given |= {"overrides": ["train.steps=null", "train.epochs=3"], "until_step": None}
    assert train_run.flow_run_name() == "digits → epoch 3"


class ShortTrainer:
    """A trainer that ends at once, or when it is stopped if it is `endless`.

    Attributes:
        words: its arguments.
    """

    words: tuple[str, ...] = ()
    ended = REACHED
    is_endless = False

    def __init__(self, words: Sequence[str], readers: Sequence[Sink], **_: object) -> None:
        type(self).words = tuple(words)
        self._is_stopped = threading.Event()
        for reader in readers:
            reader.emit(Committed(step=150, path="checkpoints/x", size=1, metrics={}))

    @property
    def process(self) -> Any:
        return SimpleNamespace(returncode=None if self._runs() else self.ended.exit_code, wait=self._is_stopped.wait)

    def _runs(self) -> bool:
        return self.is_endless and not self._is_stopped.is_set()

    def send(self, number: int) -> None:
        assert number == signal.SIGTERM
        self._is_stopped.set()

    def outcome(self) -> Outcome:
        return Outcome(returncode=self.ended.exit_code, ended=None if self.ended.crashed else self.ended)

    def wait(self, *_: signal.Signals) -> Outcome:
        return self.outcome()


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> type[ShortTrainer]:
    class OfThisTest(ShortTrainer):
        pass

    monkeypatch.setattr(record, "Trainer", OfThisTest)
    return OfThisTest


def ends_with(fault: BatonError) -> Ended:
    return Ended(exit_code=fault.exit_code, error=ErrorReport.of(fault))


@pytest.mark.parametrize(
    ("ended", "name", "message"),
    [
        (REACHED, "Completed", "digits is at step 150 of 400"),
        (ends_with(RunAtWork("another process trains it")), "Stopped", "another process trains it"),
        (ends_with(IdentityChanged("another")), "Failed", "IdentityChanged: another"),
        (Ended(exit_code=1, crashed="killed"), "Crashed", "the process of the training digits ended with code 1"),
        (Ended(exit_code=3, stopped="sigterm"), None, ""),
        (Ended(exit_code=3, stopped="sigint"), None, ""),
        (Ended(exit_code=3, result=REACHED.result.replace("until_step", "preempted")), None, ""),
    ],
)
def test_flow_run_of_a_deployment_ends_as_its_trainer(
    trainer: type[ShortTrainer], tmp_path: Path, ended: Ended, name: str | None, message: str
) -> None:
    """None: it crashes, as Prefect has it for a process that a signal ends."""
    file, trainer.ended = str(run_with_code(tmp_path).run_file()), ended
    with disable_run_logger(), nullcontext() if name else pytest.raises(TerminationSignal):
        state = train_run.fn(file, ["train.seed=1"], until_step=150, accept=["train.seed"], take_over=True)
        assert (state.name, state.message) == (name, message)
    words = ("--set", "train.seed=1", "--accept", "train.seed", "--take-over", "--until-step", "150")
    assert trainer.words == (file, *words)


def test_cancelled_flow_run_stops_its_trainer(
    trainer: type[ShortTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, told = FakeArtifactStore(), EventRecorder()
    store.cancelled, trainer.is_endless, trainer.ended = True, True, Ended(exit_code=3, stopped="sigterm")
    monkeypatch.setattr(record, "ArtifactPublisher", partial(ArtifactPublisher, store=store))
    run = OpenedRun.open(load_run_file(run_with_code(tmp_path).run_file(), []))
    assert supervise([], run, logger=told).ended == Ended(exit_code=3, stopped=record.CANCELLED)
    assert told.notes == ["the flow run was cancelled in Prefect"]


@pytest.mark.parametrize(
    ("ended", "name"),
    [
        (REACHED, "Completed"),
        (ends_with(IdentityChanged("another")), "Failed"),
        (Ended(exit_code=3, stopped="sigterm"), "Stopped"),
    ],
)
def test_command_with_remote_stages_trains_in_its_flow_run(
    trainer: type[ShortTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Ended, name: str
) -> None:
    run = OpenedRun.open(load_run_file(run_with_code(tmp_path).run_file(), ["stages.evaluate=evaluate/docker"]))
    trainer.ended, told, states = ended, EventRecorder(), list[State[Any]]()

    def engine(flow: Flow[..., Any], *, return_state: bool, **_: object) -> None:
        assert return_state
        with disable_run_logger():
            states.append(flow.fn())

    monkeypatch.setattr(Flow, "__call__", engine)
    assert train_as_train_run(run, ["run.yaml"], {"run_file": "run.yaml"}, console=told) == ended
    assert trainer.words == ("run.yaml",)
    assert [state.name for state in states] == [name]
    assert [type(event) for event in told.events] == [Committed]


def file_of(run: FakeRun, *overrides: str) -> OpenedRun:
    (run.folder / "model.py").write_text("def build_model():\n    raise NotImplementedError\n")
    return OpenedRun.open(load_run_file(run.run_file(), overrides))


def fixed_evaluation(accuracy: float, seen: list[int] | None = None) -> "FixedEvaluation":
    return FixedEvaluation(accuracy, [] if seen is None else seen)


class FixedEvaluation:
    """Replaces the stage with a fixed accuracy."""

    def __init__(self, accuracy: float, seen: list[int]) -> None:
        self.accuracy = accuracy
        self.seen = seen

    def __call__(self, chosen: Chosen) -> Evaluation:
        self.seen.append(chosen.checkpoint.step)
        metrics = {"accuracy": self.accuracy}
        return Evaluation(checkpoint=chosen.checkpoint, metrics=metrics, examples=10, seconds=0.1, keep_best=None)


@pytest.mark.parametrize(("requested", "step", "logged"), [("best", 100, 0.9), (None, 300, 0.8), (200, 200, None)])
def test_best_newest_or_given_step_is_chosen(tmp_path: Path, requested: Step, step: int, logged: float | None) -> None:
    run = FakeRun(tmp_path).train(100)
    run.evaluate(0.9)
    run.train(200, 300)
    run.evaluate(0.8)
    chosen = chosen_of(file_of(run), requested)
    assert chosen.checkpoint.step == step
    assert chosen.logged == (None if logged is None else {"accuracy": logged})


@pytest.mark.parametrize(
    ("overrides", "requested", "error", "words"),
    [
        (["run=another"], "best", NoSuchRun, "no run is at .*another: the run file has not been run yet"),
        ([], "best", InvalidInput, "nothing was evaluated by checkpoint.keep_best; name a step, or none"),
        ([], 150, InvalidInput, "retains no checkpoint at step 150; it has: 0, 100"),
        (["data.validation_fraction=0"], "best", RunFileError, "no validation examples"),
        (["train.seed=7"], "best", IdentityChanged, "train.seed: 0 -> 7"),
        (["model=model.py:other"], "best", InvalidInput, "other"),
    ],
)
def test_unusable_run_is_refused_and_nothing_is_written(
    tmp_path: Path, overrides: list[str], requested: Step, error: type[BatonError], words: str
) -> None:
    run = FakeRun(tmp_path).train(100)
    file = file_of(run, *overrides)
    before = run.files()
    seen: list[int] = []
    with pytest.raises(error, match=words):
        evaluate_again(file, requested, fixed_evaluation(0.5, seen), EventRecorder())
    assert run.files() == before
    assert seen == []


def test_run_without_checkpoint_or_first_entry_is_refused(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    file = file_of(run)
    run.path("log/00000001.json").unlink()  # the commit of step 0; only the origin is left
    with pytest.raises(InvalidInput, match="retains no checkpoint; it has: none"):
        chosen_of(file, None)
    torn = FakeRun(tmp_path, "torn")
    for name in ("log/00000000.json", "log/HINT"):
        torn.path(name).unlink()
    with pytest.raises(RunLogError, match=r"00000000\.json is missing"):
        chosen_of(OpenedRun.open(load_run_file(file.file, ["run=torn"])), "best")


@pytest.mark.parametrize(("accuracy", "agrees"), [(0.9, True), (0.9 * (1 + 5e-6), True), (0.9 * (1 + 2e-5), False)])
def test_difference_from_the_log_is_reported(tmp_path: Path, accuracy: float, *, agrees: bool) -> None:
    run = FakeRun(tmp_path).train(100)
    run.evaluate(0.9)
    recorder = EventRecorder()
    result = evaluate_again(file_of(run), "best", fixed_evaluation(accuracy), recorder)
    assert (result.step, result.agrees, result.logged) == (100, agrees, {"accuracy": 0.9})
    assert result.checkpoint == f"{run.home.uri}/{run.tip.path}"
    assert [("step 100" in text, "the log has 0.9" in text) for text in recorder.warnings] == [(True, True)] * (
        not agrees
    )


@pytest.mark.parametrize(
    ("accuracy", "name", "message"),
    [
        (0.9, "Completed", "step 100, validation: accuracy 0.9; same as the log"),
        (0.8, "Differs", "step 100, validation: accuracy 0.8; DIFFERS from the log"),
    ],
)
def test_last_state_shows_step_and_metrics(tmp_path: Path, accuracy: float, name: str, message: str) -> None:
    run = FakeRun(tmp_path).train(100)
    run.evaluate(0.9)
    state = evaluated(evaluate_again(file_of(run), "best", fixed_evaluation(accuracy), EventRecorder()))
    assert (state.type.value, state.name, state.message) == ("COMPLETED", name, message)


def test_no_comparison_without_an_evaluation_in_the_log(tmp_path: Path) -> None:
    recorder = EventRecorder()
    result = evaluate_again(file_of(FakeRun(tmp_path).train(100)), None, fixed_evaluation(0.5), recorder)
    assert (result.agrees, result.logged, result.metrics) == (None, None, {"accuracy": 0.5})
    assert recorder.warnings == []


def test_missing_metrics_differ_and_undefined_ones_agree() -> None:
    assert differences({"loss": math.nan}, {"loss": math.nan}) == ""
    assert differences({"loss": 0.0}, {"loss": 0.0}) == ""
    assert differences({"loss": 1.0}, {"loss": math.nan}) == "loss is 1, the log has nan"
    assert differences({"a": 1.0}, {"b": 2.0}) == "b is absent, the log has 2; a is 1, the log has absent"


def test_another_checkpoint_is_chosen_if_the_first_was_retired(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(100)
    seen: list[int] = []

    def evaluate(chosen: Chosen) -> Evaluation:
        if not seen:
            seen.append(chosen.checkpoint.step)
            run.train(200)
            raise DamagedCheckpoint("manifest.json is not there")
        return fixed_evaluation(0.5, seen)(chosen)

    recorder = EventRecorder()
    assert evaluate_again(file_of(run), None, evaluate, recorder).step == 200
    assert seen == [100, 200]
    assert ["reading the log again" in text for text in recorder.warnings] == [True]


def test_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(100)

    def evaluate(chosen: Chosen) -> Evaluation:
        raise DamagedCheckpoint(f"{chosen.checkpoint.path} differs")

    with pytest.raises(DamagedCheckpoint, match="differs"):
        evaluate_again(file_of(run), None, evaluate, EventRecorder())


def remote_stages(monkeypatch: pytest.MonkeyPatch, run: FakeRun, *plays: Play) -> tuple[Api, list[str]]:
    """Return a fake of Prefect's API, and settings that run two stages as deployments."""
    (run.folder / "model.py").write_text("def build_model():\n    raise NotImplementedError\n")
    api = Api(run, *plays)
    monkeypatch.setattr(module, "answer", api)
    return api, [f"stages.{name}={name.replace('_', '-')}/docker" for name in ("prepare_data", "evaluate")]


def dataset_of(run: FakeRun) -> DatasetRef:
    """The dataset that the run began with, as the stage that prepares it answers."""
    return DATASET.model_copy(update={"content_digest": run.head.identity["data.content_digest"]})


def test_remote_stages_belong_to_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path).train(100)
    run.evaluate(0.9)
    keys = set()
    for _ in range(2):
        done = fixed_evaluation(0.9)(chosen_of(file_of(run), "best"))
        api, settings = remote_stages(monkeypatch, run, answers(dataset_of(run), COMPLETED), answers(done, COMPLETED))
        with disable_run_logger():
            state = evaluate_best.fn(str(run.run_file()), settings)
        assert state.message == "step 100, validation: accuracy 0.9; same as the log"
        assert [started["call"]["attempt"] for started in api.started] == [None, None]
        keys |= {started["key"] for started in api.started}
    assert len(keys) == 4


def test_cancelled_remote_stage_cancels_the_flow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path).train(100)
    _, settings = remote_stages(monkeypatch, run, answers(dataset_of(run), COMPLETED), ends(CANCELLED))
    with disable_run_logger():
        state = evaluate_best.fn(str(run.run_file()), settings)
    assert state.type.value == "CANCELLED"
    assert state.message.startswith("nothing was evaluated: evaluate step 100 (flow run ")


@pytest.mark.parametrize("by", ["file", "home"])
def test_damage_is_quarantined_and_fails_the_flow_run(tmp_path: Path, by: str) -> None:
    run = FakeRun(tmp_path).train(100).train(200)
    _, older, tip = run.head.retained
    address = str(run.run_file()) if by == "file" else run.address
    with disable_run_logger():
        whole = verify.fn(address)
        flip_a_byte(run.path(f"{older.path}/ckpt.index"))
        damaged = verify.fn(address)
        again = verify.fn(address)
    assert whole.is_completed()
    assert (damaged.name, damaged.is_failed()) == ("Damaged", True)
    assert "; the checkpoint is quarantined now\n" in str(damaged.message)
    assert (run.head.quarantined, run.head.tip) == ((older,), tip)
    assert again.is_completed()
    assert str(again.message).endswith("; 1 quarantined earlier, not read")


def test_flow_run_crashes_when_its_machine_is_preempted() -> None:
    with pytest.raises(TerminationSignal):
        stopped(StageStopped("preempted", "evaluate was cancelled"))
