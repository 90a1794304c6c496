"""A small run that passes every check of the doctor, and edits that put a fault into it."""

import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from baton.flows.commands.doctor import run_checks
from baton.flows.doctor.run_file_checks import Finding
from baton.tasks.foundation.contracts.run_file import RunFile, load_run_file
from baton.tasks.foundation.machine.tpu import TpuType, tpu_type

ALL_CHECKS = [
    "run file",
    "accelerator",
    "batch",
    "code",
    "storage",
    "preflight",
    "data",
    "model",
    "dtype",
    "graph",
    "xla",
    "memory",
    "step",
    "input",
    "commit",
    "preemption",
]
V5E, SLICE = tpu_type("v5litepod-8"), tpu_type("v5litepod-16")

_RUN = """
run: small
storage: ./runs
data: {source: "data.py:load", validation_fraction: 0.2, classes: 3}
model: model.py:build_model
train: {steps: 1000, global_batch_size: 64}
"""
_DATA = """
import numpy as np

def load():
    draw = np.random.default_rng(7)
    for number in range(96):
        yield draw.normal(size=6).astype(np.float32), np.int64(number % 3)
"""
_MODEL = """
import keras
import tensorflow as tf

class Between(keras.layers.Layer):
    def call(self, x):
        return x

def build_model():
    x = keras.Input((6,))
    hidden = Between(name="between")(keras.layers.Dense(8, activation="relu")(x))
    model = keras.Model(x, keras.layers.Dense(3)(hidden))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model
"""


def make_run(folder: Path, *edits: tuple[str, str, str]) -> Path:
    """Make the run's folder with edits, each (file, old text, new text); return the run file."""
    folder.mkdir()
    for name, text in (("run.yaml", _RUN), ("data.py", _DATA), ("model.py", _MODEL)):
        (folder / name).write_text(textwrap.dedent(text).lstrip(), encoding="utf-8")
    for file, old, new in edits:
        text = (folder / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} contains {old!r} {text.count(old)} times"
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    return folder / "run.yaml"


def load_faulty_run(tmp_path: Path, *overrides: str) -> RunFile:
    """Make the run in a subfolder of `tmp_path`, and load its run file."""
    return load_run_file(make_run(tmp_path / "run"), overrides)


def layer_doing(*lines: str) -> tuple[str, str, str]:
    """Return an edit that makes the layer `between` run these lines on its input `x`."""
    return "model.py", "        return x", textwrap.indent("\n".join(lines), " " * 8)


class _Enough(Exception):
    """The check that was asked for has reported."""


def diagnose(
    file: Path,
    *,
    tpu: TpuType | None = V5E,
    step_seconds: float | None = None,
    overrides: Sequence[str] = (),
    until: str | None = None,
) -> dict[str, Finding]:
    """Run the doctor; return the findings by the names of their checks, after asserting that each check ran once.

    Args:
        until: the last check that runs; None: all run.
    """
    reported: list[Finding] = []

    def report(finding: Finding) -> None:
        reported.append(finding)
        if finding.check == until:
            raise _Enough

    with suppress(_Enough):
        assert reported == run_checks(file, overrides, report, tpu=tpu, step_seconds=step_seconds).findings
    assert [finding.check for finding in reported] == ALL_CHECKS[: len(reported)]
    assert reported[-1].check == (until or ALL_CHECKS[-1])
    return {finding.check: finding for finding in reported}
