"""Prefect's embedded server, started without importing Prefect.

Prefect starts it in the first process that asks for a client: it imports its whole server there, too, which takes more
than a second, starts the server in a process of its own, and asks every tenth of a second whether it responds. Here
the process starts at once and the command goes on; it meets the server again when it needs it. The listening socket is
opened here and handed over, so no port can be taken twice, and a request sent early waits in the socket's queue.

Relies on an internal of Prefect 3.8.8: the environment variables with which Prefect starts its own embedded server.
"""

import atexit
import http.client
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, NoReturn

from flows.process.children import start_child
from tasks.foundation.errors import PrefectUnavailable
from tasks.foundation.machine.threads import before_leaving_at_once
from tasks.foundation.messages import masked, message

SERVER_LEVEL: Final = "PREFECT_SERVER_LOGGING_LEVEL"
SILENT: Final = "CRITICAL"  # Baton's default for the server's log
TIMEOUT: Final = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"

_HOST: Final = "127.0.0.1"
_BACKLOG: Final = 2048  # uvicorn's
_END_SECONDS: Final = 5.0  # as Prefect gives its own server
_SCRIPT: Final = Path(__file__).with_name("serve_api.py")
_SERVER_SETTINGS: Final = {
    # As Prefect sets them for its own embedded server: no pages, and only the services that a flow run needs.
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
}
# What a single flow run does not use, by its name and an older one. The task run recorder stays: it stores task runs.
_UNUSED: Final = (
    # Block types are for those who edit blocks on Prefect's pages. Registering them imports every installed
    # integration, which takes a fifth of the server's start; saving a block registers its type anyway.
    ("PREFECT_SERVER_REGISTER_BLOCKS_ON_START", "PREFECT_API_BLOCKS_REGISTER_ON_START"),
    # The feed of events, which is stored row by row and vacuumed; states, logs and artifacts are stored without it.
    ("PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED", "PREFECT_API_SERVICES_EVENT_PERSISTER_ENABLED"),
    # Automations: each event is compared with their triggers.
    ("PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED", "PREFECT_API_SERVICES_TRIGGERS_ENABLED"),
)
# The line of a traceback that says what went wrong; SQLAlchemy's has more lines after it.
_FAULT: Final = re.compile(r"[\w.]+(Error|Exception): ")


@dataclass(slots=True, eq=False)
class EmbeddedServer:
    """A process that serves Prefect's API for this command and ends with it.

    Attributes:
        process: the server's process.
        port: of 127.0.0.1.
        log: what it wrote to standard error; None if the user wants its log on the terminal.
    """

    process: subprocess.Popen[bytes]
    port: int
    log: IO[bytes] | None

    @classmethod
    def start(cls, environment: Mapping[str, str] = os.environ) -> "EmbeddedServer":
        """Start the server; it does not respond yet.

        Args:
            environment: variables of its process.

        Raises:
            PrefectUnavailable: no port is free, or the process cannot be started.
        """
        _require_loopback()
        silent = environment.get(SERVER_LEVEL) == SILENT
        log = tempfile.TemporaryFile() if silent else None  # noqa: SIM115 - the process writes to it until it ends
        try:
            with socket.create_server((_HOST, 0), backlog=_BACKLOG) as listener:
                listener.set_inheritable(True)
                process = start_child(
                    [sys.executable, "-P", os.fspath(_SCRIPT), str(listener.fileno())],
                    env=_server_environment(environment),
                    # No signal of the terminal reaches it: it must live until the flow run's last state is recorded.
                    process_group=0,
                    pass_fds=(listener.fileno(),),
                    stderr=log,  # None: the terminal's
                )
                server = cls(process=process, port=listener.getsockname()[1], log=log)
        except OSError as fault:
            raise PrefectUnavailable(
                message(
                    f"Prefect's embedded server cannot be started ({fault.strerror or fault})",
                    hints=["set PREFECT_API_URL to a server"],
                )
            ) from fault
        atexit.register(server.end)
        before_leaving_at_once(process.kill)
        return server

    @property
    def api_url(self) -> str:
        """The value of PREFECT_API_URL for clients of this server."""
        return f"http://{_HOST}:{self.port}/api"

    def wait(self) -> None:
        """Wait until the server responds.

        Raises:
            PrefectUnavailable: it has ended, or does not respond within
                PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.
        """
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=_limit_seconds())
        try:
            connection.request("GET", "/api/health")
            status = connection.getresponse().status
        except TimeoutError:
            self.process.kill()
            self._refuse_slow()
        except (OSError, http.client.HTTPException) as fault:  # the process has ended, and its socket with it
            self._refuse_ended(fault)
        finally:
            connection.close()
        if status != http.client.OK:
            self.process.kill()
            raise PrefectUnavailable(
                message(
                    f"Prefect's embedded server answers with HTTP {status}",
                    hints=[f"{SERVER_LEVEL}=ERROR shows its log", "set PREFECT_API_URL to a server"],
                )
            )

    def end(self) -> None:
        """End the server; it first records what it has received."""
        atexit.unregister(self.end)
        self.process.terminate()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _refuse_slow(self) -> NoReturn:
        raise PrefectUnavailable(
            message(
                f"{TIMEOUT} = {_limit_seconds():g}: Prefect's embedded server did not respond in time",
                hints=["raise the limit if the machine is busy, or set PREFECT_API_URL to a server"],
            )
        )

    def _refuse_ended(self, fault: Exception) -> NoReturn:
        try:
            code = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        lines = _log_lines(self.log)
        last = lines[-1] if lines else f"it ended with code {code}"
        why = next((line for line in reversed(lines) if _FAULT.match(line)), last)
        raise PrefectUnavailable(
            message(
                f"PREFECT_HOME = {os.environ.get('PREFECT_HOME', '~/.prefect')}: Prefect's embedded server does not "
                f"start: {masked(why)}",
                hints=[
                    "set PREFECT_HOME to another folder, or PREFECT_API_URL to a server",
                    f"{SERVER_LEVEL}=ERROR shows its log",
                ],
            )
        ) from fault


def _require_loopback() -> None:
    """Refuse a machine on which nothing can connect to the server: a network namespace without a loopback interface.

    Raises:
        PrefectUnavailable: 127.0.0.1 cannot be reached.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_HOST, 1))  # looks for a route, and sends nothing
        except OSError as fault:
            raise PrefectUnavailable(
                message(
                    f"Prefect's embedded server cannot be reached: this machine has no loopback interface ({_HOST}: "
                    f"{fault.strerror})",
                    hints=["bring it up (ip link set lo up), or set PREFECT_API_URL to a server"],
                )
            ) from fault


def _server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    unused = {names[0]: "false" for names in _UNUSED if not environment.keys() & set(names)}
    return {**environment, **_SERVER_SETTINGS, **unused}


def _limit_seconds() -> float:
    try:
        return float(os.environ[TIMEOUT])
    except (KeyError, ValueError):  # Prefect itself refuses a value that is not a number
        return 120.0


def _log_lines(log: IO[bytes] | None) -> list[str]:
    """The lines of the server's log, without empty lines and its last one."""
    if log is None:
        return []
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    return [line for line in lines if line and not line.endswith("Application startup failed. Exiting.")]
