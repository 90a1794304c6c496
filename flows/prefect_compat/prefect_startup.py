"""Prefect and TensorFlow without their chatter. Everything set here is a default: what a user has set holds."""

import os
import subprocess
import tempfile
import threading
import warnings
from typing import IO, Any

from flows.process.children import start_child
from tasks.foundation.accelerator.environment import quiet_tensorflow
from tasks.foundation.accelerator.tpu_environment import announce_tpu
from tasks.foundation.errors import PrefectUnavailable
from tasks.foundation.messages import message, without_password
from tasks.foundation.stops.uninterrupted import before_leaving_at_once

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
_SERVER_LEVEL = "PREFECT_SERVER_LOGGING_LEVEL"
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
        """As `subprocess.Popen`; the process ends with this one, also if that is killed."""
        command = settings.pop("args", None) or arguments[0]
        if os.environ.get(_SERVER_LEVEL) != _PREFECT_DEFAULTS[_SERVER_LEVEL]:  # the user wants to see what it says
            return _failing_once(start_child(command, process_group=0, **settings), None)
        said = tempfile.TemporaryFile()  # noqa: SIM115 - the process writes to it as long as it lives
        return _failing_once(start_child(command, process_group=0, stderr=said, **settings), said)


def _failing_once(process: subprocess.Popen[Any], said: IO[bytes] | None) -> subprocess.Popen[Any]:
    """Prefect starts a server that ends again and again, for minutes. Once is enough, unless its port was taken."""

    def poll() -> int | None:
        code = subprocess.Popen.poll(process)
        if code is None:
            return None
        _forget_start(process)
        lines = _lines(said)
        if any("address already in use" in line for line in lines):
            return code
        why = lines[-1] if lines else f"it ended with code {code}"
        raise PrefectUnavailable(
            message(
                f"PREFECT_HOME = {os.environ.get('PREFECT_HOME', '~/.prefect')}: Prefect's embedded server does not "
                f"start: {without_password(why)}",
                hints=[
                    "set PREFECT_HOME to another folder, or PREFECT_API_URL to a server",
                    f"{_SERVER_LEVEL}=ERROR shows all that it says",
                ],
            )
        )

    process.poll = poll  # type: ignore[method-assign]
    return process


def _forget_start(process: subprocess.Popen[Any]) -> None:
    """From now on it may end as any process does."""
    process.__dict__.pop("poll", None)


def _lines(said: IO[bytes] | None) -> list[str]:
    """What the server said, without its farewell and the empty lines."""
    if said is None:
        return []
    said.seek(0)
    lines = [line.strip() for line in said.read().decode(errors="replace").splitlines()]
    return [line for line in lines if line and not line.endswith("Application startup failed. Exiting.")]


def _servers() -> list[subprocess.Popen[Any]]:
    from prefect.server.api.server import SubprocessASGIServer

    processes = [server.server_process for server in list(SubprocessASGIServer._instances.values())]
    return [process for process in processes if process is not None]


def _end_servers() -> None:
    """In their own group nobody else would end them."""
    for server in _servers():
        server.kill()


class StartingApi(threading.Thread):
    """The embedded API on its way, while TensorFlow is being imported."""

    def __init__(self) -> None:
        super().__init__(name="prefect-api", daemon=True)
        self._fault: PrefectUnavailable | None = None

    def run(self) -> None:
        """Start it, once."""
        import httpx
        from prefect import get_client

        try:
            get_client(sync_client=True)
        except PrefectUnavailable as fault:
            self._fault = fault
        except (RuntimeError, OSError, httpx.HTTPError) as fault:  # it lives, and did not answer in time; or no port
            _end_servers()
            name = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
            why = (str(fault).splitlines() or [type(fault).__name__])[0]
            self._fault = PrefectUnavailable(
                message(
                    f"{name} = {os.environ.get(name)}: Prefect's embedded server does not start ({why})",
                    hints=["raise the seconds where the machine is busy, or set PREFECT_API_URL to a server"],
                )
            )
        else:
            for server in _servers():
                _forget_start(server)
            before_leaving_at_once(_end_servers)

    def wait(self) -> None:
        """Until it answers.

        Raises:
            PrefectUnavailable: it does not start.
        """
        if self.is_alive():
            self.join()
        if self._fault is not None:
            raise self._fault


def start_prefect_api() -> StartingApi:
    """Start Prefect's embedded API, if none is configured, while TensorFlow is being imported."""
    import prefect.server.api.server as starting

    # Ctrl-C goes to the whole process group: the API must live on until the flow run's last state has been told.
    starting.subprocess = _OwnGroup()  # type: ignore[attr-defined,assignment]
    thread = StartingApi()
    thread.start()
    return thread
