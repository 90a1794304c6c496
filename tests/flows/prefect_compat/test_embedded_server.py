"""The embedded server's process: started as Prefect starts it, refused with its log, ended with the command."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prefect.context import SettingsContext, get_settings_context
from prefect.server.api import server as prefect_server
from prefect.server.services.base import RunInEphemeralServers
from prefect.server.services.perpetual_services import get_enabled_perpetual_services
from prefect.settings import Settings

from flows.prefect_compat import embedded_server
from flows.prefect_compat.embedded_server import SERVER_LEVEL, SILENT, TIMEOUT, EmbeddedServer
from flows.prefect_compat.prefect_startup import _PREFECT_DEFAULTS
from tasks.foundation.errors import PrefectUnavailable
from tests.support.checkout import CHECKOUT
from tests.support.prefect_server import environment_with

ANSWER = """
import socket, sys, time
listener = socket.socket(fileno=int(sys.argv[1]))
while True:
    request = listener.accept()[0]
    request.recv(1000)
    request.sendall(b"HTTP/1.1 {status} Hello\\r\\nContent-Length: 4\\r\\n\\r\\ntrue")
    request.close()
"""


@contextmanager
def server_of(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, level: str = SILENT) -> Iterator[Any]:
    """An embedded server that runs other code; it is killed at the end."""
    script = folder / "server.py"
    script.write_text(code)
    monkeypatch.setattr(embedded_server, "_SCRIPT", script)
    server = EmbeddedServer.start({**os.environ, SERVER_LEVEL: level})
    try:
        yield server
    finally:
        server.process.kill()
        server.end()


def test_wait_returns_when_the_server_responds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server_of(ANSWER.format(status=200), tmp_path, monkeypatch) as server:
        server.wait()
        assert server.process.poll() is None
        assert server.api_url == f"http://127.0.0.1:{server.port}/api"
        assert os.getpgid(server.process.pid) == server.process.pid  # Ctrl-C does not reach it
        server.end()
        assert server.process.poll() is not None


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_machine_without_loopback_is_refused_at_once() -> None:
    program = (
        "from flows.prefect_compat.embedded_server import EmbeddedServer\n"
        "from tasks.foundation.errors import PrefectUnavailable\n"
        "try: EmbeddedServer.start()\n"
        "except PrefectUnavailable as error: print(error)"
    )
    command = ["unshare", "--net", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert "this machine has no loopback interface (127.0.0.1: Network is unreachable)" in done.stdout


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("no such revision", "no such revision"),
        ("Traceback\na.b.SomeError: table exists\n[SQL: CREATE]\n(Background: a page)", "a.b.SomeError: table exists"),
    ],
)
def test_a_failing_server_is_refused_and_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, why: str
) -> None:
    words = f"{log}\nERROR:    Application startup failed. Exiting."
    code = f"import sys; print({words!r}, file=sys.stderr); sys.exit(3)"
    with (
        server_of(code, tmp_path, monkeypatch) as server,
        pytest.raises(PrefectUnavailable, match=f"does not start: {why}\n"),
    ):
        server.wait()


def test_a_failing_server_without_a_log_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        server_of("raise SystemExit(3)", tmp_path, monkeypatch, level="ERROR") as server,
        pytest.raises(PrefectUnavailable, match="it ended with code 3"),
    ):
        server.wait()


def test_a_server_that_does_not_respond_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "0.2")
    with server_of("import time; time.sleep(600)", tmp_path, monkeypatch) as server:
        with pytest.raises(PrefectUnavailable, match=f"{TIMEOUT} = 0.2: .* in time"):
            server.wait()
        assert server.process.wait(60) is not None


def test_a_server_with_an_error_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        server_of(ANSWER.format(status=500), tmp_path, monkeypatch) as server,
        pytest.raises(PrefectUnavailable, match="HTTP 500"),
    ):
        server.wait()


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_server, "_END_SECONDS", 0.2)
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    with server_of(ignores + ANSWER.format(status=200), tmp_path, monkeypatch) as server:
        server.wait()
        server.end()
        assert server.process.poll() is not None


def test_its_settings_are_those_of_prefects_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    class Spy:
        @staticmethod
        def Popen(**settings: Any) -> None:  # noqa: N802 - Python's own name
            started.append(settings)

    monkeypatch.setattr(prefect_server, "subprocess", Spy)
    prefect_server.SubprocessASGIServer(port=1)._run_uvicorn_command()
    prefect_server.SubprocessASGIServer._instances.pop(1)
    assert "prefect.server.api.server:create_app" in started[0]["args"]
    added = {name: value for name, value in started[0]["env"].items() if os.environ.get(name) != value}
    expected = embedded_server._SERVER_SETTINGS.items()
    assert expected <= added.items()
    assert {name for name in added if name.startswith("PREFECT__")} <= dict(expected).keys()


@pytest.mark.parametrize("names", embedded_server._UNUSED)
def test_the_user_can_have_what_is_left_out(names: tuple[str, str]) -> None:
    assert embedded_server._server_environment({})[names[0]] == "false"
    for name in names:
        chosen = embedded_server._server_environment({name: "true"})
        assert {key: value for key, value in chosen.items() if key in names} == {name: "true"}


def test_it_runs_only_the_services_of_a_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in embedded_server._server_environment(_PREFECT_DEFAULTS).items():
        monkeypatch.setenv(name, value)
    with SettingsContext(profile=get_settings_context().profile, settings=Settings()):
        services = {service.__name__ for service in RunInEphemeralServers.enabled_services()}
        loops = {loop.function.__name__ for loop in get_enabled_perpetual_services(ephemeral=True)}
    # The recorder stores task runs; the distributor tells the flow run that it is suspended.
    assert services == {"TaskRunRecorder", "Distributor"}
    assert loops == set()


def test_the_script_says_that_a_server_did_not_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    environment = {**os.environ, "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path}/file/no.db"}
    script = Path(embedded_server.__file__).with_name("serve_api.py")
    assert script == embedded_server._SCRIPT
    with embedded_server.socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        done = subprocess.run(
            [sys.executable, "-P", str(script), str(listener.fileno())],
            env=environment,
            pass_fds=(listener.fileno(),),
            capture_output=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 3, done.stderr


@pytest.mark.slow
def test_four_servers_with_one_new_home_start_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "600")
    with ExitStack() as stack:
        servers = []
        for _ in range(4):
            servers.append(EmbeddedServer.start(environment_with(tmp_path, **_PREFECT_DEFAULTS)))
            stack.callback(servers[-1].end)
        for server in servers:
            server.wait()
