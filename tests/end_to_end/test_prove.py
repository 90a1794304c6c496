"""`baton prove` in real processes: both shipped runs pass, and runs that do not resume exactly are found."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.shipped_runs import run_file, settings

pytestmark = pytest.mark.slow

MODEL = """
import random

import keras
import numpy as np
import tensorflow as tf


SOURCE = random.Random(0)  # another process begins again


class Noise(keras.layers.Layer):
    def call(self, x):
        drawn = tf.numpy_function(lambda: np.float32(SOURCE.random()), [], tf.float32)
        return x + tf.ensure_shape(drawn, [])


def build_model(noisy=False):
    inputs = keras.Input((4,))
    x = Noise()(inputs) if noisy else inputs
    model = keras.Model(inputs, keras.layers.Dense(3, activation="softmax", name="guess")(x))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
"""
DATA = """
import random

import numpy as np


def load(ordered=True):
    numbers = np.random.default_rng(0)
    examples = [(numbers.normal(size=4).astype("float32"), i % 3) for i in range(120)]
    if not ordered:
        random.SystemRandom().shuffle(examples)  # not seeded
    yield from examples
"""
RUN = """
run: tiny
storage: ./runs
data: {source: data.py:load}
model: model.py:build_model
train: {steps: 6, global_batch_size: 10}
"""


def command(file: Path, *words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "baton.flows.commands.main", "prove", str(file), *words]


def environment(scratch: Path) -> dict[str, str]:
    scratch.mkdir()
    paths = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(scratch)}


def prove(file: Path, scratch: Path, *words: str) -> tuple[int, str, str]:
    """Run `baton prove`; returns exit code, standard output and standard error. The scratch folder must be empty."""
    env = environment(scratch) | forked.forking_python()
    done = forked.run(command(file, *words), capture_output=True, text=True, timeout=600, check=False, env=env)
    assert not list(scratch.glob("baton-prov*"))
    return done.returncode, done.stdout, done.stderr


def receipts(storage: Path, run: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (storage / run / "proofs").iterdir()]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    for name, text in (("model.py", MODEL), ("data.py", DATA), ("run.yaml", RUN)):
        (folder / name).write_text(text)
    return folder / "run.yaml"


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "run", "replicas"), [("digits", "digits-cnn", 2), ("text", "stdlib-transformer", 1)])
def test_shipped_runs_are_proved(name: str, run: str, replicas: int, tmp_path: Path) -> None:
    words = settings(name, tmp_path / "storage", replicas=replicas)
    code, stdout, stderr = prove(run_file(name), tmp_path / "scratch", *words, "--json")
    assert code == 0, stderr
    facts = json.loads(stdout.splitlines()[-1])
    kept = proved(tmp_path / "storage", run, replicas)
    assert {"format": 1} | {key: facts[key] for key in kept if key != "format"} == kept


def proved(storage: Path, run: str, replicas: int) -> dict[str, Any]:
    """The only receipt, which says that both trainings had the same bits; the storage has nothing else."""
    (kept,) = receipts(storage, run)
    assert (kept["verdict"], kept["differing"], kept["first_differing_step"]) == ("same", 0, None)
    assert kept["straight"] == kept["cut"]
    assert kept["environment"]["replicas"] == replicas
    assert len(kept["cuts"]) >= 3
    assert kept["killed_at_step"] in kept["cuts"]
    assert kept["variables"] > 10
    assert len(list(storage.rglob("*.json"))) == 1
    return kept


def test_several_hosts_are_proved_as_local_processes(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples without a stable order are the same ones for both trainings, if they share the data."""
    place = {"cluster": {"worker": ["host-0:1", "host-1:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(place))
    words = ["--set", "accelerator.kind=multi_worker", "--set", "data.options.ordered=false", "--share-data"]
    code, stdout, stderr = prove(own, tmp_path / "scratch", *words)
    assert code == 0, stderr
    assert "multi_worker, replicas 2, threads" in stdout
    assert "2 processes for the hosts" in stdout
    kept = proved(own.parent / "runs", "tiny", 2)
    assert (kept["environment"]["hosts"], kept["data_prepared"]) == (2, "once")


def test_unseeded_draw_of_python_code_is_found(own: Path, tmp_path: Path) -> None:
    code, stdout, _ = prove(own, tmp_path / "scratch", "--set", "model.options.noisy=true")
    assert code == 1
    assert "NOT the same: tiny" in stdout
    assert "model/guess/bias  float32[3]: " in stdout
    assert "PyFunc draw from TensorFlow's own random state" in stdout
    kept = receipts(own.parent / "runs", "tiny")[0]
    assert kept["verdict"] == "different"
    assert kept["first_difference"]["path"] == "model/guess/bias"
    assert kept["straight"]["content_digest"] == kept["cut"]["content_digest"]
    # The runs agree until the kill.
    assert kept["first_differing_step"] > kept["killed_at_step"]


@pytest.mark.nightly
def test_unstable_data_order_is_found(own: Path, tmp_path: Path) -> None:
    code, stdout, _ = prove(own, tmp_path / "scratch", "--set", "data.options.ordered=false")
    assert code == 1
    assert "data.py:load gave other examples, or the same ones in another order" in stdout
    assert "model/guess/bias  float32[3]: " in stdout
    kept = receipts(own.parent / "runs", "tiny")[0]
    assert kept["straight"]["content_digest"] != kept["cut"]["content_digest"]
    assert kept["first_difference"]["path"] == "model/guess/bias"


def test_refused_model_is_reported(own: Path, tmp_path: Path) -> None:
    code, stdout, stderr = prove(own, tmp_path / "scratch", "--set", "model.options.width=3", "--json")
    assert code == 2
    assert json.loads(stdout.splitlines()[-1])["error"] == "ModelError"
    assert "unexpected keyword argument 'width'" in stderr
    assert not (own.parent / "runs").exists()


@pytest.mark.parametrize(
    ("number", "later"), [(signal.SIGINT, 0.5), pytest.param(signal.SIGTERM, 0.0, marks=pytest.mark.nightly)]
)
def test_stopped_proof_leaves_nothing_behind(own: Path, tmp_path: Path, number: signal.Signals, later: float) -> None:
    scratch = tmp_path / "scratch"
    process = subprocess.Popen(
        command(own),
        env={**environment(scratch), "PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # When the child appears, and half a second later.
        while not (children := children_of(process.pid)):
            assert process.poll() is None
        time.sleep(later)
        process.send_signal(number)
        try:
            _, stderr = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            pytest.fail(f"it did not exit; stacks: {process.communicate()[1]}")
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in stderr
    assert not any(alive(child) for child in children)
    assert not list(scratch.iterdir())
    assert not (own.parent / "runs").exists()


def children_of(pid: int) -> Sequence[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
