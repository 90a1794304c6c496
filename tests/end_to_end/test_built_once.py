"""`build_model` runs once in every command: a slow build is paid once, and what it prints appears once."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked

DATA = """
import numpy as np


def load():
    draw = np.random.default_rng(0)
    for number in range(40):
        yield draw.normal(size=6).astype("float32"), np.int64(number % 3)
"""
MODEL = """
import pathlib

import keras
import tensorflow as tf
from keras import layers


def note_build():
    with pathlib.Path(__file__).with_name("builds").open("a") as file:
        file.write("x")


def build_model():
    note_build()
    model = keras.Sequential([keras.Input((6,)), layers.Dropout(0.5), layers.Dense(3, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.summary()
    return model


class Counting(keras.Model):
    # Its train_step changes attributes of the model whenever it is traced.
    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3)
        self.traces = 0

    def call(self, x):
        return self.inner(x) * (1.0 + self.traces)

    def train_step(self, data):
        self.traces += 1
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return {"loss": loss}


def counting():
    note_build()
    model = Counting()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Annealing(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.model.layers[0].rate = 0.25

    def on_epoch_end(self, epoch, logs=None):
        self.model.phase = epoch


def annealing():
    return [Annealing()]
"""


def command(folder: Path, *words: str) -> tuple[int, str]:
    """Run a command beside the run file; returns how often `build_model` ran, and the standard output."""
    (folder / "builds").unlink(missing_ok=True)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = forked.run(
        [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in {0, 3}, done.stderr[-3000:]
    return len((folder / "builds").read_text()), done.stdout


def run_file(folder: Path, model: str, **train: Any) -> None:
    (folder / "data.py").write_text(DATA)
    (folder / "model.py").write_text(MODEL)
    text = {
        "run": "r",
        "storage": "./runs",
        "data": {"source": "data.py:load", "validation_fraction": 0.2},
        "model": model,
        "train": {"steps": 15, "segment_steps": 5, "global_batch_size": 8, "log_every_steps": 5, **train},
        "evaluate": {"every_steps": 5},
        "accelerator": {"kind": "cpu"},
    }
    (folder / "run.yaml").write_text(json.dumps(text))


@pytest.mark.slow
def test_every_command_builds_once(tmp_path: Path) -> None:
    run_file(tmp_path, "model.py:build_model")
    begun, _ = command(tmp_path, "baton.flows.train", "run.yaml", "--max-segments", "1")
    baton = "baton.flows.commands.main"
    exported, _ = command(tmp_path, baton, "export", "run.yaml", "--format", "keras", "--to", "model.keras")
    examined, printed = command(tmp_path, baton, "doctor", "run.yaml")
    assert (begun, exported, examined) == (1, 1, 1)
    assert printed.count("Total params") == 1


@pytest.mark.slow
def test_attributes_that_callbacks_and_a_trace_change_need_no_other_build(tmp_path: Path) -> None:
    run_file(tmp_path, "model.py:counting", callbacks="model.py:annealing")
    straight, whole = command(tmp_path, "baton.flows.train", "run.yaml", "--set", "storage=./straight")
    begun, _ = command(tmp_path, "baton.flows.train", "run.yaml", "--max-segments", "1")
    resumed, cut = command(tmp_path, "baton.flows.train", "run.yaml")
    assert (straight, begun, resumed) == (1, 1, 1)
    results = [json.loads(printed.splitlines()[-1]) for printed in (whole, cut)]
    assert results[0]["step"] == results[1]["step"] == 15
    assert results[0]["state_digest"] == results[1]["state_digest"]
