"""Child processes end with their parent, even if the parent is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from flows.process import die_with_parent
from tests.support.checkout import CHECKOUT

SLEEPS = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]

# The child is started in a thread that ends at once, like the thread that starts Prefect's server.
PARENT = """
import sys, threading, time
from flows.process.children import start_child
started = []

def start():
    started.append(start_child(sys.argv[2:], death_signal=sys.argv[1] == "signal"))

thread = threading.Thread(target=start)
thread.start()
thread.join()
print(started[0].pid, flush=True)
time.sleep(600)
"""

PREFECT = """
import time
from flows.with_prefect.server import PrefectStart, set_quiet_defaults
set_quiet_defaults()
print(PrefectStart()._server.process.pid, flush=True)
time.sleep(600)
"""

PROOF = """
import sys, threading, time
from pathlib import Path
from flows.proof.choose import training_of
from flows.proof.execute import FreshProcesses
from tasks.foundation.contracts.run_file import load_run_file

folder = Path(sys.argv[1])
run = load_run_file(folder / "run.yaml")
trial = training_of(run, (), name="straight", storage=folder / "scratch", steps=4, segment_steps=4)
with FreshProcesses(folder / "output")._started(trial) as (chief, _):
    print(chief.pid, flush=True)
    time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in {"Z", "X"}
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def child_of_a_killed_parent(code: str, *words: str, **environment: str) -> int:
    """Start a process that starts a child, kill the process, and return the child's process id."""
    command = [sys.executable, "-c", code, *words]
    parent = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=CHECKOUT,
        env={**os.environ, **environment},
    )
    assert parent.stdout is not None
    try:
        child = int(parent.stdout.readline())
        assert is_alive(child)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    return child


def assert_child_ends(child: int) -> None:
    try:
        wait_until(lambda: not is_alive(child))
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("how", ["signal", "pipe"])
def test_a_child_outlives_its_thread_but_not_its_parent(how: str) -> None:
    assert_child_ends(child_of_a_killed_parent(PARENT, how, *SLEEPS))


def test_the_embedded_server_ends_with_a_killed_command(tmp_path: Path) -> None:
    kept = {name: "" for name in os.environ if name.startswith("PREFECT_API")}
    assert_child_ends(child_of_a_killed_parent(PREFECT, PREFECT_HOME=str(tmp_path), **kept))


def test_a_trial_ends_with_a_killed_proof(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import time\ntime.sleep(600)\n\n\ndef build():\n    pass\n")
    (tmp_path / "run.yaml").write_text(
        "run: mine\nstorage: ./runs\ndata: {source: digits}\nmodel: model.py:build\n"
        "train: {steps: 10, global_batch_size: 8}\n"
    )
    assert_child_ends(child_of_a_killed_parent(PROOF, str(tmp_path)))


def test_a_child_started_after_its_parents_death_exits(tmp_path: Path) -> None:
    wanted = [sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    script = [sys.executable, "-I", "-S", die_with_parent.__file__]
    orphan = subprocess.run([*script, "1", "-1", *wanted], check=False)  # the parent is this process, not process 1
    assert orphan.returncode == 1
    assert not (tmp_path / "ran").exists()
    assert subprocess.run([*script, str(os.getpid()), "-1", *wanted], check=False).returncode == 0
    assert (tmp_path / "ran").exists()
