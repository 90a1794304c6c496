"""`baton run` with Prefect's embedded server, as a user starts it; and stages that need a server of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import CHECKOUT
from tests.support.prefect_server import baton, environment_with
from tests.support.shipped_runs import run_file, settings
from tests.support.unknown_user import can_become_unknown, command_of_unknown_user

pytestmark = pytest.mark.slow

NOISE = re.compile(r"Traceback|warning|deprecat|retracing|oneDNN|cuda|anonymous|prefect\.io", re.IGNORECASE)


def run_in_a_terminal(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a command in a terminal; returns the exit code and everything it printed."""
    terminal, end = os.openpty()
    process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=end, stderr=end)
    os.close(end)
    seen = b""
    while True:
        try:
            block = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        seen += block
    os.close(terminal)
    return process.wait(timeout=300), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())


# Two threads that import Prefect at once can deadlock: its modules import each other in circles.
NOTE_IMPORTS = """
import os, sys, threading
def main_waits_for_the_server():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None and frame.f_code.co_name != "_serve":
        frame = frame.f_back
    return frame is not None
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("prefect."):
            with open(os.environ["NOTED_IMPORTS"], "a") as noted:
                module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
                thread = "one" if main_waits_for_the_server() else threading.current_thread().name
                noted.write(module + ":" + thread + chr(10))
if sys.argv[0] == "-m":  # no other child
    sys.meta_path.insert(0, Finder())
"""


@pytest.mark.skipif(not can_become_unknown(), reason="needs root and setpriv")
def test_first_run_of_a_user_without_a_home_has_no_noise(tmp_path: Path) -> None:
    """Fresh interpreters: Prefect and other libraries ask for a home folder, or print, when they are imported."""
    storage, temporary, code = (tmp_path / name for name in ("storage", "temporary", "code"))
    for folder in (storage, temporary, code):
        folder.mkdir()
        folder.chmod(0o777)
    (code / "sitecustomize.py").write_text(NOTE_IMPORTS)
    words = ["run", str(run_file("digits")), *settings("digits", storage, extra=["train.segment_steps=20"])]
    kept = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_SERVER_EPHEMERAL")}
    command = command_of_unknown_user(
        *(sys.executable, "-m", "baton.flows.commands.main", *words),
        **(kept | {"TMPDIR": str(temporary), "PYTHONPATH": f"{code}:{CHECKOUT}"}),
        NOTED_IMPORTS=str(code / "noted"),
        TERM="xterm",
        COLUMNS="120",
    )
    exit_code, seen = run_in_a_terminal(command, storage)
    assert exit_code == 0, seen[-3000:]
    # Not the process that trains. In the one that records it, no thread of a stage or an artifact; and the server's
    # only while it starts, for which the main thread waits.
    recorder = "baton.flows.with_prefect.recorder"
    assert set((code / "noted").read_text().split()) == {f"{recorder}:one", f"{recorder}:MainThread"}
    on_one_line = re.sub(r"\s+", " ", seen)
    assert "warning: HOME is not set" in on_one_line
    assert "Prefect's records of this run go to a temporary one" in on_one_line
    assert NOISE.findall(seen) == ["warning"]
    for words_of_the_run in ("committed", "examples/s", " left", "Done: digits-cnn is at step 60 of 60"):
        assert words_of_the_run in seen
    report = storage / "digits-cnn" / "report" / "index.html"
    assert str(report) in seen.replace("\r\n", "")
    assert report.is_file()
    assert [path.name for path in temporary.iterdir() if path.name.startswith("baton-home-")] == []


def test_stages_in_other_processes_need_prefect(tmp_path: Path) -> None:
    environment = environment_with(tmp_path / "prefect", PREFECT_API_URL="http://127.0.0.1:9/api")
    words = settings("digits", tmp_path / "runs", extra=["stages.train_segment=train-segment/docker"])
    refused = baton(environment, "run", str(run_file("digits")), *words)
    assert refused.returncode == 2
    assert "PREFECT_API_URL = http://127.0.0.1:9/api: no Prefect server responds there" in refused.stderr
    assert "hint: start the server" in refused.stderr
    assert not (tmp_path / "runs").exists()
