"""A Prefect server of the tests' own, and how it is talked to."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import forked


def baton(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.commands.main", *words]
    return forked.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


def environment_with(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return kept | {"PREFECT_HOME": str(home)} | more


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """End a process as Ctrl-C does; one that does not go is killed, and one that has ended is left alone."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Server:
    """A Prefect server on a free port of 127.0.0.1, that can be killed and started again on the same database."""

    def __init__(self, home: Path, **settings: str) -> None:
        """Start it.

        Args:
            home: an existing folder, for its database and its log.
            settings: environment variables of its own.
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
                "PREFECT_UI_API_URL": self.url,  # else the pages ask at port 4200
                **settings,
            },
        )
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self._port)]
        with (self._home / "server.log").open("ab") as log:
            self._process = forked.Popen(command, env=self._environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_for(f"{self.url}/health", self._process)
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """As Ctrl-C does."""
        interrupt(self._process)


@contextmanager
def running_server(home: Path) -> Iterator[str]:
    """A Prefect server of its own; its API's address."""
    with serving(Server(home)) as url:
        yield url


@contextmanager
def serving(server: Server) -> Iterator[str]:
    """A server that is stopped in the end, if it still lives; its API's address."""
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
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own server on 127.0.0.1
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(  # noqa: S310 - our own server on 127.0.0.1
        f"{url}/{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as fault:
            # A server whose database is busy says so and has done nothing; Prefect's own client asks again too.
            if fault.code != http.client.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                raise
        time.sleep(0.5)
