"""The quick start of deploy/README.md, run in a clone: a schedule that trains a run to its end."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import CHECKOUT
from tests.support.prefect_server import environment_with, interrupt, post

SECTION = "## A schedule on this machine"
ENDED = {"COMPLETED", "FAILED", "CRASHED"}


def blocks() -> list[tuple[bool, str]]:
    """Return the commands of each block, and whether it needs its own terminal."""
    readme = (CHECKOUT / "deploy" / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index(SECTION) + len(SECTION) :]
    section = section[: section.index("\n## ")]
    found = re.findall(r"^```sh( terminal)?\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    return [(bool(terminal), typed) for terminal, typed in found]


def test_quick_start_has_commands() -> None:
    assert [terminal for terminal, _ in blocks()] == [True, False, True, False, False, False]


@contextmanager
def terminal(typed: str, clone: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a block whose last line runs until Ctrl-C."""
    *before, last = typed.strip().splitlines()
    lines = "\n".join([*before, f"exec {last}"])
    with (clone.parent / "terminal.log").open("ab") as log:
        process = subprocess.Popen(["/bin/sh", "-ec", lines], cwd=clone, env=environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            interrupt(process)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_quick_start_trains_a_scheduled_run(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    clone, home = tmp_path / "baton", tmp_path / "home"
    home.mkdir()
    copied = subprocess.run(
        ["git", "clone", "--quiet", str(CHECKOUT), str(clone)],  # noqa: S607 - git is where it is
        capture_output=True,
        text=True,
        check=False,
    )
    if copied.returncode != 0:
        pytest.skip(f"this checkout is no git repository: {copied.stderr}")
    # Like `make install`, from the packages installed here; flows and tasks come from the clone.
    (clone / ".venv" / "bin").mkdir(parents=True)
    for name, module in (("prefect", "prefect"), ("baton", "flows.commands.main")):
        script = clone / ".venv" / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    run = clone / "deploy" / "runs" / "digits" / "run.yaml"
    shortened = (
        run.read_text(encoding="utf-8").replace("steps: 2000", "steps: 400").replace("_steps: 400", "_steps: 200")
    )
    run.write_text(shortened, encoding="utf-8")
    environment = environment_with(home / ".prefect", HOME=str(home), COLUMNS="200") | {
        # Only the port differs, because 4200 may be in use.
        "PREFECT_SERVER_API_PORT": port,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(clone), os.environ.get("PYTHONPATH")])),
    }
    del environment["PREFECT_HOME"]
    url = f"http://127.0.0.1:{port}/api"

    outputs = []
    with ExitStack() as terminals:
        for number, (own_terminal, typed) in enumerate(blocks()):
            if own_terminal:
                process = terminals.enter_context(terminal(typed, clone, environment))
                if number == 0:
                    wait_until(lambda: responds(url), process)
                continue
            if ".venv/bin/prefect flow-run ls" in typed:
                wait_until(lambda: states(url) & ENDED, process)
            done = subprocess.run(
                ["/bin/sh", "-ec", typed.replace("4200", port)],
                cwd=clone, env=environment, capture_output=True, text=True, timeout=600, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{typed}\n{done.stdout}{done.stderr}"
            outputs.append(done.stdout)
        assert "COMPLETED" in states(url)
        assert not states(url) & {"FAILED", "CRASHED"}
        schedules = post(url, "deployments/filter", {})[0]["schedules"]
    assert [(each["schedule"]["cron"], each["active"]) for each in schedules] == [("*/15 0-5 * * *", False)]
    assert "digits-cnn" in outputs[-2]
    status = subprocess.run(
        [str(clone / ".venv" / "bin" / "baton"), "status", str(run), "--json"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    output: dict[str, Any] = json.loads(status.stdout)
    assert output["step"] == 400


def responds(url: str) -> bool:
    try:
        post(url, "flows/count", {})
    except OSError:
        return False
    return True


def states(url: str) -> set[str]:
    """Return the states of the schedule's flow runs that are not in the future."""
    return {run["state_type"] for run in post(url, "flow_runs/filter", {}) if run["auto_scheduled"]}


def wait_until(condition: Any, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert process.poll() is None, "the command in its own terminal has ended"
        assert time.monotonic() < deadline
        time.sleep(0.5)
