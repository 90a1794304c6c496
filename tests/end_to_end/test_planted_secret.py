"""A secret in a run file is in no file and no output, whatever says it: Baton, the user's code, a library, Prefect.

Only the user's run file has it. Real processes work, fail and share what they made.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.checkout import CHECKOUT

SECRET = "hunter2"  # noqa: S105 - the one that must not appear
ADDRESS = f"https://me:{SECRET}/with blank@data.example.org/x?sig={SECRET}"
MODEL = """
import keras

def build_model(endpoint, credentials):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model
"""
DATA = """
import logging
import warnings
import numpy as np

def load(url, api_key, headers, fails=False):
    logging.getLogger("client").warning("asked %s with api_key=%s", url, api_key)
    warnings.warn(f"{url} is slow, sent {headers}")
    if fails:
        raise OSError(f"{url} refused {{'password': ['{api_key}']}}")
    for number in range(64):
        yield np.full(4, number, np.float32), np.int64(number % 2)
"""
OPTIONS = {"url": ADDRESS, "api_key": SECRET, "headers": {"Authorization": f"Token {SECRET}"}}
RUN = {
    "run": "digits",
    "storage": "runs",
    "data": {"source": "data.py:load", "options": OPTIONS},
    "model": {
        "build": "model.py:build_model",
        "options": {"endpoint": f"me:{SECRET}@host:99", "credentials": {"password": SECRET}},
    },
    "train": {"steps": 4, "segment_steps": 2, "global_batch_size": 16},
    "metadata": {"data": ADDRESS, "api_key": SECRET},
}
FAILS = ["--set", "data.options.fails=true", "--set", "run=failing"]
BATON, BARE = ("-m", "flows.commands.main"), ("-m", "flows.without_prefect")
COMMANDS: list[tuple[tuple[str, ...], list[str], int]] = [
    (BATON, ["run", "run.yaml"], 0),
    (BATON, ["run", "run.yaml", *FAILS], 2),
    (BARE, ["run.yaml", *FAILS], 2),
    (BATON, ["fork", "runs/digits", "--as", "forked"], 0),
    (BATON, ["report", "runs/digits", "--places"], 0),
    (BATON, ["export", "runs/digits", "--to", "out.keras", "--format", "keras"], 2),  # the home has no secret
]


@pytest.mark.slow
def test_no_file_and_no_output_has_the_secret(tmp_path: Path) -> None:
    for name, text in {"run.yaml": yaml.safe_dump(RUN), "model.py": MODEL, "data.py": DATA}.items():
        (tmp_path / name).write_text(text)
    homes = {"PREFECT_HOME": str(tmp_path / "prefect"), "HOME": str(tmp_path), "PYTHONPATH": str(CHECKOUT)}
    for program, words, code in COMMANDS:
        done = subprocess.run(
            [sys.executable, *program, *words],
            cwd=tmp_path,
            env={**os.environ, **homes},
            capture_output=True,
            check=False,
        )
        printed = done.stdout + done.stderr
        assert done.returncode == code, printed.decode()
        assert SECRET.encode() not in printed, f"{words}: {printed.decode()}"
        if "--set" in words:
            assert b"https://***@data.example.org/x?sig=*** refused {'password': ***}" in printed
    assert list(tmp_path.glob("prefect/*.db*"))
    with_secret = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert with_secret == [tmp_path / "run.yaml"]
