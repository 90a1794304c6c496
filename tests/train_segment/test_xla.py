"""`jit_compile=True` compiles the train step with XLA: the same bits however it is cut, and compiled once."""

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
import keras
import tensorflow as tf
from keras import layers


class Listed(layers.Layer):
    def call(self, x):
        y = tf.py_function(lambda value: value, [x], x.dtype)
        y.set_shape(x.shape)
        return y


class Reluctant(layers.Dense):
    def __init__(self, *given, **settings):
        super().__init__(*given, **settings)
        self.supports_jit = False


def build_model(jit=True, kind=""):
    inner = {"reluctant": Reluctant(8), "listed": Listed()}.get(kind, layers.Dense(8))
    inputs = keras.Input((6,))
    x = layers.Dropout(0.3)(layers.Dense(6, activation="relu")(inputs))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(inner(x)))
    settings = {} if jit is None else {"jit_compile": jit}
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], **settings)
    return model
"""


class Run:
    """A run in a folder; every command is a process of its own."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder
        (folder / "data.py").write_text(DATA)
        (folder / "model.py").write_text(MODEL)
        text = {
            "run": "r",
            "storage": "./runs",
            "data": {"source": "data.py:load", "validation_fraction": 0.2},
            "model": {"build": "model.py:build_model", "options": changes.pop("options", {})},
            "train": {"steps": 12, "segment_steps": 4, "global_batch_size": 8, "log_every_steps": 4},
            "accelerator": {"kind": "cpu"},
            **changes,
        }
        (folder / "run.yaml").write_text(json.dumps(text))

    def train(self, *words: str, cache: bool = True) -> Any:
        folder = str(self.folder / "cache") if cache else ""
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "BATON_XLA_CACHE": folder}
        return forked.run(
            [sys.executable, "-m", "flows.without_prefect", "run.yaml", *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def digest(self, *words: str, cache: bool = True) -> str:
        done = self.train(*words, cache=cache)
        assert done.returncode == 0, done.stderr[-3000:]
        return str(json.loads(done.stdout.splitlines()[-1])["state_digest"])

    def programs(self) -> dict[str, int]:
        """The compiled programs in the cache, with the times when they were written."""
        return {file.name: file.stat().st_mtime_ns for file in (self.folder / "cache").rglob("*.pb")}


@pytest.mark.slow
def test_cuts_change_no_bit_and_are_compiled_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = run.train("--max-segments", "1")
    assert first.returncode == 3, first.stderr[-3000:]
    assert "XLA compiles the train step (jit_compile=True)" in first.stderr
    assert "Proceeding with `jit_compile=False`" not in first.stderr
    assert len(run.programs()) == 1
    compiled = run.programs()
    cut = run.digest()
    assert run.programs() == compiled
    assert run.digest("--set", "storage=./straight", cache=False) == cut
    assert run.programs() == compiled


@pytest.mark.slow
def test_auto_and_false_do_not_use_xla_on_a_cpu(tmp_path: Path) -> None:
    run = Run(tmp_path, options={"jit": None})
    plain = run.digest()
    explicit = run.digest("--set", "storage=./false", "--set", "model.options.jit=false")
    assert plain == explicit
    assert run.programs() == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"accelerator": {"kind": "cpu", "replicas": 2}},
            ["compiled with jit_compile=True, which cannot be used: 2 replicas", "hint: remove jit_compile=True"],
        ),
        (
            {"options": {"kind": "listed"}},
            ["XLA cannot compile its train_step (jit_compile=True)", "PyFunc", "hint: remove jit_compile=True"],
        ),
    ],
)
def test_step_that_xla_cannot_compile_is_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    done = Run(tmp_path, **changes).train()
    assert done.returncode == 2, done.stderr
    assert [word for word in words if word not in done.stderr] == []
    assert not (tmp_path / "runs" / "r").exists()


@pytest.mark.slow
def test_layer_that_does_not_support_xla_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, options={"kind": "reluctant"})
    done = run.train()
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled with jit_compile=True, which is not used: XLA does not support layer reluctant" in done.stderr
    assert run.programs() == {}
