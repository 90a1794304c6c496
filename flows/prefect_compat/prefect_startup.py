"""Sets quiet defaults for Prefect and TensorFlow, and starts Prefect's embedded server. A user's own settings win.

Relies on internals of Prefect 3.8.8: `prefect.server.api.server` starts the server with its module-level name
`subprocess`, and keeps the started servers in `SubprocessASGIServer._instances`.
"""

import os
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Sequence
from typing import IO, Unpack

from flows.process.children import ChildSettings, start_child
from tasks.foundation.accelerator.environment import quiet_tensorflow
from tasks.foundation.accelerator.tpu_environment import announce_tpu
from tasks.foundation.errors import PrefectUnavailable
from tasks.foundation.messages import message, without_password
from tasks.foundation.stops.leave_at_once import before_leaving_at_once

_PREFECT_DEFAULTS = {
    # Prefect's run logs go to its API; the console belongs to the command.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # Silences tracebacks at the embedded API's shutdown.
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    # A new PREFECT_HOME takes long while TensorFlow is imported.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # Usage data is sent only if the user enables it.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
_SERVER_LEVEL = "PREFECT_SERVER_LOGGING_LEVEL"
_LOOPBACK = "127.0.0.1,localhost"


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


class ServerSubprocess:
    """Replaces `subprocess` in Prefect's module: the server has its own process group and ends with this process."""

    def __getattr__(self, name: str) -> object:
        value: object = getattr(subprocess, name)
        return value

    def Popen(  # noqa: N802 - Python's own name
        self, args: Sequence[str], **settings: Unpack[ChildSettings]
    ) -> subprocess.Popen[bytes]:
        """Start a process as `subprocess.Popen` does; it ends with this process, even if that is killed."""
        settings["process_group"] = 0
        if os.environ.get(_SERVER_LEVEL) != _PREFECT_DEFAULTS[_SERVER_LEVEL]:  # the user wants the server's log
            return _fail_at_first_exit(start_child(args, **settings), None)
        log = tempfile.TemporaryFile()  # noqa: SIM115 - the process writes to it until it ends
        settings["stderr"] = log
        return _fail_at_first_exit(start_child(args, **settings), log)


def _fail_at_first_exit(process: subprocess.Popen[bytes], log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Make a failed start an error at once: Prefect would retry it for minutes. A taken port is retried."""

    def poll() -> int | None:
        code = subprocess.Popen.poll(process)
        if code is None:
            return None
        _accept_exit(process)
        lines = _log_lines(log)
        if any("address already in use" in line for line in lines):
            return code
        why = lines[-1] if lines else f"it ended with code {code}"
        raise PrefectUnavailable(
            message(
                f"PREFECT_HOME = {os.environ.get('PREFECT_HOME', '~/.prefect')}: Prefect's embedded server does not "
                f"start: {without_password(why)}",
                hints=[
                    "set PREFECT_HOME to another folder, or PREFECT_API_URL to a server",
                    f"{_SERVER_LEVEL}=ERROR shows its log",
                ],
            )
        )

    process.__dict__["poll"] = poll
    return process


def _accept_exit(process: subprocess.Popen[bytes]) -> None:
    """The server has started; from now on its end is no failed start."""
    process.__dict__.pop("poll", None)


def _log_lines(log: IO[bytes] | None) -> list[str]:
    """The lines of the server's log, without empty lines and its last one."""
    if log is None:
        return []
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    return [line for line in lines if line and not line.endswith("Application startup failed. Exiting.")]


def _servers() -> list[subprocess.Popen[bytes]]:
    from prefect.server.api.server import SubprocessASGIServer

    processes = [server.server_process for server in list(SubprocessASGIServer._instances.values())]
    return [process for process in processes if process is not None]


def _end_servers() -> None:
    """End the servers; no signal of the terminal reaches their process group."""
    for server in _servers():
        server.kill()


class ServerStart(threading.Thread):
    """Starts the embedded server while TensorFlow is imported."""

    def __init__(self) -> None:
        super().__init__(name="prefect-api", daemon=True)
        self._fault: PrefectUnavailable | None = None

    def run(self) -> None:
        """Start the server, once."""
        import httpx
        from prefect import get_client

        try:
            get_client(sync_client=True)
        except PrefectUnavailable as fault:
            self._fault = fault
        except (RuntimeError, OSError, httpx.HTTPError) as fault:  # no response in time, or no free port
            _end_servers()
            name = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
            why = (str(fault).splitlines() or [type(fault).__name__])[0]
            self._fault = PrefectUnavailable(
                message(
                    f"{name} = {os.environ.get(name)}: Prefect's embedded server does not start ({why})",
                    hints=["raise the limit if the machine is busy, or set PREFECT_API_URL to a server"],
                )
            )
        else:
            for server in _servers():
                _accept_exit(server)
            before_leaving_at_once(_end_servers)

    def wait(self) -> None:
        """Wait until the server responds.

        Raises:
            PrefectUnavailable: it did not start.
        """
        if self.is_alive():
            self.join()
        if self._fault is not None:
            raise self._fault


def start_prefect_api() -> ServerStart:
    """Start Prefect's embedded server in a thread, if no server is configured."""
    import prefect.server.api.server as prefect_server

    # Ctrl-C reaches the whole process group, but the server must live until the flow run's last state is recorded.
    vars(prefect_server)["subprocess"] = ServerSubprocess()
    thread = ServerStart()
    thread.start()
    return thread
