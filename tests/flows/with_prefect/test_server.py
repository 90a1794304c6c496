"""A configured server is used; otherwise one is embedded, as early as that is certain, as Prefect would start it."""

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prefect.context
import pytest
from prefect.context import SettingsContext, get_settings_context
from prefect.server.api import server as prefect_server
from prefect.server.services.base import RunInEphemeralServers
from prefect.server.services.perpetual_services import get_enabled_perpetual_services
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_EPHEMERAL_ENABLED,
    Settings,
    temporary_settings,
)

from baton.flows.with_prefect import server as module
from baton.flows.with_prefect.server import (
    _PREFECT_DEFAULTS,
    SERVER_LEVEL,
    SILENT,
    TIMEOUT,
    EmbeddedServer,
    PrefectStart,
    is_certainly_embedded,
)
from baton.tasks.foundation.errors import InvalidInput, PrefectUnavailable
from tests.support.checkout import CHECKOUT
from tests.support.prefect_server import environment_with


def test_without_settings_the_server_is_embedded(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert is_certainly_embedded({"PREFECT_HOME": str(home)}, tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\n")
    harmless = {"PREFECT_HOME": str(home), "PREFECT_LOGGING_LEVEL": "DEBUG", "PREFECT_API_URL": ""}
    assert is_certainly_embedded(harmless | module._PREFECT_DEFAULTS, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "PREFECT_API_URL",
        "prefect_api_url",
        "PREFECT_PROFILE",
        "PREFECT_PROFILES_PATH",
        "PREFECT_SERVER_EPHEMERAL_ENABLED",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL",
        "PREFECT_API_DATABASE_CONNECTION_URL",
        "PREFECT_TEST_MODE",
    ],
)
def test_a_variable_that_may_matter_leaves_it_to_prefect(name: str, tmp_path: Path) -> None:
    assert not is_certainly_embedded({"PREFECT_HOME": str(tmp_path / "home"), name: "1"}, tmp_path)


@pytest.mark.parametrize("name", ["home/profiles.toml", ".env", "prefect.toml", "pyproject.toml"])
def test_a_file_with_settings_leaves_it_to_prefect(name: str, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / name).write_text('[tool.prefect]\napi.url = "http://127.0.0.1:1/api"\n')
    assert not is_certainly_embedded({"PREFECT_HOME": str(tmp_path / "home")}, tmp_path)


class FakeServers:
    """Counts embedded servers instead of starting them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        monkeypatch.setattr(module.EmbeddedServer, "start", self.start)
        monkeypatch.setattr(prefect.context, "GLOBAL_SETTINGS_CONTEXT", prefect.context.GLOBAL_SETTINGS_CONTEXT)

    def start(self, *_environment: object) -> SimpleNamespace:
        self.events.append("start")
        return SimpleNamespace(api_url="http://127.0.0.1:1/api", wait=lambda: self.events.append("wait"))


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> FakeServers:
    return FakeServers(monkeypatch)


def certain(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    monkeypatch.setattr(module, "is_certainly_embedded", lambda *_: answer)


def test_a_certain_server_is_started_before_prefect_is(servers: FakeServers, monkeypatch: pytest.MonkeyPatch) -> None:
    certain(monkeypatch, True)
    start = PrefectStart()
    assert servers.events == ["start"]
    assert start.connect()
    assert servers.events == ["start", "wait"]
    assert os.environ.get("PREFECT_API_URL") is None  # processes that the command starts are no clients
    assert prefect.context.GLOBAL_SETTINGS_CONTEXT.settings.api.url == "http://127.0.0.1:1/api"


def test_an_uncertain_command_starts_the_server_after_reading_settings(
    servers: FakeServers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certain(monkeypatch, False)
    start = PrefectStart()
    assert servers.events == []
    with temporary_settings({PREFECT_API_URL: None, PREFECT_HOME: tmp_path, PREFECT_SERVER_EPHEMERAL_ENABLED: True}):
        start.connect()
    assert servers.events == ["start", "wait"]


def test_a_configured_server_is_used_and_none_is_embedded(
    servers: FakeServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    certain(monkeypatch, False)
    asked: list[str] = []
    monkeypatch.setattr(module, "_require_server", asked.append)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:2/api"}):
        assert not PrefectStart().connect()
    assert (asked, servers.events) == (["http://127.0.0.1:2/api"], [])


def test_no_server_and_no_embedding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    certain(monkeypatch, False)
    settings = {PREFECT_API_URL: None, PREFECT_SERVER_EPHEMERAL_ENABLED: False}
    with (
        temporary_settings(settings),
        pytest.raises(PrefectUnavailable, match="PREFECT_SERVER_EPHEMERAL_ENABLED = false"),
    ):
        PrefectStart().connect()


def test_unreadable_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    certain(monkeypatch, False)
    monkeypatch.setenv("PREFECT_API_URL", "http://[bad")
    monkeypatch.setattr("prefect.settings.get_current_settings", Settings)  # as a new process reads them
    with pytest.raises(PrefectUnavailable, match="Prefect's settings cannot be read: "):
        PrefectStart().connect()


def test_a_server_that_cannot_be_started_is_refused_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    certain(monkeypatch, True)

    def start() -> None:
        raise PrefectUnavailable("no port is free")

    monkeypatch.setattr(module.EmbeddedServer, "start", start)
    started = PrefectStart()
    with pytest.raises(PrefectUnavailable, match="no port is free"):
        started.connect()


@contextmanager
def server_with_response(
    code: int, body: str, kind: str = "application/json", before: Sequence[int] = ()
) -> Iterator[int]:
    """Run a server with the same response to every request, after some of other codes, and yield its port."""
    first = list(before)
    unused = "csrf-token"  # what a server without that protection does not have

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(404 if before and unused in self.path else first.pop(0) if first else code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = answer  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def assert_refused(url: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    certain(monkeypatch, False)
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(InvalidInput) as caught:
        PrefectStart().connect()
    text = str(caught.value)
    for word in ("PREFECT_API_URL = ", *words):
        assert word in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("code", "body", "kind", "words"),
    [
        (404, "no such page", "text/plain", ["no Prefect server responds there (HTTP 404)", "/api"]),
        (200, "<html>Welcome</html>", "text/html", ["no Prefect server responds there"]),
        (200, '{"status": "up"}', "application/json", ["no Prefect server responds there"]),
        (401, "{}", "application/json", ["HTTP 401", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"]),
        (503, "{}", "application/json", ["no Prefect server responds there (HTTP 503)"]),
    ],
)
def test_a_server_that_is_not_usable_as_prefect_is_refused(
    code: int, body: str, kind: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 1.0)  # a busy server is asked again so long
    with server_with_response(code, body, kind) as port:
        assert_refused(f"http://127.0.0.1:{port}/api", monkeypatch, *words)


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    certain(monkeypatch, False)
    with (
        server_with_response(200, "[]", before=(503, 429)) as port,
        temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}),
    ):
        PrefectStart().connect()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:secret@127.0.0.1:9/api", "http://***@127.0.0.1:9/api"),
        ("http://nowhere.invalid/api", "http://nowhere.invalid/api"),
        ("ftp://127.0.0.1/api", "ftp://127.0.0.1/api"),
        ("127.0.0.1:4200/api", "127.0.0.1:4200/api"),
    ],
)
def test_an_unreachable_address_is_refused(url: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(url, monkeypatch, f"PREFECT_API_URL = {shown}: ", "http://HOST:4200/api")


def test_a_hanging_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/api"
        assert_refused(url, monkeypatch, url, "no response within 0.2 s")


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
    monkeypatch.setattr(module, "_SCRIPT", script)
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
        "from baton.flows.with_prefect.server import EmbeddedServer\n"
        "from baton.tasks.foundation.errors import PrefectUnavailable\n"
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
    monkeypatch.setattr(module, "_END_SECONDS", 0.2)
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
    expected = module._SERVER_SETTINGS.items()
    assert expected <= added.items()
    assert {name for name in added if name.startswith("PREFECT__")} <= dict(expected).keys()


@pytest.mark.parametrize("names", module._UNUSED)
def test_the_user_can_have_what_is_left_out(names: tuple[str, str]) -> None:
    assert module._server_environment({})[names[0]] == "false"
    for name in names:
        chosen = module._server_environment({name: "true"})
        assert {key: value for key, value in chosen.items() if key in names} == {name: "true"}


def test_it_runs_only_the_services_of_a_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in module._server_environment(_PREFECT_DEFAULTS).items():
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
    script = Path(module.__file__).with_name("internals.py")
    assert script == module._SCRIPT
    with module.socket.create_server(("127.0.0.1", 0)) as listener:
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
def test_servers_with_one_new_home_start_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, "600")
    with ExitStack() as stack:
        servers = []
        for _ in range(2):
            servers.append(EmbeddedServer.start(environment_with(tmp_path, **_PREFECT_DEFAULTS)))
            stack.callback(servers[-1].end)
        for server in servers:
            server.wait()
