"""Prefect and TensorFlow without their chatter. Everything set here is a default: what a user has set holds."""

import os
import subprocess
import threading
import warnings
from typing import Any

from tasks.foundation.accelerator.environment import quiet_tensorflow
from tasks.foundation.accelerator.tpu_environment import announce_tpu
from tasks.foundation.stops.holding import before_leaving_at_once

_PREFECT_DEFAULTS = {
    # Run logs go to Prefect's API; the console is the command's own.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # Silences tracebacks at the embedded API's shutdown.
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    # A fresh PREFECT_HOME beside a busy TensorFlow takes its time.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # Usage data is sent only by those who ask for it.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
_LOOPBACK = "127.0.0.1,localhost"


def quiet() -> None:
    """Call before Prefect and TensorFlow are imported."""
    quiet_tensorflow()
    announce_tpu()
    # requests asks for this silence too, but its wish is lost when another thread imports at the same time.
    warnings.filterwarnings("ignore", message="SOCKS support in urllib3")
    for name, value in _PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # The embedded API is on this machine; a proxy would swallow its websockets.
    for name in ("NO_PROXY", "no_proxy"):
        known = os.environ.get(name)
        os.environ[name] = f"{known},{_LOOPBACK}" if known else _LOOPBACK


class _OwnGroup:
    """What Prefect's module sees as `subprocess`: the processes that it starts lead a group of their own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, *arguments: Any, **settings: Any) -> subprocess.Popen[Any]:  # noqa: N802 - Python's own name
        """As `subprocess.Popen`."""
        return subprocess.Popen(*arguments, process_group=0, **settings)


def _end_servers() -> None:
    """In their own group nobody else would end them."""
    from prefect.server.api.server import SubprocessASGIServer

    for server in list(SubprocessASGIServer._instances.values()):
        if server.server_process is not None:
            server.server_process.kill()


def start_prefect_api() -> threading.Thread:
    """Start Prefect's embedded API, if none is configured, while TensorFlow is being imported.

    A failure is left to the flow, which starts it again and can say what is wrong.
    """
    import prefect.exceptions
    import prefect.server.api.server as starting
    from prefect import get_client

    # Ctrl-C goes to the whole process group: the API must live on until the flow run's last state has been told.
    starting.subprocess = _OwnGroup()  # type: ignore[attr-defined,assignment]

    def start() -> None:
        try:
            get_client(sync_client=True)
        except (RuntimeError, OSError, prefect.exceptions.PrefectException):
            return
        before_leaving_at_once(_end_servers)

    thread = threading.Thread(target=start, name="prefect-api", daemon=True)
    thread.start()
    return thread
