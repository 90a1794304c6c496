"""`jit_compile=True` compiles the train step with XLA: the same bits however it is cut, and compiled once."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import ModelError
from tests.support.lab import Lab, in_fresh_process, spec_of

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


def lab_in(folder: str) -> tuple[Lab, Path]:
    """A lab, and the cache that XLA uses in this process."""
    cache = Path(folder) / "cache"
    os.environ["BATON_XLA_CACHE"] = str(cache)
    return Lab(Path(folder), Path(folder) / "code"), cache


def spec(run: str, **options: Any) -> RunSpec:
    return spec_of("build_model", run=run, data__options={}, model__options=options)


def programs_in(cache: Path) -> dict[str, int]:
    """The compiled programs, with the times when they were written."""
    return {file.name: file.stat().st_mtime_ns for file in cache.rglob("*.pb")}


def first_process(folder: str) -> dict[str, Any]:
    """Train a model that XLA compiles to step 4, and then others that it does not compile."""
    lab, cache = lab_in(folder)
    with warnings.catch_warnings(record=True) as warned:
        lab.relay(spec("cut"), 4)
    assert [each for each in warned if "jit_compile=False" in str(each.message)] == []
    compiled, notes = programs_in(cache), lab.recorder.text
    lab.recorder.events.clear()
    runs = {"auto": {"jit": None}, "false": {"jit": False}, "reluctant": {"kind": "reluctant"}}
    digests = [lab.relay(spec(run, **options), 4).tip.state_digest for run, options in runs.items()]  # type: ignore[union-attr]
    with pytest.raises(ModelError) as refused:
        lab.begin(spec("listed", kind="listed"))
    assert lab.log(spec("listed")).head() is None
    assert programs_in(cache) == compiled
    found = {"digests": digests, "others": lab.recorder.text, "refused": str(refused.value)}
    return {**found, "notes": notes, "programs": compiled}


def second_process(folder: str) -> list[Any]:
    """Continue, and train straight: a later trainer of a process has other names, and is compiled for itself."""
    lab, cache = lab_in(folder)
    cut = lab.relay(spec("cut"), 12).tip
    programs = programs_in(cache)
    straight = lab.relay(spec("straight"), 12).tip
    assert cut is not None
    assert straight is not None
    return [cut.state_digest, straight.state_digest, programs]


@pytest.mark.slow
def test_cuts_change_no_bit_and_are_compiled_once(tmp_path: Path) -> None:
    """A model that XLA cannot compile is refused, on two replicas too, see test_stage.py."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "data.py").write_text(DATA)
    (tmp_path / "code" / "model.py").write_text(MODEL)
    first = in_fresh_process(first_process, folder=str(tmp_path))
    assert first["digests"][0] == first["digests"][1], "XLA is not used by default"
    words = "compiled with jit_compile=True, which is not used: XLA does not support layer reluctant"
    assert words in first["others"]
    assert "XLA compiles" not in first["others"]
    for words in ("XLA cannot compile its train_step (jit_compile=True)", "PyFunc", "hint: remove jit_compile=True"):
        assert words in first["refused"]
    assert "XLA compiles the train step (jit_compile=True)" in first["notes"]
    assert len(first["programs"]) == 1
    cut, straight, programs = in_fresh_process(second_process, folder=str(tmp_path))
    assert cut == straight
    assert programs == first["programs"]
