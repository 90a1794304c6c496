"""Child processes and threads of user code: they work, and none of them keeps a process that is asked to stop."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.watching import wait_until

pytestmark = pytest.mark.slow

DATA = """
import atexit
import ctypes
import os
import sys
import threading
import time
from multiprocessing import get_context

import numpy as np

HEAVY = {"tensor" "flow", "prefect", "baton.flows.relay", "baton.flows.commands.main"}


def example(number):
    return np.full(6, number / 64, np.float32), sorted(HEAVY & sys.modules.keys())


def wait_in_a_pool():
    with get_context("spawn").Pool(2) as pool:
        pool.map(example, range(4))
        print("waiting", flush=True)
        pool.map(time.sleep, [3600])  # the other child waits for work, and has the lock of the queue


def wait_in_a_library():
    lock = ctypes.CDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(64)
    lock(mutex)
    print("waiting", flush=True)
    lock(mutex)


def wait_at_the_exit():
    threading.Thread(target=time.sleep, args=[3600]).start()
    atexit.register(time.sleep, 3600)
    print("waiting", flush=True)
    time.sleep(3600)


def load():
    with get_context("spawn").Pool(2) as pool:
        rows = pool.map(example, range(64))
    assert not any(heavy for _, heavy in rows), rows[0]
    globals().get(os.environ.get("BATON_TEST_WAIT", ""), list)()
    return np.stack([row for row, _ in rows]), np.arange(64) % 3
"""
MODEL = """
import keras


def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "run.yaml"
    found.write_text(
        "run: pools\nstorage: ./runs\ndata: {source: data.py:load}\nmodel: model.py:build\nstop: {grace_seconds: 2}\n"
        "train: {steps: 8, segment_steps: 8, global_batch_size: 8}\naccelerator: {kind: cpu}\n"
    )
    (tmp_path / "data.py").write_text(DATA)
    (tmp_path / "model.py").write_text(MODEL)
    return found


@pytest.mark.usefixtures("cloud")
def test_pool_of_new_processes_gives_the_examples(file: Path) -> None:
    command = [sys.executable, "-m", "baton.flows.train", str(file), "--set", "storage=gs://bucket/runs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 8


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["baton.flows.commands.main", "run"], "wait_in_a_pool"),
        (["baton.flows.train"], "wait_in_a_library"),
        (["baton.flows.train"], "wait_at_the_exit"),
    ],
)
def test_stopped_process_leaves_whatever_waits(file: Path, tmp_path: Path, command: list[str], what: str) -> None:
    output = tmp_path / "output"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, str(file)],
            env={**os.environ, "BATON_TEST_WAIT": what, "PREFECT_HOME": str(tmp_path / "prefect")},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: b"waiting" in output.read_bytes(), process)
        # As the end of a session does; the youngest first, so that the pool's child ends with the lock.
        for pid in reversed((process.pid, *forked.descendants(process.pid))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        code = process.wait(120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = output.read_text()
    assert code == 3, text[-3000:]
    assert ("stop.grace_seconds = 2" in text) == (what != "wait_at_the_exit"), text[-3000:]
