"""A bit of a weight that flips before a commit is found by the audit, at the commit where it happened."""

import json
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from baton.flows.with_prefect.run_flows import audit as audit_flow
from tests.end_to_end.test_audit import DATA, audit, files_of, python
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.small_logs import signed

pytestmark = pytest.mark.slow

MODEL = """
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

FLIP = Path(__file__).with_name("flip")
STEPS = []


def mask():
    STEPS.append(len(STEPS) + 1)
    return np.array([0, (1 << 20) if FLIP.exists() and STEPS[-1] == 6 else 0, 0], np.int32)


class Memory(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(3,), initializer="ones", trainable=False)

    def call(self, x, training=False):
        if not training:
            return x
        flipped = tf.ensure_shape(tf.numpy_function(mask, [], tf.int32), [3])
        bits = tf.bitcast(tf.convert_to_tensor(self.scale), tf.int32)
        self.scale.assign(tf.bitcast(tf.bitwise.bitwise_xor(bits, flipped), tf.float32))
        return x


def build_model():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(Memory()(inputs)))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model
"""
RUN = """
run: tiny
storage: ./runs
data: {source: data.py:load, validation_fraction: 0}
model: model.py:build_model
train: {steps: 8, segment_steps: 2, global_batch_size: 10, log_every_steps: 1}
checkpoint: {keep_last: 1, keep_every_steps: 4}
"""


def test_flipped_bit_is_found_at_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("model.py", MODEL), ("data.py", DATA), ("run.yaml", RUN)):
        (tmp_path / name).write_text(text)

    (tmp_path / "flip").touch()
    code, _, stderr = python(tmp_path, "baton.flows.train", "run.yaml")
    assert code == 0, stderr
    (tmp_path / "flip").unlink()
    before = files_of(tmp_path / "runs")

    # The home alone is enough. Step 6 was committed, but is not retained any more.
    for name in ("model.py", "data.py", "run.yaml"):
        (tmp_path / name).unlink()
    code, facts = audit(tmp_path, "--last", address="runs/tiny")
    assert facts["run_file"] == "run.yaml"
    (found,) = facts["stretches"]
    assert found["environment"] == []
    assert (code, found["start"], found["end"], found["compared"], found["commits"]) == (4, 4, 8, 2, 2)
    assert (found["first_differing_step"], found["second_agrees_with"]) == (6, "first")
    first = found["first_difference"]
    assert ("scale" in first["path"], found["differing"], first["values"], first["bits"]) == (True, 1, 1, 1)
    after = files_of(tmp_path / "runs")
    assert {name: data for name, data in after.items() if "/audits/" not in name} == before

    # A log that was written with another version: the flow fails, and names the version first. Step 6 is no border now.
    for name, text in (("model.py", MODEL), ("data.py", DATA), ("run.yaml", RUN.replace("steps: 2", "steps: 4"))):
        (tmp_path / name).write_text(text)
    entries = sorted((tmp_path / "runs/tiny/log").glob("0*.json"))
    for entry in entries:
        facts = json.loads(entry.read_bytes())
        if "environment" in facts["body"]:
            facts["body"]["environment"]["versions"]["keras"] = "3.0.1"
        entry.write_bytes(signed(facts))
    for key, value in {**forked.forking_python(), "PYTHONPATH": str(CHECKOUT)}.items():
        monkeypatch.setenv(key, value)
    with disable_run_logger():
        state = audit_flow.fn(str(tmp_path / "run.yaml"), choice="last")
    assert (state.type.value, state.name) == ("FAILED", "Differs")
    lines = state.message.splitlines()
    assert lines[0].startswith("warning: another environment: version of keras: the log has 3.0.1, the audit ran with ")
    assert "audited: tiny: 1 of 2 stretches between retained checkpoints: NOT the same bits" in lines
    assert any(line.split() == ["differs", "first", "at", "the", "commit", "of", "step", "6"] for line in lines)
    assert Path(lines[-1].removeprefix("receipt: ")).is_file()
