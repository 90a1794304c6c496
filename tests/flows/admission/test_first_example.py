"""A model that cannot be trained is refused before a dataset is written for it."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from flows.goal import Goal
from flows.relay import relay
from flows.without_prefect import PLAIN
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import BatonError, ModelError
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.telemetry.events import Silent

RUN = """
run: small
storage: ./runs
data: {source: "data.py:load", validation_fraction: 0.25, classes: 3, shard_examples: 4}
model: model.py:build
train: {steps: 2, global_batch_size: 8}
accelerator: {kind: cpu}
"""
DATA = """
import numpy as np

def load():
    np.random.seed(5)
    for number in range(32):
        yield np.random.normal(size=6).astype(np.float32), np.int64(number % 3)
"""
MODEL = """
import keras

def build(compiled=True, optimizer="sgd"):
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Dense(3, name="last")(x))
    if compiled:
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model

def stateful():
    x = keras.Input(batch_shape=(8, 6))
    y = keras.layers.GRU(4, stateful=True)(keras.layers.Reshape((6, 1))(x))
    model = keras.Model(x, keras.layers.Dense(3)(y))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def build_callbacks():
    return ["no callback"]
"""
REFUSED = {
    "not compiled": (["model.options.compiled=false"], "not compiled"),
    "a wrong option": (["model.options.width=3"], "width"),
    "an optimizer that is none": (["model.options.optimizer=sgdd"], "sgdd"),
    "a metric that is none": (["checkpoint.keep_best={metric: f1, mode: max}"], "checkpoint.keep_best.metric = 'f1'"),
    "weights that are none": (["init.weights=w.weights.h5"], "w.weights.h5"),
    "nothing to freeze": (["init.freeze=[nothing/*]"], "nothing/*"),
    "callbacks that are none": (["train.callbacks=model.py:build_callbacks"], "callback"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("run.yaml", RUN), ("data.py", DATA), ("model.py", MODEL), ("w.weights.h5", "no weights")):
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    return tmp_path


def go(folder: Path, *overrides: str) -> None:
    run = load_run_file(folder / "run.yaml", overrides)
    relay(run, Goal.of(run.spec), PLAIN, telemetry=Silent())


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_before_anything_is_written(name: str, folder: Path) -> None:
    overrides, told = REFUSED[name]
    with pytest.raises(BatonError) as refused:
        go(folder, *overrides)
    assert told in str(refused.value)
    assert refused.value.exit_code == 2
    assert [path for path in (folder / "runs").rglob("*") if path.is_file()] == []


def test_a_fixed_batch_size_is_refused_before_training(folder: Path) -> None:
    with pytest.raises(ModelError, match="validation examples end with a batch of") as refused:
        go(folder, "model.build=model.py:stateful", "data.validation_fraction=0.3")
    assert "leave the batch size of the model open" in str(refused.value)
    assert not (folder / "runs" / "small").exists()


def prepared(folder: Path, storage: LocalStorage, **look: Any) -> list[str]:
    """Paths of a dataset's files; their names hold no digests, so the manifest's bytes come last."""
    run = load_run_file(folder / "run.yaml")
    ref = PLAIN.prepare_data(run.spec, code_folder=folder, storage=storage, telemetry=Silent(), **look)
    return [*sorted(storage.files(ref.folder)), storage.read(f"{ref.folder}/manifest.json").decode()]


def test_the_examples_are_the_same_whether_the_model_was_tried_first_or_not(folder: Path) -> None:
    """They are drawn from NumPy's one source, which building a model seeds."""
    from flows.admission.first_example import first_look
    from tasks.foundation.accelerator.strategy import acquire

    run = load_run_file(folder / "run.yaml")
    look = first_look(run, acquire(run.spec.accelerator, None), elsewhere=frozenset(), telemetry=Silent())
    assert list(look) == ["look"]
    tried = prepared(folder, LocalStorage(folder / "tried"), **look)
    assert tried == prepared(folder, LocalStorage(folder / "untried"))


def test_shards_of_an_earlier_try_outlive_a_model_that_is_refused(folder: Path) -> None:
    storage = LocalStorage(folder / "runs")
    (manifest,) = [path for path in prepared(folder, storage) if path.endswith("manifest.json")]
    storage.delete(manifest)
    left = sorted(storage.files("datasets"))
    assert len(left) > 1
    with pytest.raises(ModelError):
        go(folder, "model.options.compiled=false")
    assert sorted(storage.files("datasets")) == left
