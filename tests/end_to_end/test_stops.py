"""Every kind of stop commits what was trained and exits with 3; the next command continues."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.log.accounting import account_of
from baton.tasks.foundation.log.attempts import read_attempts
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support import forked
from tests.support.homes import read_history, tip_of
from tests.support.prefect_server import environment_with, post, train_runs
from tests.support.shipped_runs import DRIVER, SLOW, settings, slow_digits
from tests.support.watching import attempts_of, commits_of, trains, wait_until

pytestmark = pytest.mark.slow

# One segment, much longer than a test.
ENDLESS = [*SLOW, "train.steps=2000000", "train.segment_steps=2000000"]


@contextmanager
def running(
    environment: dict[str, str],
    folder: Path,
    *options: str,
    start: type[subprocess.Popen[bytes]] = forked.Popen,
    **settings_of_popen: Any,
) -> Iterator[subprocess.Popen[bytes]]:
    """Train the slow digits in a process during the block, with the storage `folder`/runs."""
    command = [sys.executable, "-m", "baton.flows.commands.main", "run", str(slow_digits(folder / "code"))]
    command += [*settings("digits", folder / "runs", extra=ENDLESS), *options]
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, **settings_of_popen)
    with forked.killed_at_end(process):
        yield process


def home_of(storage: Path) -> Path:
    return next((path.parent for path in storage.glob("*/log")), storage / "not-there")


def trains_in_prefect(server: str, storage: Path) -> bool:
    """Whether the first command trains, and its flow run has begun: one that is stopped before has no flow run."""
    return trains(home_of(storage), 0) and [run["state"]["type"] for run in train_runs(server, storage)] == ["RUNNING"]


def assert_nothing_is_lost(home: Path, reason: str) -> None:
    """Assert that the last trained step is committed."""
    last = attempts_of(home)[-1]
    assert commits_of(home)[-1] == (last.step, reason)
    assert last.step == last.committed_step > last.from_step
    assert last.uncommitted_seconds == 0


def test_sigterm_during_training_commits_and_exits_3(server: str, tmp_path: Path) -> None:
    environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=server)
    with running(environment, tmp_path, "--json") as process:
        wait_until(lambda: trains_in_prefect(server, tmp_path / "runs"), process)
        process.send_signal(signal.SIGTERM)
        out = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 3, out
    assert "Traceback" not in out
    assert "SIGTERM: finishing the steps in flight, then committing" in out
    result = json.loads(out.splitlines()[-1])
    home = home_of(tmp_path / "runs")
    assert_nothing_is_lost(home, "sigterm")
    assert (result["exit_reason"], result["step"]) == ("sigterm", tip_of(home).step)
    # After SIGTERM it is the last that is done, because the machine may go at any moment.
    assert (home / "report" / "index.html").is_file()
    (state,) = [run["state"] for run in train_runs(server, tmp_path / "runs")]
    assert (state["type"], state["name"]) == ("COMPLETED", "Stopped"), out


def test_killed_command_leaves_a_trainer_that_commits_and_a_killed_trainer_is_said(server: str, tmp_path: Path) -> None:
    environment, runs = environment_with(tmp_path / "prefect", PREFECT_API_URL=server), tmp_path / "runs"
    with running(environment, tmp_path) as process:
        wait_until(lambda: trains_in_prefect(server, runs), process)
        process.kill()
        process.wait()
        home = home_of(runs)
        wait_until(lambda: attempts_of(home)[-1].ended is not None)
        assert_nothing_is_lost(home, "sigterm")
    runs = tmp_path / "another" / "runs"
    with running(environment, tmp_path / "another") as process:
        wait_until(lambda: trains_in_prefect(server, runs), process)
        os.kill(attempts_of(home_of(runs))[-1].pid, signal.SIGKILL)
        out = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 1, out
    assert "was killed from outside; check whether the machine ran out of memory" in out
    assert [run["state"]["type"] for run in train_runs(server, runs)] == ["CRASHED"]


@pytest.mark.nightly
def test_cancelled_flow_run_stops_the_command_beside_it(server: str, tmp_path: Path) -> None:
    environment, runs = environment_with(tmp_path / "prefect", PREFECT_API_URL=server), tmp_path / "runs"
    with running(environment, tmp_path, "--json", "--set", "train.segment_steps=200") as process:
        wait_until(lambda: trains_in_prefect(server, runs), process)
        (flow_run,) = train_runs(server, runs)
        post(server, f"flow_runs/{flow_run['id']}/set_state", {"state": {"type": "CANCELLING"}})
        out = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 3, out
    assert "the flow run was cancelled in Prefect" in out
    last = attempts_of(home_of(runs))[-1]
    assert (last.uncommitted_seconds, last.committed_step) == (0, tip_of(home_of(runs)).step)
    assert [run["state"]["type"] for run in train_runs(server, runs)] == ["CANCELLED"], out


def processes_of(prefect_home: Path) -> list[int]:
    """Ids of processes with this PREFECT_HOME."""
    mark = f"PREFECT_HOME={prefect_home}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_ctrl_c_at_a_terminal(tmp_path: Path, times: int) -> None:
    """SIGINT goes to the process group. Prefect's embedded API records the end of the flow run and ends too."""
    environment = environment_with(tmp_path / "prefect")
    # A fresh process: /proc does not show the environment of a fork.
    fresh = {"start": subprocess.Popen, "start_new_session": True}
    with running(environment, tmp_path, "--json", **fresh) as process:
        wait_until(lambda: trains(home_of(tmp_path / "runs"), 0), process)
        os.killpg(process.pid, signal.SIGINT)
        if times > 1:
            _interrupt(process)
        out = process.communicate(timeout=120)[0].decode()
    wait_until(lambda: not processes_of(tmp_path / "prefect"))
    if times > 1:
        assert process.returncode in {130, -signal.SIGINT}
        return
    assert process.returncode == 3, out
    assert "Traceback" not in out
    assert json.loads(out.splitlines()[-1])["exit_reason"] == "sigint"
    assert_nothing_is_lost(home_of(tmp_path / "runs"), "sigint")


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Send again until the process ends: two signals of one kind can merge, and the stop itself takes a second only."""
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.02)


def test_time_budget_ends_the_segment(train_without_prefect: Callable[..., Any], tmp_path: Path) -> None:
    file = slow_digits(tmp_path / "code")
    done = train_without_prefect("digits", tmp_path / "runs", "--max-seconds", "6", extra=ENDLESS, file=file, code=3)
    assert done.result["exit_reason"] == "time_budget"
    home = home_of(tmp_path / "runs")
    if commits_of(home)[-1][0]:  # a machine this slow would have spent the budget before the first step
        assert_nothing_is_lost(home, "time_budget")


class Metadata(http.server.BaseHTTPRequestHandler):
    """Google's metadata server, reduced to its preemption and maintenance notices."""

    preempted = threading.Event()

    def do_GET(self) -> None:
        answers = {"preempted": "TRUE" if self.preempted.is_set() else "FALSE", "maintenance-event": "NONE"}
        answer = answers.get(self.path.partition("?")[0].rsplit("/", 1)[-1])
        self.send_response(404 if answer is None else 200)
        self.send_header("Metadata-Flavor", "Google")
        self.end_headers()
        self.wfile.write((answer or "").encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    Metadata.preempted.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as answering:
        thread = threading.Thread(target=answering.serve_forever)
        thread.start()
        yield f"127.0.0.1:{answering.server_port}"
        answering.shutdown()
        thread.join()


def test_preempted_and_killed_process_add_up_to_the_wall_clock(metadata: str, tmp_path: Path) -> None:
    """Compares with a clock outside. A killed process counts up to its last heartbeat, others up to their end."""
    words = settings("digits", tmp_path / "runs", extra=ENDLESS)
    command = [sys.executable, str(DRIVER), str(slow_digits(tmp_path / "code")), *words]
    measured = []
    for end in ("killed", "preempted"):
        began = time.monotonic()
        # A fresh interpreter, because its start-up time counts.
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"GCE_METADATA_HOST": metadata},
        )
        before = len(measured)
        wait_until(lambda before=before: trains(home_of(tmp_path / "runs"), before), process)
        time.sleep(2)
        if end == "killed":
            process.kill()
        else:
            Metadata.preempted.set()
        out, err = process.communicate(timeout=120)
        measured.append(time.monotonic() - began)
    assert process.returncode == 3, err
    assert json.loads(out.splitlines()[-1])["exit_reason"] == "preempted"
    assert_nothing_is_lost(home_of(tmp_path / "runs"), "preempted")

    home = LocalStorage(home_of(tmp_path / "runs"))
    log = RunLog(home)
    newest = log.newest()
    assert newest is not None
    account = account_of(read_attempts(home), log, newest, now=datetime.now(UTC))
    assert account is not None
    # The interpreter's start and exit are not counted, nor the time since a last heartbeat, at most half a second.
    missed = sum(measured) - account.total_seconds
    assert -0.1 < missed < 0.03 * sum(measured) + 1.0
    assert account.unattributed_seconds < 0.03 * account.total_seconds
    assert account.bad_seconds["lost work"] > 0
    assert 0 < account.good_seconds < account.total_seconds


@pytest.mark.nightly
def test_run_stopped_many_times_ends_the_same(
    train_without_prefect: Callable[..., Any], stored_bytes: Callable[[str], Any], tmp_path: Path
) -> None:
    """Short time budgets, so that stops fall anywhere, and frequent commits."""
    once = ["train.steps=900", "train.segment_steps=900"]
    straight = train_without_prefect("digits", tmp_path / "straight", extra=once).result
    hasty = [*once, "checkpoint.every_seconds=0.3", "checkpoint.keep_last=2"]
    reasons = []
    for budget in ("4", "3.5", "3", "4.5", "600"):
        done = train_without_prefect("digits", tmp_path / "stopped", "--max-seconds", budget, extra=hasty).result
        reasons.append(done["exit_reason"])
    assert reasons[-1] in {"complete", "nothing_to_do"}
    assert "time_budget" in reasons
    assert done["state_digest"] == straight["state_digest"]
    assert stored_bytes(done["checkpoint"]) == stored_bytes(straight["checkpoint"])
    assert read_history(done["home"]) == read_history(straight["home"])
    assert "interval" in {reason for _, reason in commits_of(Path(done["home"]))}
