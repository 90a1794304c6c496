"""Runs whose length is given in epochs: the target, evaluations and segments follow from the number of examples."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from baton.flows import result as results
from baton.flows.commands.main import main
from baton.flows.opened_run import OpenedRun
from baton.flows.proof.execute import Execution, FreshProcesses
from baton.flows.result import Goal, RelayResult
from baton.flows.train import train as train_to
from baton.tasks.foundation.contracts.log_entry import Commit, Evaluation, MetricRow
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import IdentityChanged, RunFileError
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Training
from tests.support.event_recorder import EventRecorder
from tests.support.lab import lab_of

MODEL = """
def build(rate=0.01):
    x = keras.Input((6,))
    y = keras.layers.Dropout(0.2)(keras.layers.Dense(5, activation="tanh")(x))
    model = keras.Model(x, keras.layers.Dense(3)(y))
    model.compile(keras.optimizers.Adam(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def scheduled(*, steps_per_epoch, train_steps=None):
    assert (steps_per_epoch, train_steps) in {(5, 9), (5, 14)}, (steps_per_epoch, train_steps)
    return build(keras.optimizers.schedules.CosineDecay(0.01, train_steps))


class Reads(keras.metrics.Metric):
    # Counts how often its result was read, in each step and by Baton.
    def __init__(self):
        super().__init__(name="reads")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, *_, **__):
        pass

    def result(self):
        self.count.assign(self.count + 1.0)
        return self.count + 0.0


def counting():
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=[Reads()])
    return model
"""
CALLBACKS = """
import keras


def monitors():
    return [
        keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=100.0),
        keras.callbacks.ModelCheckpoint("best.keras", monitor="val_loss", save_best_only=True),
    ]
"""


def run_file(folder: Path, name: str, *overrides: str) -> Any:
    """A run of 44 training examples in batches of 10: an epoch has 4.4 steps."""
    if not (folder / "code").exists():
        code = lab_of(folder, MODEL).code
        (code / "callbacks.py").write_text(CALLBACKS, encoding="utf-8")
    content = {
        "run": name,
        "storage": str(folder / "storage"),
        "data": {"source": "data.py:load", "validation_fraction": 0.2, "shard_examples": 9},
        "model": "model.py:build",
        "train": {"epochs": 3, "global_batch_size": 10, "log_every_steps": 2},
        "evaluate": {"every": "epoch"},
        "accelerator": {"kind": "cpu"},
    }
    path = folder / "code" / "run.yaml"
    path.write_text(json.dumps(content), encoding="utf-8")
    return load_run_file(path, overrides)


def train(run: Any, *until: int, accept: tuple[str, ...] = (), recorder: EventRecorder | None = None) -> RelayResult:
    """Train to each of the steps in turn, each time like a new process, and then to the end."""
    telemetry = EventRecorder() if recorder is None else recorder
    for step in until:
        PROCESS_STATE.forget()
        train_to(OpenedRun.open(run), Goal.of(run.spec, until_step=step), telemetry=telemetry, accept=accept)
    PROCESS_STATE.forget()
    return train_to(OpenedRun.open(run), Goal.of(run.spec), telemetry=telemetry, accept=accept)


def bodies(run: Any, kind: type[Any]) -> list[Any]:
    entries = RunLog(LocalStorage(Path(run.spec.storage)).at(run.spec.run)).entries()
    return [entry.body for entry in entries if isinstance(entry.body, kind)]


def rows_of(run: Any) -> list[MetricRow]:
    return [row for body in bodies(run, Commit) for row in body.history]


def steps(run: Any, kind: type[Any]) -> list[int]:
    return [body.checkpoint.step for body in bodies(run, kind)]


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "write_report", lambda _home, **_title: None)


@pytest.mark.slow
def test_run_in_epochs_is_exact_and_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = EventRecorder()
    straight = train(run_file(tmp_path, "straight"), recorder=recorder)
    assert (straight.exit_reason, straight.step, straight.target, straight.epoch) == ("complete", 14, 14, 140 / 44)
    assert steps(run_file(tmp_path, "straight"), Evaluation) == [5, 9, 14]
    epochs = {event.step: event.epoch for event in recorder.events if isinstance(event, Training)}
    assert epochs[4] == 40 / 44
    cut = train(run_file(tmp_path, "cut"), 7)
    assert cut.state_digest == straight.state_digest
    assert train(run_file(tmp_path, "cut")).exit_reason == "nothing_to_do"
    # The same data in steps is the same run, and its epochs are known too.
    in_steps = ("train.epochs=null", "train.steps=14", "evaluate.every=null", "evaluate.every_steps=5")
    assert train(run_file(tmp_path, "steps", *in_steps)).state_digest == straight.state_digest
    # With a higher number of epochs the run continues.
    more = run_file(tmp_path, "cut", "train.epochs=4", "train.segment_epochs=1")
    assert (train(more).step, steps(more, Evaluation)[-1]) == (18, 18)
    with pytest.raises(RunFileError, match=r"--until-step = 19 lies beyond step 18, .* --set train.epochs=5"):
        train(more, 19)

    def shown(*arguments: str) -> str:
        assert main([*arguments, str(more.path), "--set", "train.epochs=4"]) == 0
        return capsys.readouterr().out

    assert "18 of 18, epoch 4.0" in shown("status")
    assert "epoch 2.0" in shown("log")
    curve = EventAccumulator(f"{more.spec.storage}/cut/tensorboard/train")
    curve.Reload()
    assert [(each.step, round(each.value, 4)) for each in curve.Scalars("epoch")][:2] == [(2, 0.4545), (4, 0.9091)]


@pytest.mark.slow
def test_epochs_need_no_further_key(tmp_path: Path) -> None:
    """Rows, validation metrics and what monitors them come at the end of each epoch, also after a kill."""
    run_file(tmp_path, "code")
    content = {
        "run": "straight",
        "storage": str(tmp_path / "storage"),
        "data": {"source": "data.py:load", "validation_fraction": 0.2},
        "model": "model.py:build",
        "train": {"epochs": 6, "global_batch_size": 10, "callbacks": "callbacks.py:monitors"},
    }
    path = tmp_path / "code" / "run.yaml"
    path.write_text(json.dumps(content), encoding="utf-8")
    straight = load_run_file(path)
    ends = [5, 9, 14, 18, 22, 27]
    assert train(straight).step == ends[-1]
    rows = rows_of(straight)
    assert [row.step for row in rows] == steps(straight, Evaluation) == steps(straight, Commit)[1:] == ends
    rates = [row.learning_rate for row in rows]
    assert rates == pytest.approx([0.01, 0.01, 0.005, 0.0025, 0.00125, 0.000625]), "set after the evaluation"
    assert {each.keep_best.metric for each in bodies(straight, Evaluation)} == {"loss"}
    processes = FreshProcesses()
    shorter = Execution(name="killed", storage=tmp_path / "storage", file=path, settings=("train.epochs=4",), steps=18)
    assert processes.kill_after(shorter, ends[0]).returncode == -signal.SIGKILL
    killed = load_run_file(path, ["run=killed", "train.epochs=4"])
    train(killed, 11)
    assert rows_of(killed) == rows[:4]
    result = train(load_run_file(path, ["run=killed"]))
    assert result.state_digest == bodies(straight, Commit)[-1].checkpoint.state_digest
    assert rows_of(killed) == rows


@pytest.mark.slow
def test_partial_window_is_shown_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def to(name: str, target: int) -> Any:
        in_steps = ("train.epochs=null", "train.log_every_steps=4", "evaluate.every=null", f"train.steps={target}")
        return run_file(tmp_path, name, *in_steps, "model=model.py:counting")

    once = train(to("once", 14))
    train(to("twice", 6))
    twice = train(to("twice", 14), 8, 11)
    assert twice.state_digest == once.state_digest
    assert [row.step for row in rows_of(to("once", 14))] == [4, 8, 12]
    assert rows_of(to("twice", 14)) == rows_of(to("once", 14))
    partial = {body.checkpoint.step: body.partial for body in bodies(to("twice", 14), Commit)}
    assert {step: row and row.step for step, row in partial.items()} == {0: None, 6: 6, 8: None, 11: 11, 14: 14}
    (alone,) = (body.partial for body in bodies(to("once", 14), Commit) if body.checkpoint.step == 14)
    assert alone == partial[14]
    run = to("twice", 14)
    assert main(["status", str(run.path), "--set", "run=twice", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["partial"]
    assert (shown["step"], shown["metrics"]) == (14, alone.metrics)


@pytest.mark.slow
def test_dropped_remainder_gives_whole_epochs(tmp_path: Path) -> None:
    whole = ("train.drop_remainder=true", "train.segment_epochs=1")
    straight = run_file(tmp_path, "straight", *whole)
    result = train(straight)
    assert (result.step, result.epoch) == (12, 3)
    assert steps(straight, Evaluation) == steps(straight, Commit)[1:] == [4, 8, 12]
    assert train(run_file(tmp_path, "cut", *whole), 7).state_digest == result.state_digest
    # The same steps without it train on other examples from the second epoch on.
    through = run_file(tmp_path, "through", "train.epochs=null", "train.steps=12", "evaluate.every=null")
    assert train(through).state_digest != result.state_digest
    with pytest.raises(IdentityChanged, match=r"train.drop_remainder: True -> False"):
        train(run_file(tmp_path, "straight"))
    large = run_file(tmp_path, "large", *whole, "train.global_batch_size=49")
    with pytest.raises(RunFileError, match="an epoch of 44 training examples has no whole batch"):
        train(large)
    assert not (Path(large.spec.storage) / "large" / "log").exists()


@pytest.mark.slow
def test_schedule_gets_the_length_of_the_run(tmp_path: Path) -> None:
    scheduled = ("model=model.py:scheduled", "train.epochs=2")
    assert train(run_file(tmp_path, "one", *scheduled)).step == 9
    longer = run_file(tmp_path, "one", *scheduled, "train.epochs=3")
    with pytest.raises(IdentityChanged) as refused:
        train(longer)
    assert "model.options.train_steps: 9 -> 14" in str(refused.value)
    assert "decay_steps: 9 -> 14" in str(refused.value)
    assert train(longer, accept=("model.options", "compile.optimizer")).step == 14
