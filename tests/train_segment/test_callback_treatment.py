"""Callbacks that Baton replaces, batch hooks and the end of the training, as a user meets them."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.flows import result as results
from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal
from baton.flows.train import train as train_to
from baton.tasks.foundation.contracts.run_file import RunFile
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.event_recorder import EventRecorder
from tests.train_segment.test_callbacks import log_of, make_code, memory_of, outcome_of, run_file, train

CALLBACKS = """
import keras


class Batches(keras.callbacks.Callback):
    accepts_several_steps = True

    def on_train_begin(self, logs=None):
        self.calls = []

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(f"epoch {epoch} ends")

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(f"{batch} begins")

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(f"{batch} ends {sorted(logs)}")

    def on_train_end(self, logs=None):
        with open(__file__ + ".ends", "a") as file:
            print(self.calls[-1], sorted(logs), file=file)


def make():
    callbacks = keras.callbacks
    return [
        callbacks.ModelCheckpoint("best.keras", "val_accuracy", save_best_only=True),
        callbacks.TensorBoard("logs"),
        callbacks.CSVLogger("out/training.csv", separator=";"),
        callbacks.TerminateOnNaN(),
        callbacks.EarlyStopping("val_accuracy", patience=9, restore_best_weights=True),
        callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None, accepts_several_steps=True),
        Batches(),
    ]


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 2

    def on_train_end(self, logs=None):
        print("ended", file=open(__file__ + ".ends", "a"))


def stopping():
    return [Stops()]
"""


def code_in(folder: Path) -> Any:
    lab = make_code(folder)
    (lab.code / "callbacks.py").write_text(CALLBACKS, encoding="utf-8")
    for name in [name for name in sys.modules if name.startswith("_baton_user_") and name.endswith(".callbacks")]:
        del sys.modules[name]
    return lab


def ends_in(folder: Path) -> list[str]:
    return (folder / "code" / "callbacks.py.ends").read_text(encoding="utf-8").splitlines()


def table_of(run: RunFile) -> list[dict[str, str]]:
    text = log_of(run).home.read("callbacks/training.csv").decode()
    return list(csv.DictReader(text.splitlines(), delimiter=";"))


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "write_report", lambda _home, **_title: None)


@pytest.mark.slow
def test_replaced_callbacks_are_exact_across_cuts(tmp_path: Path) -> None:
    lab = code_in(tmp_path)
    length = ("train.steps=15", "checkpoint.keep_last=1", "train.segment_steps=3")
    straight = run_file(tmp_path, "straight", *length, callbacks="make")
    recorder = EventRecorder()
    PROCESS_STATE.forget()
    train_to(OpenedRun.open(straight), Goal.of(straight.spec), telemetry=recorder)
    cut = run_file(tmp_path, "cut", *length, callbacks="make")
    train(cut, 4, 7)
    assert outcome_of(cut) == outcome_of(straight)
    told = [note for note in recorder.notes if note.startswith("callback ")]
    assert len(told) == 7
    assert "callback ModelCheckpoint: not called: Baton commits checkpoints itself" in told[0]
    assert "best validation accuracy (max) is kept, see baton export --step best" in told[0]
    assert "callback CSVLogger: not called: Baton writes callbacks/training.csv" in told[2]
    assert told[6].endswith("called at each evaluation (6 steps), which ends its epoch; its batch hooks every 4 steps")
    # The last epoch is a short one: it ends with the run, and the state that is saved has no trace of it.
    calls = memory_of(cut, lab)["memories"][2]["calls"]
    row = "['accuracy', 'loss']"
    assert calls == [
        "0 begins", f"3 ends {row}", "4 begins", "epoch 0 ends", f"1 ends {row}", "2 begins",
        f"5 ends {row}", "epoch 1 ends", "0 begins",
    ]  # fmt: skip
    last = "epoch 2 ends ['accuracy', 'loss', 'val_accuracy', 'val_loss']"
    assert ends_in(tmp_path) == [last, last]
    head = log_of(cut).require_head()
    assert head.best is not None
    assert (head.best.metric, head.best.mode) == ("accuracy", "max")
    assert head.best.checkpoint in head.retained
    rows = table_of(cut)
    assert rows == table_of(straight)
    evaluations = outcome_of(cut)[3]
    assert [(row["epoch"], row["val_loss"]) for row in rows] == [
        (str(epoch), str(metrics["loss"])) for epoch, (_, metrics) in enumerate(evaluations)
    ]
    assert list(rows[0]) == ["epoch", "accuracy", "loss", "val_accuracy", "val_loss"]
    # What is finished stays so; with a later target, it goes on from a state without the end.
    again = run_file(tmp_path, "straight", *length, callbacks="make")
    number = log_of(again).require_head().number
    assert train(again).exit_reason == "nothing_to_do"
    assert log_of(again).require_head().number == number
    assert len(ends_in(tmp_path)) == 2
    train(run_file(tmp_path, "straight", *length, "train.steps=16", callbacks="make"))
    calls = memory_of(again, lab)["memories"][2]["calls"]
    assert [call for call in calls if call.startswith("epoch")] == ["epoch 0 ends", "epoch 1 ends"]


@pytest.mark.slow
def test_batch_hook_of_each_step_ends_the_run(tmp_path: Path) -> None:
    code_in(tmp_path)
    each_step = ("train.steps=9", "train.log_every_steps=1")
    straight = run_file(tmp_path, "straight", *each_step, callbacks="stopping")
    result = train(straight)
    assert (result.exit_reason, result.step) == ("finished_early", 3)
    assert ends_in(tmp_path) == ["ended"]
    cut = run_file(tmp_path, "cut", *each_step, callbacks="stopping")
    train(cut, 2)
    assert outcome_of(cut) == outcome_of(straight)
