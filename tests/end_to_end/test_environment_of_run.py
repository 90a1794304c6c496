"""What decides bits besides the run file: Keras's configuration is kept, debugging modes are off, and both are said."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.homes import entries_of
from tests.support.lab import Lab, lab_of, spec_of

pytestmark = pytest.mark.slow

MODEL = """
import os

if "BATON_TEST_DEBUGGED" in os.environ:
    tf.config.run_functions_eagerly(True)


class AddEpsilon(keras.layers.Layer):
    def call(self, x):
        return x + 100 * keras.config.epsilon()


def build():
    if "BATON_TEST_DEBUGGED" in os.environ:
        tf.debugging.enable_check_numerics()
    model = keras.Sequential([keras.Input((6,)), AddEpsilon(), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
DEBUGGED_DATA = """
import os

import tensorflow as tf

if "BATON_TEST_DEBUGGED" in os.environ:
    tf.data.experimental.enable_debug_mode()
"""
OWN = {"epsilon": 1e-7, "floatx": "float32", "image_data_format": "channels_last"}
OF_ANOTHER_PROJECT = {"epsilon": 1e-3, "floatx": "float64", "image_data_format": "channels_first", "backend": "jax"}
# Decides bits, and is recorded.
XLA = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=0"}


def trained(lab: Lab, name: str, *words: str, **variables: str) -> tuple[dict[str, Any], str]:
    """Train in a process with these environment variables; the result and what the console showed."""
    spec = spec_of("build", run=name, train__segment_steps=4, train__steps=8, storage=str(lab.root / "runs"))
    file = lab.code / "run.yaml"
    file.write_text(spec.model_dump_json(exclude_defaults=True), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "baton.flows.train", str(file), *words]
    environment = {**os.environ, **XLA, **variables}
    done = forked.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in {0, 3}, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, done.stderr


def test_debugging_modes_and_another_keras_config_change_no_bit(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODEL)
    with (lab.code / "data.py").open("a", encoding="utf-8") as data:
        data.write(DEBUGGED_DATA)
    straight, console = trained(lab, "straight")
    assert "switched on" not in console

    _, console = trained(lab, "cut", "--max-segments", "1", BATON_TEST_DEBUGGED="1")
    for where, call in (
        ("model.py", "tf.config.run_functions_eagerly(True)"),
        ("model.py:build", "tf.debugging.enable_check_numerics()"),
        ("data.py", "tf.data.experimental.enable_debug_mode()"),
    ):
        assert f"warning: {where} switched on {call}, which would change" in console
    recorded = entries_of(tmp_path / "runs" / "cut")[0].head.environment
    assert recorded.keras is not None
    assert recorded.keras.model_dump() == OWN
    assert recorded.variables is not None
    assert recorded.variables.items() >= XLA.items()

    others = tmp_path / "keras"
    others.mkdir()
    (others / "keras.json").write_text(json.dumps(OF_ANOTHER_PROJECT), encoding="utf-8")
    continued, console = trained(lab, "cut", KERAS_HOME=str(others), KERAS_BACKEND="torch")
    assert continued["state_digest"] == straight["state_digest"]
    assert "the environment changed" not in console
    assert "KERAS_BACKEND = torch is ignored: Baton trains with Keras's backend tensorflow" in console
