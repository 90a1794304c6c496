"""A secret in a run file is in no file and no output, whatever says it: Baton, the user's code, a library, Prefect.

Only the user's run file has it. Real processes work, fail and share what they made.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from baton.flows.commands.main import main
from tests.support.checkout import CHECKOUT
from tests.support.prefect_server import environment_with, running_server

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
# Those that train are processes with one Prefect server; it has the failed flow run too.
TRAINED: list[tuple[list[str], int]] = [(["run", "run.yaml"], 0), (["run", "run.yaml", *FAILS], 2)]
SHARED: list[tuple[list[str], int]] = [
    (["fork", "runs/digits", "--as", "forked"], 0),
    (["report", "runs/digits", "--places"], 0),
    (["export", "runs/digits", "--to", "out.keras", "--format", "keras"], 2),  # the home has no secret
]


@pytest.mark.slow
def test_no_file_and_no_output_has_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for name, text in {"run.yaml": yaml.safe_dump(RUN), "model.py": MODEL, "data.py": DATA}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "prefect").mkdir()
    with running_server(tmp_path / "prefect") as url:
        homes = {"HOME": str(tmp_path), "PYTHONPATH": str(CHECKOUT)}
        environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=url, **homes)
        for words, code in TRAINED:
            program = [sys.executable, "-m", "baton.flows.commands.main", *words]
            done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, check=False)
            assert done.returncode == code, (done.stdout + done.stderr).decode()
            assert SECRET.encode() not in done.stdout + done.stderr, f"{words}: {(done.stdout + done.stderr).decode()}"
    assert b"https://***@data.example.org/x?sig=*** refused {'password': ***}" in done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    for words, code in SHARED:
        assert main(words) == code
        printed = b"".join(capfdbinary.readouterr())
        assert SECRET.encode() not in printed, f"{words}: {printed.decode()}"
    assert list(tmp_path.glob("prefect/*.db*"))
    with_secret = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert with_secret == [tmp_path / "run.yaml"]
