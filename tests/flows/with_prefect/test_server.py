"""A configured server is used, and refused with the remedy; without one this process serves Prefect's API itself.

The embedded server is a small application here; the last test, and `tests/end_to_end/`, have Prefect's.
"""

import asyncio
import fcntl
import http.client
import http.server
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    Settings,
    temporary_settings,
)

from baton.flows.with_prefect import server as module
from baton.flows.with_prefect.server import _PREFECT_DEFAULTS, _UNUSED, TIMEOUT, connect
from baton.tasks.foundation.errors import InvalidInput, PrefectUnavailable
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.prefect_server import environment_with


def test_a_configured_server_is_used_and_none_is_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(module, "_require_server", asked.append)
    monkeypatch.setattr(module, "_serve", asked.append)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:2/api"}):
        assert not connect()
    assert asked == ["http://127.0.0.1:2/api"]


def test_no_server_and_no_embedding_is_refused() -> None:
    settings = {PREFECT_API_URL: None, PREFECT_SERVER_EPHEMERAL_ENABLED: False}
    with (
        temporary_settings(settings),
        pytest.raises(PrefectUnavailable, match="PREFECT_SERVER_EPHEMERAL_ENABLED = false"),
    ):
        connect()


def test_unreadable_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://[bad")
    monkeypatch.setattr("prefect.settings.get_current_settings", Settings)  # as a new process reads them
    with pytest.raises(PrefectUnavailable, match="Prefect's settings cannot be read: "):
        connect()


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


def assert_refused(url: str, *words: str) -> None:
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(InvalidInput) as caught:
        connect()
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
        assert_refused(f"http://127.0.0.1:{port}/api", *words)


def test_a_busy_server_is_asked_again() -> None:
    with (
        server_with_response(200, "[]", before=(503, 429)) as port,
        temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}),
    ):
        connect()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:secret@127.0.0.1:9/api", "http://***@127.0.0.1:9/api"),
        ("http://nowhere.invalid/api", "http://nowhere.invalid/api"),
        ("ftp://127.0.0.1/api", "ftp://127.0.0.1/api"),
        ("127.0.0.1:4200/api", "127.0.0.1:4200/api"),
    ],
)
def test_an_unreachable_address_is_refused(url: str, shown: str) -> None:
    assert_refused(url, f"PREFECT_API_URL = {shown}: ", "http://HOST:4200/api")


def test_a_hanging_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/api"
        assert_refused(url, url, "no response within 0.2 s")


def application(*answers: dict[str, Any]) -> Callable[..., Any]:
    """Of an ASGI server: it answers its start, and requests with "true"; without an answer it never starts."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            await send({"type": "http.response.body", "body": b"true"})
            return
        for answer in answers:
            await send(answer)
        await receive()  # the end
        await send({"type": "lifespan.shutdown.complete"})

    return serve


STARTED = {"type": "lifespan.startup.complete"}
Embed = Callable[..., list[Any]]  # of what creates the application, and the limit


@pytest.fixture
def embed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Embed]:
    """Connect with an embedded server of another application; returns the functions that end it."""
    ends: list[Any] = []
    monkeypatch.setattr(module.atexit, "register", ends.append)
    monkeypatch.setattr(prefect.context, "GLOBAL_SETTINGS_CONTEXT", prefect.context.GLOBAL_SETTINGS_CONTEXT)
    monkeypatch.setattr(module, "leave_out_idle_worker", lambda: None)

    def start(created: Callable[..., Any], seconds: int = 60) -> list[Any]:
        monkeypatch.setattr(prefect_server, "create_app", created)
        settings = {
            PREFECT_API_URL: None,
            PREFECT_HOME: tmp_path,
            PREFECT_SERVER_EPHEMERAL_ENABLED: True,
            PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: seconds,
        }
        with temporary_settings(settings):
            assert connect()
        return ends

    yield start
    monkeypatch.setattr(module, "_END_SECONDS", 0.0)
    for end in ends:
        end()


def test_without_an_address_this_process_serves_until_it_ends(embed: Embed) -> None:
    given: list[dict[str, Any]] = []

    def created(**words: Any) -> Any:
        given.append(words)
        return application(STARTED)

    ends = embed(created)
    assert given == [{"ephemeral": True}]  # no pages, and only the services that a flow run needs
    assert os.environ.get("PREFECT_API_URL") is None  # processes that the command starts are no clients
    url = urlsplit(prefect.context.GLOBAL_SETTINGS_CONTEXT.settings.api.url or "")
    assert (url.hostname, url.path) == ("127.0.0.1", "/api")
    connection = http.client.HTTPConnection("127.0.0.1", url.port or 0, timeout=60)
    connection.request("GET", "/api/health")
    assert connection.getresponse().read() == b"true"
    connection.close()
    ends.pop()()
    with pytest.raises(ConnectionRefusedError):
        connection.request("GET", "/api/health")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_machine_without_loopback_is_refused_at_once() -> None:
    program = (
        "from baton.flows.with_prefect.server import _listener\n"
        "from baton.tasks.foundation.errors import PrefectUnavailable\n"
        "try: _listener()\n"
        "except PrefectUnavailable as error: print(error)"
    )
    command = ["unshare", "--net", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert "this machine has no loopback interface (127.0.0.1: Network is unreachable)" in done.stdout


def test_no_answer_waits_for_the_client_to_acknowledge() -> None:
    with module._listener() as listener, socket.create_connection(listener.getsockname()):
        accepted = listener.accept()[0]
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        accepted.close()


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("no such revision", "no such revision"),
        ("Traceback\na.b.SomeError: table exists\n[SQL: CREATE]\n(Background: a page)", "a.b.SomeError: table exists"),
    ],
)
def test_a_failing_server_is_refused_and_quoted(embed: Embed, log: str, why: str) -> None:
    failed = {"type": "lifespan.startup.failed", "message": log}
    with pytest.raises(PrefectUnavailable, match=f"does not start: {why}\n"):
        embed(lambda **_: application(failed))


def test_a_server_that_cannot_be_made_is_refused(embed: Embed) -> None:
    def created(**_: Any) -> None:
        raise ValueError("no such database")

    with pytest.raises(PrefectUnavailable, match="does not start: ValueError: no such database\n"):
        embed(created)


def test_a_server_that_does_not_respond_is_refused(embed: Embed) -> None:
    with pytest.raises(PrefectUnavailable, match=f"{TIMEOUT} = 1: .* in time"):
        embed(lambda **_: application(), seconds=1)


def test_what_is_served_is_what_prefect_embeds(monkeypatch: pytest.MonkeyPatch) -> None:
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
    # FINAL frees the memory of routes, with an older FastAPI, by a garbage collection.
    assert {name for name in added if name.startswith("PREFECT__")} == {
        "PREFECT__SERVER_EPHEMERAL",
        "PREFECT__SERVER_FINAL",
    }


def settings_of_embedded() -> Settings:
    return module._settings_of_embedded(Settings(), "http://127.0.0.1:1/api")


@pytest.mark.parametrize(
    "names",
    [
        (_UNUSED[0], "PREFECT_API_BLOCKS_REGISTER_ON_START"),
        (_UNUSED[1], "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION"),
        (_UNUSED[2], "PREFECT_API_SERVICES_EVENT_PERSISTER_ENABLED"),
        (_UNUSED[3], "PREFECT_API_SERVICES_TRIGGERS_ENABLED"),
    ],
)
def test_the_user_can_have_what_is_left_out(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    setting = getattr(prefect.settings, names[0])
    with SettingsContext(profile=get_settings_context().profile, settings=settings_of_embedded()):
        assert setting.value() is False
    for name in names:
        with monkeypatch.context() as patched:
            patched.setenv(name, "true")
            with SettingsContext(profile=get_settings_context().profile, settings=settings_of_embedded()):
                assert setting.value() is True


def test_it_runs_only_the_services_of_a_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _PREFECT_DEFAULTS.items():
        monkeypatch.setenv(name, value)
    with SettingsContext(profile=get_settings_context().profile, settings=settings_of_embedded()):
        services = {service.__name__ for service in RunInEphemeralServers.enabled_services()}
        loops = {loop.function.__name__ for loop in get_enabled_perpetual_services(ephemeral=True)}
    # The recorder stores task runs; the distributor tells the flow run that it is suspended.
    assert services == {"TaskRunRecorder", "Distributor"}
    assert loops == set()


def test_a_server_waits_for_the_start_of_another(tmp_path: Path) -> None:
    events: queue.SimpleQueue[str] = queue.SimpleQueue()

    async def receive() -> None:
        events.put("starts")

    async def send(message: Any) -> None:
        """Tell no one."""

    served = module._one_at_a_time(application(STARTED), tmp_path, queue.SimpleQueue())
    with (tmp_path / module._LOCK).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: asyncio.run(served({"type": "lifespan"}, receive, send)))
        thread.start()
        with pytest.raises(queue.Empty):
            events.get(timeout=0.2)
    assert events.get(timeout=60) == "starts"
    thread.join(60)


@pytest.mark.slow
def test_servers_with_one_new_home_start_at_once(tmp_path: Path) -> None:
    environment = environment_with(tmp_path, **_PREFECT_DEFAULTS | {TIMEOUT: "600"})
    command = [sys.executable, "-c", "from baton.flows.with_prefect.server import connect; print(connect())"]
    servers = [forked.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    assert [server.communicate(timeout=600)[0] for server in servers] == ["True\n", "True\n"]
