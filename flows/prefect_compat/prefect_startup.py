"""Starts Prefect for a command: quiet defaults, a server that is configured, or the embedded one.

A user's own settings win. `PrefectStart()` starts the embedded server before anything heavy is imported if it is
certain that the command needs one; `connect` then imports Prefect, checks its settings and refuses what cannot be used;
`wait` waits until the server responds. A command that does not wait for Prefect connects later; its settings and its
server are checked in another process before (`check_beside`, `require_checked`).

Relies on `refresh_global_settings_context` of Prefect 3.8.8, which reads the environment again.
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flows.prefect_compat.check_prefect import REFUSED
from flows.prefect_compat.embedded_server import SERVER_LEVEL, SILENT, TIMEOUT, EmbeddedServer
from flows.prefect_compat.require_prefect import DATABASE_FILE, require_database, require_prefect
from flows.process.children import start_child
from tasks.foundation.contracts.stage_calls import ErrorReport
from tasks.foundation.machine.environment import quiet_tensorflow
from tasks.foundation.machine.tpu import announce_tpu

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
        """Start the embedded server now if it is certain that one is needed. Prefect is not imported.

        Raises:
            PrefectUnavailable: the server's folder or its database cannot be used, or it cannot be started.
        """
        self._server: EmbeddedServer | None = None
        self._check: subprocess.Popen[bytes] | None = None
        self._home = home_of_certain_embedding(os.environ, Path.cwd())
        if self._home is not None:
            migrated = require_database(self._home / DATABASE_FILE, f"{_HOME} = {self._home}")
            self._server = EmbeddedServer.start(migrated=migrated)

    def check_beside(self) -> None:
        """Begin to check Prefect's settings and its server in another process, unless a server is embedded already."""
        if self._home is None:
            checkout = Path(__file__).parents[2]
            search_path = os.pathsep.join(filter(None, (os.fspath(checkout), os.environ.get("PYTHONPATH"))))
            self._check = start_child(
                [sys.executable, "-P", "-m", "flows.prefect_compat.check_prefect"],
                env={**os.environ, "PYTHONPATH": search_path},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )

    def require_checked(self) -> None:
        """Wait for the check.

        Raises:
            PrefectUnavailable: Prefect's settings or its server cannot be used.
            InvalidInput: the server refuses the credentials.
        """
        if self._check is not None:
            output, _ = self._check.communicate()
            if self._check.returncode == REFUSED:
                raise ErrorReport.model_validate_json(output).to_error()

    def connect(self) -> None:
        """Import Prefect and connect it with its server; an embedded one need not respond yet.

        Raises:
            PrefectUnavailable: Prefect's settings or its server cannot be used.
        """
        embedded = require_prefect(started_in=self._home)
        if embedded is not None:
            self._end()  # the settings say something else than expected
        if embedded:
            from prefect.settings import get_current_settings

            settings = get_current_settings().to_environment_variables(exclude_unset=True)
            self._server = EmbeddedServer.start({**os.environ, **settings})
        if self._server is not None:
            _use_server(self._server.api_url)

    def wait(self) -> None:
        """Wait until the embedded server responds, if there is one.

        Raises:
            PrefectUnavailable: it did not start.
        """
        if self._server is not None:
            self._server.wait()

    def respond(self) -> None:
        """Connect, and wait until the server responds.

        Raises:
            PrefectUnavailable: Prefect's settings or its server cannot be used.
        """
        self.connect()
        self.wait()

    def _end(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None


def home_of_certain_embedding(environment: Mapping[str, str], folder: Path) -> Path | None:
    """Where Prefect would keep the database of an embedded server, if nothing is set that could change this.

    Reading Prefect's settings takes a second of imports. Most commands have none, and a look at the places where
    settings can be is enough.

    Args:
        environment: variables of this process.
        folder: the working folder.

    Returns:
        PREFECT_HOME; None if only Prefect itself can tell whether a server is configured.
    """
    for name in (name for name, value in environment.items() if value):
        upper = name.upper()  # Prefect's settings ignore the case
        known = upper == _HOME or upper in _PREFECT_DEFAULTS or upper.startswith(_UNRELATED)
        if upper.startswith("PREFECT_") and not known:
            return None
    home = Path(environment.get(_HOME) or "~/.prefect").expanduser()
    pyproject = folder / "pyproject.toml"
    if pyproject.is_file() and "tool.prefect" in pyproject.read_text(encoding="utf-8", errors="replace"):
        return None
    if any(file.exists() for file in (home / "profiles.toml", folder / "prefect.toml", folder / ".env")):
        return None
    return home if home.is_absolute() else None


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
