"""Starts Prefect for a command: quiet defaults, a server that is configured, or the embedded one.

A user's own settings win. `PrefectStart()` starts the embedded server before anything heavy is imported if it is
certain that the command needs one; `connect` later waits for it, or imports Prefect, reads its settings and asks the
server that they name.

Relies on `refresh_global_settings_context` of Prefect 3.8.8, which reads the environment again.
"""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flows.prefect_compat.embedded_server import SERVER_LEVEL, SILENT, TIMEOUT, EmbeddedServer
from tasks.foundation.errors import PrefectUnavailable
from tasks.foundation.machine.environment import quiet_tensorflow
from tasks.foundation.machine.tpu import announce_tpu
from tasks.foundation.messages import masked, message

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
_LOOPBACK = "127.0.0.1,localhost"
_API_URL: Final = "PREFECT_API_URL"
_HOME: Final = "PREFECT_HOME"
# Settings that have no say in which server is used and where its database is.
_UNRELATED: Final = ("PREFECT_LOGGING_", "PREFECT_CLIENT_", "PREFECT_TASKS_", "PREFECT_FLOWS_", "PREFECT_RESULTS_")


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

    def connect(self) -> None:
        """Import Prefect and connect it with its server, which responds then.

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
    """Ask a server once, without retries: any web page may answer 200, but only Prefect answers this, to a known user.

    Raises:
        PrefectUnavailable: no Prefect server responds there.
        InvalidInput: it refuses the credentials.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from flows.prefect_compat.api_refusals import CREDENTIALS, require_temporary

    limits = {"timeout": _ANSWER_SECONDS}
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(limits, sync_client=True) as client:
            client.read_flows(limit=1)
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
        environment: variables of this process.
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
