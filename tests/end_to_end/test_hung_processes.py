"""A process that hangs records its stacks and exits 3, whatever it waits for; the next command continues.

Steps, inputs and stores block here as they do on a machine: inside TensorFlow, or in a system call.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.gcs.server import FakeGcs, FaultPlan
from tests.support import forked
from tests.support.cloud_runs import HOMES, entries_in
from tests.support.homes import read_history
from tests.support.prefect_server import baton, environment_with, post, train_runs
from tests.support.shipped_runs import SLOW, settings, slow_digits
from tests.support.watching import attempts_of, commits_of, wait_until

pytestmark = pytest.mark.slow

DATA = """
import os
from pathlib import Path

import numpy as np
import tensorflow as tf

SIDE = str(Path(__file__).with_name("side.txt"))


def load():
    draw = np.random.default_rng(7)
    for number in range(60):
        yield draw.normal(size=6).astype(np.float32), np.int64(number % 3)


def transform(example):
    x, y = example
    # Opening a pipe that nobody writes to blocks, like a file on a server that is gone.
    return x + tf.cast(tf.strings.length(tf.io.read_file(SIDE)) > 99, tf.float32), y
"""
MODEL = """
import itertools
import os
import time

import keras
import tensorflow as tf

CALLS = itertools.count(1)


def block():
    if str(next(CALLS)) == os.environ.get("BATON_TEST_BLOCK_AT"):
        time.sleep(3600)


class Blocks(keras.layers.Layer):
    def call(self, x, training=False):
        if not training:
            return x
        with tf.control_dependencies([tf.py_function(block, [], [])]):
            return tf.identity(x)


def build():
    model = keras.Sequential([keras.Input((6,)), Blocks(), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


def write_run(folder: Path, name: str) -> Path:
    """A run of 24 steps with a commit at each eighth."""
    folder.mkdir()
    spec = {
        "run": "blocks",
        "storage": "./runs",
        "data": {"source": "data.py:load", "transform": "data.py:transform"},
        "model": "model.py:build",
        "train": {"steps": 24, "segment_steps": 8, "global_batch_size": 8, "log_every_steps": 2},
        "accelerator": {"kind": "cpu"},
    }
    (folder / name).write_text(yaml.safe_dump(spec), encoding="utf-8")
    (folder / "data.py").write_text(DATA, encoding="utf-8")
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    (folder / "side.txt").write_text("there", encoding="utf-8")
    return folder / name


def train(file: Path, *overrides: str, code: int, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-W", "ignore", "-m", "baton.flows.train", str(file), *words]
    env = {**os.environ, **environment}
    done = forked.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == code, done.stderr[-3000:]
    return done


def flow_run_of(server: str, file: Path) -> tuple[dict[str, Any], str]:
    """The flow run of a run file, and its log."""
    (found,) = train_runs(server, file)
    lines = post(server, "logs/filter", {"logs": {"flow_run_id": {"any_": [found["id"]]}}, "limit": 200})
    return found, "\n".join(line["message"] for line in lines)


def test_hung_step_and_input_leave_and_resume_exactly(server: str, tmp_path: Path) -> None:
    straight = json.loads(train(write_run(tmp_path / "straight", "run.yaml"), code=0).stdout)
    file = write_run(tmp_path / "cut", "run.yaml")
    home = tmp_path / "cut" / "runs" / "blocks"

    # A step never ends, in the second segment, while Prefect records the run, which it begins within ten seconds.
    environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=server, BATON_TEST_BLOCK_AT="14")
    done = baton(environment, "run", str(file), "--set", "stop.hang_seconds=12")
    assert done.returncode == 3, done.stderr[-3000:]
    record = attempts_of(home)[-1]
    assert (record.ended, record.doing, record.committed_step) == ("hung", "train", 8)
    assert record.message is not None
    assert "no inner loop has ended for " in record.message
    assert record.traceback is not None
    assert 'model.py", line 14 in block' in record.traceback
    assert "MainThread" in record.traceback
    assert record.message in done.stderr
    assert "in block" in done.stderr
    found, logged = flow_run_of(server, file)
    assert found["state"]["type"] == "CRASHED"
    assert record.message in found["state"]["message"]
    assert record.message in logged
    assert "in block" in logged

    # The input of the next attempt is stuck from its first batch on.
    side = tmp_path / "cut" / "side.txt"
    side.unlink()
    os.mkfifo(side)
    train(file, "stop.hang_seconds=1.5", code=3)
    stuck = attempts_of(home)[-1]
    assert (stuck.ended, stuck.committed_step) == ("hung", 8)
    assert stuck.message is not None
    assert " has not ended for " in stuck.message  # the restore, which opens the input, or the first inner loop
    assert [step for step, _ in commits_of(home)] == [0, 8]

    side.unlink()
    side.write_text("there", encoding="utf-8")
    resumed = json.loads(train(file, code=0).stdout)
    assert resumed["state_digest"] == straight["state_digest"]
    assert read_history(home) == read_history(straight["home"])


def test_store_that_never_answers_ends_the_wait_for_a_commit(cloud: FakeGcs, tmp_path: Path) -> None:
    """Baton's own limits of a request are longer here than the limit of a hang."""
    endless = [*SLOW, "train.steps=2000000", "train.segment_steps=2000000", "train.log_every_steps=10"]
    often = [*endless, "checkpoint.every_seconds=1", "stop.hang_seconds=1.5"]
    command = [sys.executable, "-W", "ignore", "-m", "baton.flows.train", str(slow_digits(tmp_path / "code"))]
    command += settings("digits", "gs://bucket/runs", extra=often)
    home = f"runs/{HOMES['digits']}/"
    with (tmp_path / "output").open("wb") as output:
        process = forked.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "BATON_STORAGE_STALL_SECONDS": "600"}
        )
    with forked.killed_at_end(process):
        wait_until(lambda: entries_in(cloud, home) >= 3, process)
        stall = {"match": {"kind": ""}, "times": None, "fault": "stall", "stall_seconds": 3600.0}
        cloud.faults = FaultPlan.scripted([stall])
        code = process.wait(300)
    cloud.faults = FaultPlan.scripted([])
    text = (tmp_path / "output").read_text()
    assert code == 3, text[-3000:]
    assert re.search(r"hung: commit has not ended for \d+ s after step \d+", text)
    assert "baton-save (most recent call first):" in text
    names = cloud.store.names("bucket")
    entries = [json.loads(cloud.store.bytes("bucket", name)) for name in names if f"{home}log/0" in name]
    assert {entry["body"]["kind"] for entry in entries} <= {"origin", "checkpoint", "retire"}
