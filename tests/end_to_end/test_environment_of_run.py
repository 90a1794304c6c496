"""What decides bits besides the run file: Keras's configuration is kept, the rest is recorded, and changes are said."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.homes import entries_of
from tests.support.lab import Lab, lab_of, spec_of

pytestmark = pytest.mark.slow

WITH_EPSILON = """
class AddEpsilon(keras.layers.Layer):
    def call(self, x):
        return x + 100 * keras.config.epsilon()


def build():
    model = keras.Sequential([keras.Input((6,)), AddEpsilon(), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
OWN = {"epsilon": 1e-3, "floatx": "float32", "image_data_format": "channels_last", "backend": "tensorflow"}
OF_ANOTHER_PROJECT = {"epsilon": 1e-7, "floatx": "float64", "image_data_format": "channels_first", "backend": "jax"}
CHANGED = "the environment changed, so the bits may differ"


def run_file(lab: Lab, storage: Path, **changes: Any) -> Path:
    spec = spec_of("build", run="any", train__segment_steps=4, storage=str(storage), **changes)
    file = lab.code / "run.yaml"
    file.write_text(spec.model_dump_json(exclude_defaults=True), encoding="utf-8")
    return file


def trained(file: Path, name: str, *words: str, **variables: str) -> tuple[dict[str, Any], str]:
    """Train in a process with these environment variables; the result and what the console showed."""
    command = [sys.executable, "-P", "-m", "flows.without_prefect", str(file), "--set", f"run={name}", *words]
    environment = {**os.environ, **variables}
    done = forked.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in {0, 3}, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, done.stderr


def keras_home(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "keras.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def test_run_keeps_its_keras_config_and_names_what_changed(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, WITH_EPSILON)
    file = run_file(lab, tmp_path / "runs")
    own = keras_home(tmp_path / "own", OWN)
    others = {"KERAS_HOME": keras_home(tmp_path / "others", OF_ANOTHER_PROJECT), "KERAS_BACKEND": "torch"}
    isa = {"ONEDNN_MAX_CPU_ISA": "SSE41"}
    until = ("--until-step", "8")
    straight, _ = trained(file, "straight", *until, KERAS_HOME=own, **isa)

    trained(file, "cut", "--max-segments", "1", KERAS_HOME=own, **isa)
    recorded = entries_of(tmp_path / "runs" / "cut")[0].head.environment
    assert recorded.keras is not None
    assert recorded.keras.model_dump() == {key: OWN[key] for key in ("epsilon", "floatx", "image_data_format")}
    assert recorded.variables is not None
    assert recorded.variables["ONEDNN_MAX_CPU_ISA"] == "SSE41"
    continued, console = trained(file, "cut", *until, **others, **isa)
    assert continued["state_digest"] == straight["state_digest"]
    assert CHANGED not in console
    assert "KERAS_BACKEND = torch is ignored: Baton trains with Keras's backend tensorflow" in console

    # Without the variable oneDNN may choose other kernels, which Baton cannot undo.
    _, console = trained(file, "cut", **others)
    assert f"{CHANGED} from an uninterrupted run: ONEDNN_MAX_CPU_ISA: SSE41 -> none\n" in console

    program = """
import sys
from flows.api import Run
model = Run(sys.argv[1]).model()
import keras
print(keras.config.backend(), keras.config.epsilon(), keras.config.floatx(), model.layers[-1].kernel.dtype)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "runs" / "cut")]
    done = subprocess.run(command, env={**os.environ, **others}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["tensorflow", "0.001", "float32", "float32"], done.stderr[-2000:]


DEBUGGING = """
import os

if "BATON_TEST_DEBUGGED" in os.environ:
    tf.config.run_functions_eagerly(True)


def build():
    if "BATON_TEST_DEBUGGED" in os.environ:
        tf.debugging.enable_check_numerics()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
DEBUGGED_DATA = """
import os

import tensorflow as tf

if "BATON_TEST_DEBUGGED" in os.environ:
    tf.data.experimental.enable_debug_mode()
"""


def test_debugging_modes_are_off_and_said(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, DEBUGGING)
    with (lab.code / "data.py").open("a", encoding="utf-8") as data:
        data.write(DEBUGGED_DATA)
    file = run_file(lab, tmp_path / "runs", train__steps=4)
    plain, console = trained(file, "plain")
    assert "switched on" not in console
    debugged, console = trained(file, "debugged", BATON_TEST_DEBUGGED="1")
    assert debugged["state_digest"] == plain["state_digest"]
    for where, call in (
        ("model.py", "tf.config.run_functions_eagerly(True)"),
        ("model.py:build", "tf.debugging.enable_check_numerics()"),
        ("data.py", "tf.data.experimental.enable_debug_mode()"),
    ):
        assert f"warning: {where} switched on {call}, which would change" in console
