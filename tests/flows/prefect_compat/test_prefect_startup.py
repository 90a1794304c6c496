"""A command uses the server that is configured; it embeds one as early as it is certain that none is."""

import http.server
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import prefect.context
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_SERVER_EPHEMERAL_ENABLED, temporary_settings

from flows.prefect_compat import prefect_startup
from flows.prefect_compat.prefect_startup import PrefectStart, is_certainly_embedded
from tasks.foundation.errors import InvalidInput, PrefectUnavailable


def test_without_settings_the_server_is_embedded(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert is_certainly_embedded({"PREFECT_HOME": str(home)}, tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\n")
    harmless = {"PREFECT_HOME": str(home), "PREFECT_LOGGING_LEVEL": "DEBUG", "PREFECT_API_URL": ""}
    assert is_certainly_embedded(harmless | prefect_startup._PREFECT_DEFAULTS, tmp_path)


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
        monkeypatch.setattr(prefect_startup.EmbeddedServer, "start", self.start)
        monkeypatch.setattr(prefect.context, "GLOBAL_SETTINGS_CONTEXT", prefect.context.GLOBAL_SETTINGS_CONTEXT)

    def start(self, *_environment: object) -> SimpleNamespace:
        self.events.append("start")
        return SimpleNamespace(api_url="http://127.0.0.1:1/api", wait=lambda: self.events.append("wait"))


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> FakeServers:
    return FakeServers(monkeypatch)


def certain(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    monkeypatch.setattr(prefect_startup, "is_certainly_embedded", lambda *_: answer)


def test_a_certain_server_is_started_before_prefect_is(servers: FakeServers, monkeypatch: pytest.MonkeyPatch) -> None:
    certain(monkeypatch, True)
    start = PrefectStart()
    assert servers.events == ["start"]
    start.connect()
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
    monkeypatch.setattr(prefect_startup, "_require_server", asked.append)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:2/api"}):
        PrefectStart().connect()
    assert (asked, servers.events) == (["http://127.0.0.1:2/api"], [])


def test_no_server_and_no_embedding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    certain(monkeypatch, False)
    settings = {PREFECT_API_URL: None, PREFECT_SERVER_EPHEMERAL_ENABLED: False}
    with (
        temporary_settings(settings),
        pytest.raises(PrefectUnavailable, match="PREFECT_SERVER_EPHEMERAL_ENABLED = false"),
    ):
        PrefectStart().connect()


def test_a_server_that_cannot_be_started_is_refused_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    certain(monkeypatch, True)

    def start() -> None:
        raise PrefectUnavailable("no port is free")

    monkeypatch.setattr(prefect_startup.EmbeddedServer, "start", start)
    started = PrefectStart()
    with pytest.raises(PrefectUnavailable, match="no port is free"):
        started.connect()


@contextmanager
def server_with_response(code: int, body: str, kind: str = "application/json") -> Iterator[int]:
    """Run a server with the same response to every request, and yield its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(code)
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
    with server_with_response(code, body, kind) as port:
        assert_refused(f"http://127.0.0.1:{port}/api", monkeypatch, *words)


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
    monkeypatch.setattr(prefect_startup, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/api"
        assert_refused(url, monkeypatch, url, "no response within 0.2 s")
