"""A Prefect server for tests, requests to its API, and `baton` commands that use it."""

import http.client
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.watching import wait_until


def baton(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton.flows.commands.main", *words]
    return forked.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


def prefect(environment: dict[str, str], *words: str) -> str:
    """Run a `prefect` command; returns its output."""
    done = forked.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *words],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment_with(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return kept | {"PREFECT_HOME": str(home)} | more


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT and wait; kill a process that does not end within a minute."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _MigratedDatabase:
    """A copy of the first server's database. Migrating a new one takes four seconds of processor time."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def keep(self, home: Path) -> None:
        """Copy the database of a running server, unless there is a copy already."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="baton-prefect-")
            with (
                closing(sqlite3.connect(home / _DATABASE)) as source,
                closing(sqlite3.connect(Path(self._folder.name) / _DATABASE)) as copy,
            ):
                source.backup(copy)

    def give(self, home: Path) -> None:
        """Put the copy into a new server's home."""
        if self._folder is not None and not (home / _DATABASE).exists():
            shutil.copy(Path(self._folder.name) / _DATABASE, home)


_DATABASE = "prefect.db"
_migrated = _MigratedDatabase()  # one for the process, like its temporary folder


class Server:
    """A Prefect server on a free port of 127.0.0.1. It can be killed and started again on the same database."""

    def __init__(self, home: Path, **settings: str) -> None:
        """Start it.

        Args:
            home: an existing folder for its database and its log.
            settings: more environment variables.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/api"
        self._home = home
        self._environment = environment_with(
            home,
            **{
                "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
                "PREFECT_UI_ENABLED": "false",
                "PREFECT_UI_API_URL": self.url,  # the default is port 4200
                **settings,
            },
        )
        self.start()

    def start(self) -> None:
        """Start it and wait until it responds."""
        _migrated.give(self._home)
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self._port)]
        with (self._home / "server.log").open("ab") as log:
            self._process = forked.Popen(command, env=self._environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_for(f"{self.url}/health", self._process)
            _migrated.keep(self._home)
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Stop it as Ctrl-C does."""
        interrupt(self._process)


@contextmanager
def running_server(home: Path) -> Iterator[str]:
    """Run a new Prefect server; yields the URL of its API."""
    with serving(Server(home)) as url:
        yield url


@contextmanager
def serving(server: Server) -> Iterator[str]:
    """Stop a server at the end of the block; yields the URL of its API."""
    try:
        yield server.url
    finally:
        server.stop()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    while True:
        assert process.poll() is None, "the Prefect server ended"
        assert time.monotonic() < deadline, "the Prefect server did not start"
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - a server of the tests on 127.0.0.1
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)


def graph(url: str, flow_run: str) -> dict[str, list[str]]:
    """The names of a flow run's task runs, each with those that it waits for, as Prefect's page draws them."""
    nodes = dict(_answer(f"{url}/flow_runs/{flow_run}/graph-v2", "GET", None)["nodes"])
    # A busy server may list a parent twice.
    return {node["label"]: sorted({nodes[each["id"]]["label"] for each in node["parents"]}) for node in nodes.values()}


def ended_task_runs(url: str, flow_runs: Collection[dict[str, Any]], least: int) -> list[dict[str, Any]]:
    """The task runs of flow runs, `least` or more, when the server has recorded the end of each.

    It records what the client reports some seconds later, and until then has neither the end nor the name.
    """
    wanted = {"flow_runs": {"id": {"any_": [run["id"] for run in flow_runs]}}}
    found: list[dict[str, Any]] = []

    def ended() -> bool:
        found[:] = post(url, "task_runs/filter", wanted)
        return len(found) >= least and all(run["end_time"] for run in found)

    wait_until(ended)
    return found


def post(url: str, path: str, body: dict[str, Any] | list[Any]) -> Any:
    """Send a POST request with a JSON body to Prefect's API; returns the JSON response."""
    return _answer(f"{url}/{path}", "POST", body)


def train_runs(url: str, path: Path) -> list[dict[str, Any]]:
    """The flow runs that train what lies at `path`, a run file or a storage folder, the newest first.

    Tests share a server: its newest flow run may be that of another test.
    """
    runs = post(url, "flow_runs/filter", {"flows": {"name": {"any_": ["train-run"]}}, "sort": "START_TIME_DESC"})
    return [run for run in runs if str(path) in json.dumps(run["parameters"])]


def patch(url: str, path: str, body: dict[str, Any]) -> None:
    """Send a PATCH request with a JSON body to Prefect's API."""
    _answer(f"{url}/{path}", "PATCH", body)


def _answer(url: str, method: str, body: dict[str, Any] | list[Any] | None) -> Any:
    """Send a request, and retry while the server is busy; returns the JSON response, or None if it is empty."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(  # noqa: S310 - a server of the tests on 127.0.0.1
        url, data=data, headers={"Content-Type": "application/json"}, method=method
    )
    deadline = time.monotonic() + 300
    while True:
        try:
            # Prefect's database can block for a minute when several flow runs start at once.
            with urllib.request.urlopen(request, timeout=300) as response:  # noqa: S310
                text = response.read()
                return json.loads(text) if text else None
        except urllib.error.HTTPError as fault:
            # 503: the database is busy and nothing was stored, though the event of a change of state may be out.
            # Prefect's own client retries too.
            if fault.code != http.client.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                raise
        time.sleep(0.5)
