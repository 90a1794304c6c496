"""The Prefect server of a command: the one that is configured, or an embedded one, which this process serves itself.

A user's own settings win. Without any, a thread of this process serves Prefect's application, the one that Prefect
itself embeds, on a free port. Nothing outlives the process, however it ends, and Prefect is imported only once.

Prefect's own way, a process that `get_client` starts, is not used, because a run of 20 steps on two cores then ends 2
to 7 s later. The whole server is imported twice, for 4 to 6 s more of processor time; it outlives a killed parent; one
that cannot use its database is started again until the time limit; and one that draws the port of another, of 1,000,
leaves its client to record in the database of that one.
"""

import atexit
import fcntl
import os
import queue
import re
import socket
import threading
import time
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.flows.with_prefect.internals import leave_out_idle_worker, retried_soon
from baton.tasks.foundation.errors import PrefectUnavailable
from baton.tasks.foundation.machine.environment import quiet_tensorflow
from baton.tasks.foundation.machine.tpu import announce_tpu
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.text import message

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.settings import Settings
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

SERVER_LEVEL: Final = "PREFECT_SERVER_LOGGING_LEVEL"
TIMEOUT: Final = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"

_PREFECT_DEFAULTS = {
    # Prefect's run logs go to its API; the console belongs to the command.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # Silences tracebacks at the embedded API's shutdown.
    SERVER_LEVEL: "CRITICAL",
    # A new PREFECT_HOME takes long while TensorFlow is imported.
    TIMEOUT: "120",
    # Usage data is sent only if the user enables it.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
# What a single flow run does not use. The task run recorder stays: it stores task runs.
_UNUSED: Final = (
    # Block types are for those who edit blocks on Prefect's pages. Registering them, or asking whether they have
    # changed, imports every installed integration; saving a block registers its type anyway.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION",
    # The feed of events, which is stored row by row and vacuumed; states, logs and artifacts are stored without it.
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED",
    # Automations: each event is compared with their triggers.
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED",
)
_ANSWER_SECONDS: Final = 20.0  # a server that needs longer counts as missing
_BUSY: Final = frozenset({429, 503})
_BUSY_SECONDS: Final = 0.5  # between two requests to a busy server
_LOOPBACK = "127.0.0.1,localhost"
_HOST: Final = "127.0.0.1"
_BACKLOG: Final = 2048  # uvicorn's
_END_SECONDS: Final = 5.0  # as Prefect gives its own server
_LOCK: Final = ".baton-migrations.lock"  # in PREFECT_HOME
# The line of a traceback that says what went wrong; SQLAlchemy's has more lines after it.
_FAULT: Final = re.compile(r"[\w.]+(Error|Exception): ")


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


def connect() -> bool:
    """Import Prefect and connect this process with its server, which responds then.

    Returns:
        Whether the server is embedded.

    Raises:
        PrefectUnavailable: Prefect's settings or its server cannot be used.
        InvalidInput: the server refuses the credentials.
    """
    settings = _settings()
    if settings.api.url:
        _require_server(settings.api.url)
        return False
    if not settings.server.ephemeral.enabled:
        raise PrefectUnavailable(
            message(
                "PREFECT_API_URL is not set, and PREFECT_SERVER_EPHEMERAL_ENABLED = false disables the embedded server",
                hints=["set PREFECT_API_URL to a server, or unset PREFECT_SERVER_EPHEMERAL_ENABLED"],
            )
        )
    _serve(settings)
    return True


def _settings() -> "Settings":
    try:
        from prefect.settings import get_current_settings

        return get_current_settings()
    except ValueError as fault:  # from pydantic or TOML: the environment, a profile or prefect.toml
        why = next((line.strip() for line in str(fault).splitlines()[1:] if line.strip()), str(fault))
        raise PrefectUnavailable(
            message(
                f"Prefect's settings cannot be read: {why}",
                hints=["correct the environment variables PREFECT_..., PREFECT_HOME/profiles.toml or prefect.toml"],
            )
        ) from fault


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


def _serve(given: "Settings") -> None:
    """Serve Prefect's API in a thread until this process ends, and make the process its client, but none it starts.

    Args:
        given: Prefect's settings, without an address.
    """
    import prefect.context
    import uvicorn

    listener = _listener()
    api_url = f"http://{_HOST}:{listener.getsockname()[1]}/api"
    settings = _settings_of_embedded(given, api_url)
    prefect.context.GLOBAL_SETTINGS_CONTEXT = prefect.context.SettingsContext(
        profile=prefect.context.get_settings_context().profile, settings=settings
    )
    started: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        from prefect.server.api.server import create_app

        leave_out_idle_worker()
        app = _one_at_a_time(retried_soon(create_app(ephemeral=True)), settings.home, started)
        server = uvicorn.Server(uvicorn.Config(app, log_level=settings.server.logging_level.lower(), lifespan="on"))
    except Exception as fault:
        raise _not_started(f"{type(fault).__name__}: {fault}", settings.home) from fault

    def serve() -> None:
        with suppress(SystemExit):  # uvicorn's, if the start fails
            server.run([listener])

    thread = threading.Thread(target=serve, name="baton-prefect-server", daemon=True)

    def end() -> None:
        server.should_exit = True  # it first records what it has received
        thread.join(_END_SECONDS)

    atexit.register(end)
    thread.start()
    limit = settings.server.ephemeral.startup_timeout_seconds
    try:
        trace = started.get(timeout=limit)
    except queue.Empty:
        raise PrefectUnavailable(
            message(
                f"{TIMEOUT} = {limit}: Prefect's embedded server did not respond in time",
                hints=["raise the limit if the machine is busy, or set PREFECT_API_URL to a server"],
            )
        ) from None
    if trace:
        raise _not_started(trace, settings.home)


def _settings_of_embedded(given: "Settings", api_url: str) -> "Settings":
    import prefect.settings

    return given.copy_with_update(
        updates={prefect.settings.PREFECT_API_URL: api_url},
        set_defaults={getattr(prefect.settings, name): False for name in _UNUSED},
    )


def _listener() -> socket.socket:
    """A listening socket. Its queue takes the requests that are sent before the server accepts them."""
    with ExitStack() as on_fault:
        try:
            listener = on_fault.enter_context(socket.create_server((_HOST, 0), backlog=_BACKLOG))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((_HOST, 1))  # looks for a route, and sends nothing
        except OSError as fault:
            raise PrefectUnavailable(
                message(
                    f"Prefect's embedded server cannot be reached: this machine has no loopback interface ({_HOST}: "
                    f"{fault.strerror})",
                    hints=["bring it up (ip link set lo up), or set PREFECT_API_URL to a server"],
                )
            ) from fault
        # What the server accepts inherits this. asyncio sets it only if the protocol of the socket is named.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        on_fault.pop_all()
    return listener


def _one_at_a_time(app: "ASGIApp", home: Path, started: "queue.SimpleQueue[str]") -> "ASGIApp":
    """Let an application start while no other one of this PREFECT_HOME does, and say how that went.

    Prefect migrates its database when it starts, and two servers that create the same tables at once fail.

    Args:
        started: receives the traceback of a failed start, and an empty text after a good one.
    """

    async def serve(scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        with ExitStack() as lock:
            with suppress(OSError):  # the database is elsewhere, and nothing can be written here
                home.mkdir(parents=True, exist_ok=True)
                # Nothing else runs in this thread yet, so it may wait. The system takes the lock back if it dies.
                fcntl.flock(lock.enter_context((home / _LOCK).open("ab")), fcntl.LOCK_EX)

            async def answer(message: "Message") -> None:
                lock.close()
                started.put(message.get("message", ""))
                await send(message)

            await app(scope, receive, answer)

    return serve


def _not_started(trace: str, home: Path) -> PrefectUnavailable:
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    why = next((line for line in reversed(lines) if _FAULT.match(line)), lines[-1])
    return PrefectUnavailable(
        message(
            f"PREFECT_HOME = {home}: Prefect's embedded server does not start: {masked(why)}",
            hints=[
                "set PREFECT_HOME to another folder, or PREFECT_API_URL to a server",
                f"{SERVER_LEVEL}=ERROR shows its log",
            ],
        )
    )
