"""`baton run` as a user types it, against a real Prefect server and against the embedded one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import run_file, settings

pytestmark = pytest.mark.slow

NOISE = re.compile(r"Traceback|warning|deprecat|retracing|oneDNN|cuda|anonymous|prefect\.io", re.IGNORECASE)


def baton(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.commands.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


def baton_in_a_terminal(environment: dict[str, str], *words: str) -> tuple[int, str]:
    """Exit code, and everything that a person would have seen scroll by."""
    terminal, end = os.openpty()
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
    return process.wait(timeout=60), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())


def environment_with(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return kept | {"PREFECT_HOME": str(home)} | more


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prefect server of its own on a free port of 127.0.0.1; its API's address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    home = tmp_path_factory.mktemp("prefect-server")
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    environment = environment_with(home, PREFECT_SERVER_ANALYTICS_ENABLED="false", PREFECT_UI_ENABLED="false")
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_for(f"{url}/health", process)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    while True:
        assert process.poll() is None, "the Prefect server ended"
        assert time.monotonic() < deadline, "the Prefect server did not start"
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own server on 127.0.0.1
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(  # noqa: S310 - our own server on 127.0.0.1
        f"{url}/{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return json.load(answer)


def test_the_same_bytes_through_prefect_and_the_run_is_visible_there(
    plainly: Callable[..., Any], stored_bytes: Callable[[str], Any], server: str, tmp_path: Path
) -> None:
    straight = plainly("digits", tmp_path / "straight", extra=["train.segment_steps=1000"]).result
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

    runs = ask(server, "flow_runs/filter", {"flows": {"name": {"any_": ["train-run"]}}})
    assert {run["name"] for run in runs} == {"digits-cnn"}
    assert len(runs) == 2
    assert all({"baton", "run:digits-cnn"} <= set(run["tags"]) for run in runs)
    assert {run["state_type"] for run in runs} == {"COMPLETED"}
    tasks = ask(server, "task_runs/filter", {})
    assert {task["name"].rsplit("-", 1)[0] for task in tasks} == {
        "prepare-data",
        "init-or-restore",
        "train-segment",
        "checkpoint-to-gcs",
        "evaluate",
    }
    logs = ask(server, "logs/filter", {"limit": 200})
    assert any("step 60 committed" in log["message"] for log in logs)
    assert any("evaluated on" in log["message"] for log in logs)


def test_a_newcomer_sees_no_noise_and_nothing_is_done_twice(tmp_path: Path) -> None:
    """With a fresh PREFECT_HOME and Prefect's embedded API."""
    environment = environment_with(tmp_path / "prefect")
    words = ["run", str(run_file("digits")), *settings("digits", tmp_path / "runs", extra=["train.segment_steps=20"])]
    code, seen = baton_in_a_terminal(environment, *words)
    assert code == 0, seen[-3000:]
    assert NOISE.findall(seen) == []
    assert "committed" in seen
    assert "examples/s" in seen
    assert " left" in seen
    assert "Done: digits-cnn is at step 60 of 60." in seen
    report = tmp_path / "runs" / "digits-cnn" / "report" / "index.html"
    assert str(report) in seen.replace("\r\n", "")
    assert report.is_file()
    entries = sorted((tmp_path / "runs" / "digits-cnn" / "log").iterdir())
    again = baton(environment, *words)
    assert again.returncode == 0
    assert "Nothing to do" in again.stdout
    assert sorted((tmp_path / "runs" / "digits-cnn" / "log").iterdir()) == entries


def test_a_refused_model_ends_with_code_2_and_one_paragraph(server: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "model.py").write_text("def build_model():\n    raise ValueError('no such width')\n")
    (folder / "run.yaml").write_text(
        "run: mine\nstorage: ./runs\ndata: {source: digits}\nmodel: model.py:build_model\n"
        "train: {steps: 10, global_batch_size: 8}\n"
    )
    refused = baton(environment_with(tmp_path / "prefect", PREFECT_API_URL=server), "run", str(folder / "run.yaml"))
    assert refused.returncode == 2
    assert "ValueError: no such width (model.py, line 2)" in refused.stderr
    assert "Traceback" not in refused.stderr + refused.stdout
    assert not (folder / "runs" / "mine").exists()
