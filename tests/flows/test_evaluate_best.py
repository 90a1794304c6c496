"""Which checkpoint the scheduled evaluation takes, and what it says of it. Metrics are invented; no TensorFlow."""

import math
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger
from prefect.states import Cancelled, Completed

from flows.evaluate_best import Chosen, Step, chosen_of, differences, ended, evaluate_again, evaluate_best, stopped
from flows.launching import launcher
from flows.relay import StageStopped
from flows.train_run import MachineIsGoing
from tasks.foundation.contracts.log_entry import Evaluation
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.errors import (
    BatonError,
    DamagedCheckpoint,
    IdentityChanged,
    InvalidInput,
    NoSuchRun,
    RunFileError,
    RunLogError,
)
from tests.support.fake_prefect_api import DATASET, Api, Play, answers, ends
from tests.support.fake_run import FakeRun
from tests.support.lab import Heard


def file_of(run: FakeRun, *overrides: str) -> RunFile:
    (run.folder / "model.py").write_text("def build_model():\n    raise NotImplementedError\n")
    return load_run_file(run.run_file(), overrides)


def giving(accuracy: float, seen: list[int] | None = None) -> "Evaluating":
    return Evaluating(accuracy, [] if seen is None else seen)


class Evaluating:
    """In place of the stage."""

    def __init__(self, accuracy: float, seen: list[int]) -> None:
        self.accuracy = accuracy
        self.seen = seen

    def __call__(self, chosen: Chosen) -> Evaluation:
        self.seen.append(chosen.checkpoint.step)
        metrics = {"accuracy": self.accuracy}
        return Evaluation(checkpoint=chosen.checkpoint, metrics=metrics, examples=10, seconds=0.1, keep_best=None)


@pytest.mark.parametrize(("asked", "step", "logged"), [("best", 100, 0.9), (None, 300, 0.8), (200, 200, None)])
def test_the_best_the_newest_or_a_step_and_what_the_log_says_of_it(
    tmp_path: Path, asked: Step, step: int, logged: float | None
) -> None:
    run = FakeRun(tmp_path).train(100)
    run.evaluate(0.9)
    run.train(200, 300)
    run.evaluate(0.8)
    chosen = chosen_of(file_of(run), asked)
    assert chosen.checkpoint.step == step
    assert chosen.logged == (None if logged is None else {"accuracy": logged})


def test_where_nothing_has_been_evaluated_the_newest_is_the_best_known(tmp_path: Path) -> None:
    assert chosen_of(file_of(FakeRun(tmp_path).train(100, 200)), "best").checkpoint.step == 200


@pytest.mark.parametrize(
    ("overrides", "asked", "error", "words"),
    [
        (["run=another"], "best", NoSuchRun, "no run is at .*another: the run file has not been run yet"),
        ([], 150, InvalidInput, "retains no checkpoint at step 150; it has: 0, 100"),
        (["data.validation_fraction=0"], "best", RunFileError, "no example is held out"),
        (["train.seed=7"], "best", IdentityChanged, "train.seed: 0 -> 7"),
        (["model=model.py:other"], "best", InvalidInput, "other"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_and_nothing_is_written(
    tmp_path: Path, overrides: list[str], asked: Step, error: type[BatonError], words: str
) -> None:
    run = FakeRun(tmp_path).train(100)
    file = file_of(run, *overrides)
    before = run.files()
    seen: list[int] = []
    with pytest.raises(error, match=words):
        evaluate_again(file, asked, giving(0.5, seen), Heard())
    assert run.files() == before
    assert seen == []


def test_a_run_that_has_committed_nothing_or_lost_an_entry_is_said_to_be_so(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    file = file_of(run)
    run.path("log/00000001.json").unlink()  # step 0's; what is left is a run that was begun and no more
    with pytest.raises(InvalidInput, match="retains no checkpoint; it has: none"):
        chosen_of(file, "best")
    torn = FakeRun(tmp_path, "torn")
    for name in ("log/00000000.json", "log/HINT"):
        torn.path(name).unlink()
    with pytest.raises(RunLogError, match=r"00000000\.json is not there"):
        chosen_of(load_run_file(file.path, ["run=torn"]), "best")


@pytest.mark.parametrize(("accuracy", "agrees"), [(0.9, True), (0.9 * (1 + 5e-6), True), (0.9 * (1 + 2e-5), False)])
def test_it_is_said_whether_the_log_is_right(tmp_path: Path, accuracy: float, *, agrees: bool) -> None:
    run = FakeRun(tmp_path).train(100)
    run.evaluate(0.9)
    heard = Heard()
    result = evaluate_again(file_of(run), "best", giving(accuracy), heard)
    assert (result.step, result.agrees, result.logged) == (100, agrees, {"accuracy": 0.9})
    assert result.checkpoint == f"{run.home.uri}/{run.tip.path}"
    assert [("step 100" in text, "the log says 0.9" in text) for text in heard.warnings] == [(True, True)] * (
        not agrees
    )


@pytest.mark.parametrize(
    ("accuracy", "name", "message"),
    [
        (0.9, "Completed", "step 100: accuracy 0.9; as the log says"),
        (0.8, "Differs", "step 100: accuracy 0.8; NOT as the log says"),
    ],
)
def test_the_state_of_the_flow_run_tells_the_step_and_the_metrics(
    tmp_path: Path, accuracy: float, name: str, message: str
) -> None:
    run = FakeRun(tmp_path).train(100)
    run.evaluate(0.9)
    state = ended(evaluate_again(file_of(run), "best", giving(accuracy), Heard()))
    assert (state.type.value, state.name, state.message) == ("COMPLETED", name, message)


def test_without_an_evaluation_in_the_log_there_is_nothing_to_agree_with(tmp_path: Path) -> None:
    heard = Heard()
    result = evaluate_again(file_of(FakeRun(tmp_path).train(100)), "best", giving(0.5), heard)
    assert (result.agrees, result.logged, result.metrics) == (None, None, {"accuracy": 0.5})
    assert heard.warnings == []


def test_metrics_that_only_one_of_them_has_differ_and_undefined_ones_do_not() -> None:
    assert differences({"loss": math.nan}, {"loss": math.nan}) == ""
    assert differences({"loss": 0.0}, {"loss": 0.0}) == ""
    assert differences({"loss": 1.0}, {"loss": math.nan}) == "loss is 1, the log says nan"
    assert differences({"a": 1.0}, {"b": 2.0}) == "b is absent, the log says 2; a is 1, the log says absent"


def test_a_checkpoint_that_was_retired_meanwhile_is_looked_up_again(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(100)
    seen: list[int] = []

    def evaluate(chosen: Chosen) -> Evaluation:
        if not seen:
            seen.append(chosen.checkpoint.step)
            run.train(200)
            raise DamagedCheckpoint("manifest.json is not there")
        return giving(0.5, seen)(chosen)

    heard = Heard()
    assert evaluate_again(file_of(run), None, evaluate, heard).step == 200
    assert seen == [100, 200]
    assert ["looking at the log again" in text for text in heard.warnings] == [True]


def test_a_checkpoint_that_is_damaged_stays_damaged(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(100)

    def evaluate(chosen: Chosen) -> Evaluation:
        raise DamagedCheckpoint(f"{chosen.checkpoint.path} differs")

    with pytest.raises(DamagedCheckpoint, match="differs"):
        evaluate_again(file_of(run), None, evaluate, Heard())


def elsewhere(monkeypatch: pytest.MonkeyPatch, run: FakeRun, *plays: Play) -> tuple[Api, list[str]]:
    """Prefect's API, played, and the settings with which stages are asked of it."""
    (run.folder / "model.py").write_text("def build_model():\n    raise NotImplementedError\n")
    api = Api(run, *plays)
    monkeypatch.setattr(launcher, "FlowRuns", lambda **_: api)
    return api, [f"stages.{name}={name.replace('_', '-')}/docker" for name in ("prepare_data", "evaluate")]


def test_stages_elsewhere_are_told_that_they_are_no_part_of_the_runs_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(tmp_path).train(100)
    run.evaluate(0.9)
    keys = set()
    for _ in range(2):
        done = giving(0.9)(chosen_of(file_of(run), "best"))
        api, settings = elsewhere(monkeypatch, run, answers(DATASET, Completed()), answers(done, Completed()))
        with disable_run_logger():
            state = evaluate_best.fn(str(run.run_file()), settings)
        assert state.message == "step 100: accuracy 0.9; as the log says"
        assert [started["call"]["attempt"] for started in api.started] == [None, None]
        keys |= {started["key"] for started in api.started}
    assert len(keys) == 4


def test_a_stage_that_is_cancelled_elsewhere_cancels_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path).train(100)
    _, settings = elsewhere(monkeypatch, run, answers(DATASET, Completed()), ends(Cancelled()))
    with disable_run_logger():
        state = evaluate_best.fn(str(run.run_file()), settings)
    assert state.type.value == "CANCELLED"
    assert state.message.startswith("nothing was evaluated: evaluate step 100 (flow run ")


def test_where_its_own_machine_is_taken_it_has_crashed() -> None:
    with pytest.raises(MachineIsGoing):
        stopped(StageStopped("preempted", "evaluate was told to go"))
