"""The local part of deploy/README.md, typed in a clone: a schedule trains a run; at night, ad hoc commands go on."""

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import CHECKOUT
from tests.support.clones import add_programs, type_clone
from tests.support.prefect_server import environment_with, interrupt, post

SCHEDULE = "## A schedule on this machine"
AD_HOC = "## Ad hoc"
# In the text, beside the blocks.
SHOW = "prefect deployment schedule ls train-run/nightly"
RESUME = "prefect deployment schedule resume train-run/nightly SCHEDULE_ID"
ENDED = {"COMPLETED", "FAILED", "CRASHED"}


def section_of(heading: str) -> str:
    readme = (CHECKOUT / "deploy" / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index(heading) + len(heading) :]
    return section.partition("\n## ")[0]


def blocks(heading: str = SCHEDULE) -> list[tuple[bool, str]]:
    """Return the commands of each block, and whether it needs its own terminal."""
    found = re.findall(r"^```sh( terminal)?\n(.*?)^```$", section_of(heading), flags=re.MULTILINE | re.DOTALL)
    return [(bool(terminal), typed) for terminal, typed in found]


def test_quick_start_has_commands() -> None:
    assert [terminal for terminal, _ in blocks()] == [True, False, True, False, False, False]
    assert [terminal for terminal, _ in blocks(AD_HOC)] == [False]
    server = blocks()[0][1]  # on a terminal, it asks which profile to change if none has its address
    assert server.index("config set PREFECT_API_URL") < server.index("server start")
    assert all(f"`{typed}`" in section_of(SCHEDULE) for typed in (SHOW, RESUME))


@contextmanager
def terminal(typed: str, clone: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a block whose last line runs until Ctrl-C."""
    *before, last = typed.strip().splitlines()
    lines = "\n".join([*before, f"exec {last}"]).replace("4200", environment["PREFECT_SERVER_API_PORT"])
    with (clone.parent / "terminal.log").open("ab") as log:
        process = subprocess.Popen(["/bin/sh", "-ec", lines], cwd=clone, env=environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            interrupt(process)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_quick_start_trains_a_scheduled_run(tmp_path: Path, *, goes_on: bool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    clone, home = tmp_path / "baton", tmp_path / "home"
    home.mkdir()
    type_clone("git clone --quiet URL baton", tmp_path)
    add_programs(clone)
    run = clone / "deploy" / "runs" / "digits" / "run.yaml"
    shortened = run.read_text(encoding="utf-8")
    for long, short in (("steps: 2000", "steps: 400"), ("_steps: 400", "_steps: 200"), ("size: 64", "size: 8")):
        shortened = shortened.replace(long, short)
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

    def shell(typed: str) -> str:
        done = subprocess.run(
            ["/bin/sh", "-ec", typed.replace("4200", port)],
            cwd=clone, env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{typed}\n{done.stdout}{done.stderr}"
        return done.stdout

    def schedules() -> list[tuple[str, bool]]:
        found = {each["name"]: each["schedules"] for each in post(url, "deployments/filter", {})}["nightly"]
        return [(each["schedule"]["cron"], each["active"]) for each in found]

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
            outputs.append(shell(typed))
            if "--name train-run/nightly" in typed and len(outputs) == 1:
                (schedule,) = re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", shell(f".venv/bin/{SHOW}"))
                shell(f".venv/bin/{RESUME}".replace("SCHEDULE_ID", schedule))
                assert schedules() == [("*/15 0-5 * * *", True)]
        assert "COMPLETED" in states(url)
        assert not states(url) & {"FAILED", "CRASHED"}
        assert schedules() == [("*/15 0-5 * * *", False)]
        assert "digits-cnn" in outputs[-2]
        assert status_of(clone, environment)["step"] == 400
        if not goes_on:
            return
        [(_, ad_hoc)] = blocks(AD_HOC)
        printed = shell(ad_hoc.replace("train.steps=2400", "train.steps=600"))
    assert status_of(clone, environment)["step"] == 600
    assert "Completed" in printed  # the flow run that the second command watches
    assert "Nothing to do" in printed.partition("Completed")[2]


def status_of(clone: Path, environment: dict[str, str]) -> dict[str, Any]:
    status = subprocess.run(
        [str(clone / ".venv" / "bin" / "baton"), "status", "deploy/runs/digits/run.yaml", "--json"],
        cwd=clone, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    output: dict[str, Any] = json.loads(status.stdout)
    return output


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
