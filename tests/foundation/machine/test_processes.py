"""The age of a process, and whether it still runs."""

import os
import subprocess
import sys
import time

import pytest

from baton.tasks.foundation.machine import processes
from baton.tasks.foundation.machine.processes import age_seconds, is_gone, process_name

pytestmark = pytest.mark.skipif(not process_name(), reason="the kernel tells nothing here")

AGE = "import time; time.sleep(1.5)\nfrom baton.tasks.foundation.machine import processes as p\nprint(p.age_seconds())"


def test_age_counts_from_process_start() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", AGE], capture_output=True, text=True, check=True)
    assert 1.5 <= float(done.stdout) <= time.monotonic() - began + 0.02


def test_own_process_is_running() -> None:
    assert age_seconds() > 0
    assert not is_gone(process_name())


def test_killed_process_is_gone_before_and_after_reaping() -> None:
    code = (
        "from baton.tasks.foundation.machine.processes import process_name\nprint(process_name(), flush=True)\ninput()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    assert not is_gone(name)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(name)
    child.communicate()
    assert is_gone(name)


def test_reused_pid_is_another_process() -> None:
    boot, space, pid, ticks = process_name().split("/")
    assert is_gone(f"{boot}/{space}/{pid}/{int(ticks) - 1}")


@pytest.mark.parametrize("name", ["", "x", "a/b/c/d", "other-boot/1/1/1", "/".join("x" * 4)])
def test_processes_of_other_machines_are_unknown(name: str) -> None:
    assert not is_gone(name)


def test_nothing_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    name = process_name()
    monkeypatch.setattr(processes, "_PROC", processes._PROC / "nowhere")
    assert (age_seconds(), process_name(), is_gone(name)) == (0.0, "", False)
