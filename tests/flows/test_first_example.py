"""A model that cannot be trained is refused before a dataset is written for it."""

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal
from baton.flows.runner import InProcess
from baton.flows.train import train
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall
from baton.tasks.foundation.errors import BatonError, ModelError
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Silent
from baton.tasks.stages import PREPARE_DATA

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
    "an unknown optimizer": (["model.options.optimizer=sgdd"], "sgdd"),
    "an unknown metric": (["checkpoint.keep_best={metric: f1, mode: max}"], "checkpoint.keep_best.metric = 'f1'"),
    "an invalid weights file": (["init.weights=w.weights.h5"], "w.weights.h5"),
    "nothing to freeze": (["init.freeze=[nothing/*]"], "nothing/*"),
    "invalid callbacks": (["train.callbacks=model.py:build_callbacks"], "callback"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("run.yaml", RUN), ("data.py", DATA), ("model.py", MODEL), ("w.weights.h5", "no weights")):
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    return tmp_path


def train_in(folder: Path, *overrides: str) -> None:
    run = load_run_file(folder / "run.yaml", overrides)
    train(OpenedRun.open(run), Goal.of(run.spec), telemetry=Silent())


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_before_anything_is_written(name: str, folder: Path) -> None:
    overrides, message = REFUSED[name]
    with pytest.raises(BatonError) as refused:
        train_in(folder, *overrides)
    assert message in str(refused.value)
    assert refused.value.exit_code == 2
    assert [path for path in (folder / "runs").rglob("*") if path.is_file()] == []


def test_a_fixed_batch_size_is_refused_before_training(folder: Path) -> None:
    with pytest.raises(ModelError, match="validation examples end with a batch of") as refused:
        train_in(folder, "model.build=model.py:stateful", "data.validation_fraction=0.3")
    assert "do not fix the model's batch size" in str(refused.value)
    assert not (folder / "runs" / "small").exists()


def prepared(folder: Path, storage: LocalStorage, check: Any = None) -> list[str]:
    """Return the paths of a dataset's files, and its manifest, because the paths contain no digests."""
    run = load_run_file(folder / "run.yaml")
    place = Place.of(storage, run.spec.run, code_folder=folder, telemetry=Silent())
    ref = InProcess().run(PREPARE_DATA, PrepareDataCall(spec=run.spec), replace(place, check_features=check))
    return [*sorted(storage.files(ref.folder)), storage.read(f"{ref.folder}/manifest.json").decode()]


def test_the_model_check_does_not_change_the_dataset(folder: Path) -> None:
    """The examples use NumPy's global random state, which building a model seeds."""
    from baton.flows.admit import features_check
    from baton.tasks.foundation.machine.devices import acquire

    run = load_run_file(folder / "run.yaml")
    accelerator = acquire(run.spec.accelerator, None)
    check = features_check(OpenedRun.open(run), accelerator, remote=frozenset(), telemetry=Silent())
    assert check is not None
    checked = prepared(folder, LocalStorage(folder / "checked"), check)
    assert checked == prepared(folder, LocalStorage(folder / "unchecked"))


def test_a_refused_model_keeps_earlier_shards(folder: Path) -> None:
    storage = LocalStorage(folder / "runs")
    (manifest,) = [path for path in prepared(folder, storage) if path.endswith("manifest.json")]
    storage.delete(manifest)
    left = sorted(storage.files("datasets"))
    assert len(left) > 1
    with pytest.raises(ModelError):
        train_in(folder, "model.options.compiled=false")
    assert sorted(storage.files("datasets")) == left
