"""The Prefect server of a command: the one that is configured, or an embedded one, started without importing Prefect.

A user's own settings win. `PrefectStart()` starts the embedded server before anything heavy is imported if it is
certain that the command needs one; `connect` later waits for it, or imports Prefect, reads its settings and asks the
server that they name.

Prefect itself starts its embedded server in the first process that asks for a client: it imports its whole server
there, too, starts the server in a process of its own, and asks every tenth of a second whether it responds. Here the
process starts at once (`internals.py`), and the command goes on. The listening socket is opened here and handed over,
so no port can be taken twice, and a request sent early waits in the socket's queue.
"""

import atexit
import http.client
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NoReturn

from baton.flows.process import start_child
from baton.tasks.foundation.errors import PrefectUnavailable
from baton.tasks.foundation.machine.environment import quiet_tensorflow
from baton.tasks.foundation.machine.threads import before_leaving_at_once
from baton.tasks.foundation.machine.tpu import announce_tpu
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.text import message

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

SERVER_LEVEL: Final = "PREFECT_SERVER_LOGGING_LEVEL"
SILENT: Final = "CRITICAL"  # Baton's default for the server's log
TIMEOUT: Final = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"

_PREFECT_DEFAULTS = {
    # Prefect's run logs go to its API; the console belongs to the command.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # Silences tracebacks at the embedded API's shutdown.
    SERVER_LEVEL: SILENT,
    # A new PREFECT_HOME takes long while TensorFlow is imported.
    TIMEOUT: "120",
    # Usage data is sent only if the user enables it.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
_ANSWER_SECONDS: Final = 20.0  # a server that needs longer counts as missing
_BUSY: Final = frozenset({429, 503})
_BUSY_SECONDS: Final = 0.5  # between two requests to a busy server
_LOOPBACK = "127.0.0.1,localhost"
_API_URL: Final = "PREFECT_API_URL"
_HOME: Final = "PREFECT_HOME"
# Settings that have no say in which server is used and where its database is.
_UNRELATED: Final = ("PREFECT_LOGGING_", "PREFECT_CLIENT_", "PREFECT_TASKS_", "PREFECT_FLOWS_", "PREFECT_RESULTS_")
_HOST: Final = "127.0.0.1"
_BACKLOG: Final = 2048  # uvicorn's
_END_SECONDS: Final = 5.0  # as Prefect gives its own server
_SCRIPT: Final = Path(__file__).with_name("internals.py")
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


def set_quiet_defaults() -> None:
    """Set defaults in the environment. Call it before Prefect and TensorFlow are imported."""
    quiet_tensorflow()
    announce_tpu()
    # requests sets this filter too, but loses it if another thread imports at the same time.
    warnings.filterwarnings("ignore", message="SOCKS support in urllib3")
    for name, value in _PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # The embedded server is on this machine; a proxy would break its websockets.
    for name in ("NO_PROXY", "no_proxy"):
        known = os.environ.get(name)
        os.environ[name] = f"{known},{_LOOPBACK}" if known else _LOOPBACK


class PrefectStart:
    """The start of Prefect in this process: with an embedded server, or with the one that is configured."""

    def __init__(self) -> None:
        """Start the embedded server now if it is certain that one is needed. Prefect is not imported."""
        self._server: EmbeddedServer | None = None
        self._fault: PrefectUnavailable | None = None
        if is_certainly_embedded(os.environ, Path.cwd()):
            try:
                self._server = EmbeddedServer.start()
            except PrefectUnavailable as fault:  # raised to the one who needs it
                self._fault = fault

    def connect(self) -> bool:
        """Import Prefect and connect it with its server, which responds then.

        Returns:
            Whether the server is embedded.

        Raises:
            PrefectUnavailable: Prefect's settings or its server cannot be used.
            InvalidInput: the server refuses the credentials.
        """
        if self._fault is not None:
            raise self._fault
        if self._server is None:
            self._server = _server_of_settings()
        if self._server is not None:
            self._server.wait()
            _use_server(self._server.api_url)
        return self._server is not None


def _server_of_settings() -> EmbeddedServer | None:
    """The embedded server that Prefect's settings ask for; None if they name a server, which responds."""
    try:
        from prefect.settings import get_current_settings

        settings = get_current_settings()
    except ValueError as fault:  # from pydantic or TOML: the environment, a profile or prefect.toml
        why = next((line.strip() for line in str(fault).splitlines()[1:] if line.strip()), str(fault))
        raise PrefectUnavailable(
            message(
                f"Prefect's settings cannot be read: {why}",
                hints=["correct the environment variables PREFECT_..., PREFECT_HOME/profiles.toml or prefect.toml"],
            )
        ) from fault
    if settings.api.url:
        _require_server(settings.api.url)
        return None
    if not settings.server.ephemeral.enabled:
        raise PrefectUnavailable(
            message(
                "PREFECT_API_URL is not set, and PREFECT_SERVER_EPHEMERAL_ENABLED = false disables the embedded server",
                hints=["set PREFECT_API_URL to a server, or unset PREFECT_SERVER_EPHEMERAL_ENABLED"],
            )
        )
    return EmbeddedServer.start({**os.environ, **settings.to_environment_variables(exclude_unset=True)})


def _require_server(url: str) -> None:
    """Ask a server: any web page may answer 200, but only Prefect answers this, to a known user.

    A server that is busy is asked again: it is Prefect's answer while its database is locked.

    Raises:
        PrefectUnavailable: no Prefect server responds there.
        InvalidInput: it refuses the credentials.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from baton.flows.with_prefect.flow_runs import CREDENTIALS, require_temporary

    limits = {"timeout": _ANSWER_SECONDS}
    until = time.monotonic() + _ANSWER_SECONDS

    def ask(client: "SyncPrefectClient") -> None:
        while True:
            try:
                client.read_flows(limit=1)
            except PrefectHTTPStatusError as fault:
                if fault.response.status_code not in _BUSY or time.monotonic() > until:
                    raise
                time.sleep(_BUSY_SECONDS)
            else:
                return

    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(limits, sync_client=True) as client:
            ask(client)
    except (httpx.HTTPError, httpx.InvalidURL, PrefectHTTPStatusError, OSError, ValueError, RuntimeError) as fault:
        why = f"{type(fault).__name__}: {fault}".splitlines()[0]
        if isinstance(fault, PrefectHTTPStatusError):
            code = fault.response.status_code
            if code in CREDENTIALS:
                require_temporary(fault)
            why = f"HTTP {code}"
        elif isinstance(fault, httpx.TimeoutException):
            why = f"no response within {_ANSWER_SECONDS:g} s"
        raise PrefectUnavailable(
            message(
                f"PREFECT_API_URL = {masked(url)}: no Prefect server responds there ({masked(why)})",
                hints=[
                    "start the server, or correct the address, as http://HOST:4200/api",
                    "or unset PREFECT_API_URL to use the server that is embedded in the command",
                ],
            )
        ) from fault


def is_certainly_embedded(environment: Mapping[str, str], folder: Path) -> bool:
    """Whether nothing is set that could name a server or change the embedded one; otherwise only Prefect can tell.

    Reading Prefect's settings takes a second of imports. Most commands have none, and a look at the places where
    settings can be is enough.

    Args:
        folder: the working folder.
    """
    for name in (name for name, value in environment.items() if value):
        upper = name.upper()  # Prefect's settings ignore the case
        known = upper == _HOME or upper in _PREFECT_DEFAULTS or upper.startswith(_UNRELATED)
        if upper.startswith("PREFECT_") and not known:
            return False
    home = Path(environment.get(_HOME) or "~/.prefect").expanduser()
    pyproject = folder / "pyproject.toml"
    try:
        if pyproject.is_file() and "tool.prefect" in pyproject.read_text(encoding="utf-8", errors="replace"):
            return False
        files = (home / "profiles.toml", folder / "prefect.toml", folder / ".env")
        return home.is_absolute() and not any(file.exists() for file in files)
    except OSError:
        return False


def _use_server(api_url: str) -> None:
    """Make this process a client of a server. Processes that it starts do not become clients."""
    from prefect.context import refresh_global_settings_context

    before = os.environ.get(_API_URL)
    os.environ[_API_URL] = api_url
    try:
        refresh_global_settings_context()
    finally:
        del os.environ[_API_URL]
        if before is not None:
            os.environ[_API_URL] = before
