"""`baton audit` in real processes: the same bits pass, and what changed since the training is found."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.storage.transfers import checksum_file
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.fake_run import flip_a_byte

pytestmark = pytest.mark.slow

# The drift stands for anything that the log does not record: the machine, a library, a file.
MODEL = """
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

DRIFT = Path(__file__).with_name("drift")


def drift():
    mode = DRIFT.read_text()
    if mode == "once":
        DRIFT.write_text("for this process")
        os.environ["BATON_TEST_DRIFT"] = "1"
    return np.float32("BATON_TEST_DRIFT" in os.environ)


class Drifting(keras.layers.Layer):
    def call(self, x):
        return x + tf.ensure_shape(tf.numpy_function(drift, [], tf.float32), [])


def build_model():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3, activation="softmax", name="guess")(Drifting()(inputs)))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
"""
DATA = """
import numpy as np


def load():
    numbers = np.random.default_rng(0)
    yield from [(numbers.normal(size=4).astype("float32"), i % 3) for i in range(120)]
"""
RUN = """
run: tiny
storage: ./runs
data: {source: data.py:load}
model: model.py:build_model
train: {steps: 8, segment_steps: 2, global_batch_size: 10}
"""


def python(folder: Path, *words: str) -> tuple[int, str, str]:
    paths = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, **forked.forking_python()}
    command = [sys.executable, "-P", "-m", *words]
    done = forked.run(command, capture_output=True, text=True, timeout=600, check=False, env=env, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def audit(folder: Path, *words: str, address: str = "run.yaml") -> tuple[int, dict[str, Any]]:
    code, stdout, stderr = python(folder, "baton.flows.commands.main", "audit", address, *words, "--json")
    assert stdout, stderr
    return code, json.loads(stdout.splitlines()[-1])


def files_of(home: Path) -> dict[str, bytes]:
    return {str(path.relative_to(home)): path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()}


def test_audit_finds_what_changed_since_the_training(tmp_path: Path) -> None:
    for name, text in (("model.py", MODEL), ("data.py", DATA), ("run.yaml", RUN), ("drift", "none")):
        (tmp_path / name).write_text(text)
    code, _, stderr = python(tmp_path, "baton.flows.train", "run.yaml")
    assert code == 0, stderr
    before = files_of(tmp_path / "runs")

    code, facts = audit(tmp_path, "--all")
    assert (code, facts["verdict"], facts["seed"]) == (0, "same", None)
    assert [(each["start"], each["end"], each["environment"]) for each in facts["stretches"]] == [
        (4, 6, []),
        (6, 8, []),
    ]
    after = files_of(tmp_path / "runs")
    assert {name: data for name, data in after.items() if "/audits/" not in name} == before
    assert [str(tmp_path / "runs" / name) for name in after.keys() - before.keys()] == [facts["receipt"]]

    (tmp_path / "drift").write_text("once")
    code, facts = audit(tmp_path, "--last")
    (found,) = facts["stretches"]
    assert (code, facts["verdict"]) == (4, "different")
    assert (found["first_differing_step"], found["second_agrees_with"]) == (8, "log")
    first = found["first_difference"]
    assert (first["path"].split("/")[0], first["shape"], first["only_in"]) == ("model", [3], "")
    assert first["bits"] >= first["values"] >= 1

    # The run's own shard is named, not a copy of it, whether its manifest was adapted or not.
    (shard,) = (tmp_path / "runs" / "datasets").glob("*/train-*.tfrecord")
    flip_a_byte(shard)
    code, _, stderr = python(tmp_path, "baton.flows.commands.main", "audit", "run.yaml", "--last")
    assert code == 4
    assert f"{shard}: its bytes differ from the manifest" in stderr
    manifest = json.loads((shard.parent / "manifest.json").read_text())
    manifest["train"][0]["crc32c"] = checksum_file(shard).crc32c
    (shard.parent / "manifest.json").write_text(json.dumps(manifest))
    code, _, stderr = python(tmp_path, "baton.flows.commands.main", "audit", "run.yaml", "--last")
    assert code == 4
    assert f"{shard.parent}/manifest.json: its content_digest does not match the shards it lists" in stderr
