"""`baton run` with a real Prefect server and with the embedded one."""

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.homes import head_of
from tests.support.prefect_server import baton, ended_task_runs, environment_with, post, train_runs
from tests.support.shipped_runs import run_file, settings
from tests.support.unknown_user import can_become_unknown, command_of_unknown_user
from tests.support.watching import wait_until

pytestmark = pytest.mark.slow

NOISE = re.compile(r"Traceback|warning|deprecat|retracing|oneDNN|cuda|anonymous|prefect\.io", re.IGNORECASE)


def baton_in_a_terminal(environment: dict[str, str], *words: str) -> tuple[int, str]:
    """Run `baton` in a terminal; returns the exit code and everything it printed."""
    terminal, end = os.openpty()
    # A fresh interpreter: what TensorFlow prints when it is imported would be seen.
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.commands.main", *words],
        stdin=subprocess.DEVNULL,
        stdout=end,
        stderr=end,
        env=environment | {"TERM": "xterm", "COLUMNS": "120"},
    )
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
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("prefect."):
            with open(os.environ["NOTED_IMPORTS"], "a") as noted:
                module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
                noted.write(module + ":" + threading.current_thread().name + chr(10))
if sys.argv[0] == "-m":  # neither the server nor another child
    sys.meta_path.insert(0, Finder())
"""


def test_prefect_run_has_the_same_bytes_and_is_visible(
    train_without_prefect: Callable[..., Any], stored_bytes: Callable[[str], Any], server: str, tmp_path: Path
) -> None:
    straight = train_without_prefect("digits", tmp_path / "straight", extra=["train.segment_steps=1000"]).result
    environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=server)
    words = ["run", str(run_file("digits")), *settings("digits", tmp_path / "flow", extra=["train.segment_steps=13"])]

    first = baton(environment, *words, "--max-segments", "2", "--json")
    assert first.returncode == 3, first.stderr
    assert json.loads(first.stdout.splitlines()[-1])["exit_reason"] == "max_segments"
    second = baton(environment, *words, "--json")
    assert second.returncode == 0, second.stderr
    result = json.loads(second.stdout.splitlines()[-1])
    keys = {"run", "home", "step", "checkpoint", "state_digest", "segments", "metrics", "exit_reason"}
    assert keys <= result.keys()
    assert result["state_digest"] == straight["state_digest"]
    assert stored_bytes(result["checkpoint"]) == stored_bytes(straight["checkpoint"])

    runs = train_runs(server, tmp_path / "flow")
    ids = {"any_": [run["id"] for run in runs]}
    assert {run["name"] for run in runs} == {"digits-cnn → 60"}
    assert len(runs) == 2
    assert all({"baton", "run:digits-cnn"} <= set(run["tags"]) for run in runs)
    assert {run["state_type"] for run in runs} == {"COMPLETED"}
    # Five segments, each with its commit, two preparations, two restores, and the evaluation at the end.
    tasks = ended_task_runs(server, runs, 15)
    assert {task["name"].split()[0] for task in tasks} == {
        "prepare-data",
        "init-or-restore",
        "train-segment",
        "checkpoint",
        "evaluate",
    }
    logs = post(server, "logs/filter", {"logs": {"flow_run_id": ids}, "limit": 200})
    assert any("step 60 committed" in log["message"] for log in logs)
    assert any("evaluated on" in log["message"] for log in logs)


def test_first_run_prints_no_noise_and_repeats_nothing(tmp_path: Path) -> None:
    """With a fresh PREFECT_HOME and Prefect's embedded API."""
    environment = environment_with(tmp_path / "prefect")
    words = ["run", str(run_file("digits")), *settings("digits", tmp_path / "runs", extra=["train.segment_steps=20"])]
    (tmp_path / "sitecustomize.py").write_text(NOTE_IMPORTS)
    noted = tmp_path / "noted"
    code, seen = baton_in_a_terminal(
        environment | {"PYTHONPATH": f"{tmp_path}:{CHECKOUT}", "NOTED_IMPORTS": str(noted)}, *words
    )
    assert code == 0, seen[-3000:]
    # Not the process that trains; and in the one that records it, no thread of a stage or an artifact.
    assert set(noted.read_text().split()) == {"flows.with_prefect.recorder:MainThread"}
    assert NOISE.findall(seen) == []
    assert "committed" in seen
    assert "examples/s" in seen
    assert " left" in seen
    assert "Done: digits-cnn is at step 60 of 60" in seen
    report = tmp_path / "runs" / "digits-cnn" / "report" / "index.html"
    assert str(report) in seen.replace("\r\n", "")
    assert report.is_file()
    entries = sorted((tmp_path / "runs" / "digits-cnn" / "log").iterdir())
    again = baton(environment, *words)
    assert again.returncode == 0
    assert "Nothing to do" in again.stdout
    assert sorted((tmp_path / "runs" / "digits-cnn" / "log").iterdir()) == entries


def test_refused_model_exits_2_with_one_paragraph(server: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "model.py").write_text("def build_model():\n    raise ValueError('no such width')\n")
    (folder / "run.yaml").write_text(
        "run: mine\nstorage: ./runs\ndata: {source: digits}\nmodel: model.py:build_model\n"
        "train: {steps: 10, global_batch_size: 8}\n"
    )
    refused = baton(environment_with(tmp_path / "prefect", PREFECT_API_URL=server), "run", str(folder / "run.yaml"))
    assert refused.returncode == 2
    assert "ValueError: no such width" in refused.stderr
    assert "Traceback" not in refused.stderr + refused.stdout
    assert not (folder / "runs" / "mine").exists()


@contextmanager
def server_without_answers() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        yield f"http://127.0.0.1:{mute.getsockname()[1]}/api"


@contextmanager
def server_with_faults() -> Iterator[str]:
    """Answers 500 to every request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(500)

        do_POST = do_GET  # noqa: N815 - http.server's name

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/api"
        server.shutdown()


UNUSABLE: dict[str, tuple[Callable[[], AbstractContextManager[str]], str]] = {
    "missing": (lambda: nullcontext("http://127.0.0.1:9/api"), "no Prefect server responds there (ConnectError"),
    "hanging": (server_without_answers, "no Prefect server responds there (no response within 20 s)"),
    "faulty": (server_with_faults, "no Prefect server responds there (HTTP 500)"),
    "unreadable": (lambda: nullcontext("http://[bad"), "Prefect's settings cannot be read: "),
    "no home": (lambda: nullcontext(""), "Prefect's embedded server does not start: "),
}


@pytest.fixture(scope="module")
def digest(train_without_prefect: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state digest of the short digits run."""
    return str(train_without_prefect("digits", tmp_path_factory.mktemp("straight")).result["state_digest"])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] if kind == "faulty" else []) for kind in UNUSABLE]
)
def test_run_without_a_usable_prefect_costs_one_note(kind: str, digest: str, tmp_path: Path) -> None:
    serve, why = UNUSABLE[kind]
    with serve() as url:
        environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=url)
        if kind == "no home":
            environment |= {"PREFECT_HOME": os.devnull}
        done = baton(environment, "run", str(run_file("digits")), *settings("digits", tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    (note,) = [line for line in done.stdout.splitlines() if "Prefect" in line and "starting Prefect" not in line]
    assert "this run is not recorded in Prefect: " in note
    assert why in note
    assert "Traceback" not in done.stdout + done.stderr
    assert "Done: digits-cnn is at step 60 of 60" in done.stdout
    head = head_of(tmp_path / "runs" / "digits-cnn")
    assert head is not None
    assert head.tip is not None
    assert head.tip.state_digest == digest


def test_stages_in_other_processes_need_prefect(tmp_path: Path) -> None:
    environment = environment_with(tmp_path / "prefect", PREFECT_API_URL="http://127.0.0.1:9/api")
    words = settings("digits", tmp_path / "runs", extra=["stages.train_segment=train-segment/docker"])
    refused = baton(environment, "run", str(run_file("digits")), *words)
    assert refused.returncode == 2
    assert "PREFECT_API_URL = http://127.0.0.1:9/api: no Prefect server responds there" in refused.stderr
    assert "hint: start the server" in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_commit_beside_the_training_is_a_task_run_of_its_own(server: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.call_function", "tests.support.recorded_stages", "run_beside", "{}"]
    environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=server)
    done = forked.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    flow_run = json.loads(done.stdout.splitlines()[-1].removeprefix("result: "))
    recorded = ended_task_runs(server, [{"id": flow_run}], 3)
    first, commit, second = sorted(recorded, key=lambda run: str(run["start_time"]))
    names = [run["name"].split()[0] for run in (first, commit, second)]
    assert names == ["train-segment", "checkpoint", "train-segment"]
    assert first["start_time"] <= commit["start_time"] <= second["start_time"] <= commit["end_time"]
    assert {tuple(run["tags"]) for run in recorded} == {("baton",)}
    logs: list[dict[str, Any]] = []

    def logged() -> bool:
        logs[:] = post(server, "logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run]}}})
        return any(log["message"] == "trained" for log in logs)

    wait_until(logged)
    assert [log["task_run_id"] for log in logs if log["message"] == "trained"] == [second["id"]]


@pytest.mark.skipif(not can_become_unknown(), reason="needs root and setpriv")
def test_user_without_home_folder_trains(tmp_path: Path) -> None:
    """The whole start: Prefect and other libraries ask for a home folder when they are imported."""
    storage, temporary = tmp_path / "storage", tmp_path / "temporary"
    for folder in (storage, temporary):
        folder.mkdir()
        folder.chmod(0o777)
    words = ["run", str(run_file("digits")), *settings("digits", storage)]
    program = [sys.executable, "-W", "ignore", "-m", "flows.commands.main", *words]
    kept = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_SERVER_EPHEMERAL")}
    command = command_of_unknown_user(*program, TMPDIR=str(temporary), PYTHONPATH=str(CHECKOUT), **kept)
    done = subprocess.run(command, cwd=storage, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Prefect's records of this run go to a temporary one" in done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    assert [path.name for path in temporary.iterdir() if path.name.startswith("baton-home-")] == []
