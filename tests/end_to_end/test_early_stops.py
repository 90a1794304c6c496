"""A stop while a command is still starting: it ends within seconds, with exit code 3, and leaves no server behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.prefect_server import environment_with

pytestmark = pytest.mark.slow


def processes_of(prefect_home: Path) -> dict[int, str]:
    """Process ids and command lines of the processes with this PREFECT_HOME."""
    mark = f"PREFECT_HOME={prefect_home}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return {pid: line for pid, line in found.items() if line}  # a process that has ended has no command line


def imports(process: subprocess.Popen[bytes], library: str) -> bool:
    """Whether a process that this one has started has mapped a library into memory."""
    for pid in forked.descendants(process.pid):
        with suppress(OSError):
            if library in Path(f"/proc/{pid}/maps").read_text():
                return True
    return False


def serves(process: subprocess.Popen[bytes], home: Path) -> bool:
    others = {pid: line for pid, line in processes_of(home).items() if pid != process.pid}
    return any("with_prefect.recorder" in line for line in others.values())


PHASES: dict[str, Callable[[subprocess.Popen[bytes], Path], bool]] = {
    "server-started": serves,
    "tensorflow-imports": lambda process, _home: imports(process, "libtensorflow_framework"),
}


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("server-started", signal.SIGTERM),
        ("tensorflow-imports", signal.SIGINT),
        pytest.param("server-started", signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param("tensorflow-imports", signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_a_stop_during_the_start_exits_3(phase: str, number: signal.Signals, tmp_path: Path) -> None:
    home = tmp_path / "prefect"
    # However slow Prefect starts on a busy machine, the run has no checkpoint by then.
    (tmp_path / "data.py").write_text("import time\n\n\ndef load():\n    time.sleep(600)\n")
    (tmp_path / "model.py").write_text("def build():\n    raise NotImplementedError\n")
    (tmp_path / "run.yaml").write_text(
        "run: slow\nstorage: ./runs\ndata: {source: data.py:load}\nmodel: model.py:build\n"
        "train: {steps: 8, global_batch_size: 8}\naccelerator: {kind: cpu}\n"
    )
    command = [sys.executable, "-m", "baton.flows.commands.main", "run", str(tmp_path / "run.yaml")]
    environment = environment_with(home)
    # A new session: the signal goes to the command only, and /proc shows its environment.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=CHECKOUT, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while not PHASES[phase](process, home):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        out = process.communicate(timeout=60)[0].decode()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 3, out
    assert "stopped before the run started; the same command starts it" in out
    assert "Traceback" not in out
    assert processes_of(home) == {}
