"""Prefect cannot be had: each absence is refused at once, with what is wrong and what to set; nothing is written."""

import http.server
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.server.api import server as prefect_server
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    PREFECT_SERVER_EPHEMERAL_ENABLED,
    temporary_settings,
)

from flows.prefect_compat import prefect_startup, require_prefect
from tasks.foundation.errors import InvalidInput, PrefectUnavailable
from tests.support.prefect_server import baton, environment_with

Absence = Callable[[Path], Any]
EMBEDDED = {PREFECT_SERVER_EPHEMERAL_ENABLED: True}


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@contextmanager
def refused(watched: Path, *words: str) -> Iterator[None]:
    before = tree(watched)
    with pytest.raises(InvalidInput) as caught:
        yield
    text = str(caught.value)
    for word in (*words, "PREFECT_API_URL"):
        assert word in text
    assert "secret" not in text
    assert caught.value.exit_code == 2
    assert tree(watched) == before


@contextmanager
def answering(code: int, body: str, kind: str = "application/json") -> Iterator[int]:
    """A server that gives everybody the same answer; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_POST = answer  # noqa: N815 - as http.server has it

        def log_message(self, *_: object) -> None:
            """Nothing is said."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(
    ("code", "body", "kind", "words"),
    [
        (404, "no such page", "text/plain", ["not Prefect's API (HTTP 404)", "ends in /api"]),
        (200, "<html>Welcome</html>", "text/html", ["not Prefect's API", "ends in /api"]),
        (200, '{"status": "up"}', "application/json", ["not Prefect's API"]),
        (401, "{}", "application/json", ["HTTP 401", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"]),
        (403, "{}", "application/json", ["HTTP 403", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"]),
        (503, "{}", "application/json", ["not well (HTTP 503)"]),
    ],
)
def test_who_answers_is_no_prefect_that_takes_us(
    code: int, body: str, kind: str, words: list[str], tmp_path: Path
) -> None:
    with answering(code, body, kind) as port:
        url = f"http://127.0.0.1:{port}/api"
        with temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: tmp_path}), refused(tmp_path, url, *words):
            require_prefect.require_prefect()


@pytest.mark.parametrize(
    ("url", "shown", "words"),
    [
        ("http://127.0.0.1:9/api", "http://127.0.0.1:9/api", ["refused", "prefect server start"]),
        ("http://me:secret@127.0.0.1:9/api", "http://***@127.0.0.1:9/api", ["refused"]),
        ("http://nowhere.invalid/api", "http://nowhere.invalid/api", ["no Prefect server can be reached"]),
        ("ftp://127.0.0.1/api", "ftp://127.0.0.1/api", ["no address", "http://HOST:4200/api"]),
        ("127.0.0.1:4200/api", "127.0.0.1:4200/api", ["no address", "http://HOST:4200/api"]),
    ],
)
def test_nobody_answers(url: str, shown: str, words: list[str], tmp_path: Path) -> None:
    with (
        temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: tmp_path}),
        refused(tmp_path, f"PREFECT_API_URL = {shown}: ", *words),
    ):
        require_prefect.require_prefect()


def test_the_scheme_is_another(tmp_path: Path) -> None:
    with answering(200, "true") as port:
        url = f"https://127.0.0.1:{port}/api"
        with temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: tmp_path}), refused(tmp_path, url, "http://"):
            require_prefect.require_prefect()


def test_a_server_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(require_prefect, "_HEALTH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/api"
        with (
            temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: tmp_path}),
            refused(tmp_path, url, "nothing answers"),
        ):
            require_prefect.require_prefect()


def test_no_server_is_named_and_none_may_be_embedded(tmp_path: Path) -> None:
    settings = {PREFECT_SERVER_EPHEMERAL_ENABLED: False, PREFECT_HOME: tmp_path}
    with temporary_settings(settings), refused(tmp_path, "PREFECT_SERVER_EPHEMERAL_ENABLED = false"):
        require_prefect.require_prefect()


def database(tmp_path: Path, *statements: str) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    with closing(sqlite3.connect(home / "prefect.db")) as made:
        for statement in statements:
            made.execute(statement)
        made.commit()
    return home


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("mine")
    return tmp_path / "file"


def below_a_file(tmp_path: Path) -> Path:
    return a_file(tmp_path) / "home"


def no_database(tmp_path: Path) -> Path:
    (tmp_path / "prefect.db").write_text("a letter, and no database\n" * 100)
    return tmp_path


def newer_database(tmp_path: Path) -> Path:
    return database(
        tmp_path, "CREATE TABLE alembic_version (version_num)", "INSERT INTO alembic_version VALUES ('fff')"
    )


@pytest.mark.parametrize(
    ("home_of", "words"),
    [
        (a_file, ["cannot write there"]),
        (below_a_file, ["cannot write there (Not a directory)"]),
        (lambda _: Path("/proc/prefect"), ["PREFECT_HOME = /proc/prefect: ", "cannot write there"]),
        (no_database, ["prefect.db cannot be used", "file is not a database", "move "]),
        (newer_database, ["of a newer Prefect than this one", "its revision is fff"]),
    ],
    ids=["file", "below-file", "unwritable", "no-database", "newer"],
)
def test_no_server_can_be_embedded(home_of: Absence, words: list[str], tmp_path: Path) -> None:
    home = home_of(tmp_path)
    url = f"sqlite+aiosqlite:///{home}/prefect.db"
    settings = {PREFECT_HOME: home, PREFECT_SERVER_DATABASE_CONNECTION_URL: url, **EMBEDDED}
    with temporary_settings(settings), refused(tmp_path, f"PREFECT_HOME = {home}: ", *words):
        require_prefect.require_prefect()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(require_prefect.tempfile, "TemporaryFile", lambda **_: open("/dev/full", "wb"))  # noqa: SIM115, PTH123
    settings = {PREFECT_HOME: tmp_path, PREFECT_SERVER_DATABASE_CONNECTION_URL: None, **EMBEDDED}
    with temporary_settings(settings), refused(tmp_path, "No space left on device"):
        require_prefect.require_prefect()


def test_a_locked_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(require_prefect, "_DATABASE_SECONDS", 0.1)
    home = database(tmp_path, "CREATE TABLE a (b)")
    url = f"sqlite+aiosqlite:///{home}/prefect.db"
    settings = {PREFECT_HOME: home, PREFECT_SERVER_DATABASE_CONNECTION_URL: url, **EMBEDDED}
    with closing(sqlite3.connect(home / "prefect.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with temporary_settings(settings), refused(tmp_path / "nowhere", "database is locked", "fuser"):
            require_prefect.require_prefect()


def test_a_database_of_this_prefect_and_a_new_one_are_taken(tmp_path: Path) -> None:
    home = database(tmp_path, "CREATE TABLE alembic_version (version_num)")
    for version in ("a1b2c3d4e5f7", "a3b9c7d2e5f1"):  # the first is not in the name of its file
        with closing(sqlite3.connect(home / "prefect.db")) as made:
            made.execute("DELETE FROM alembic_version")
            made.execute("INSERT INTO alembic_version VALUES (?)", (version,))
            made.commit()
        for folder in (home, tmp_path / "new" / "home"):
            url = f"sqlite+aiosqlite:///{folder}/prefect.db"
            settings = {PREFECT_HOME: folder, PREFECT_SERVER_DATABASE_CONNECTION_URL: url, **EMBEDDED}
            with temporary_settings(settings):
                require_prefect.require_prefect()


class Embedding:
    """Prefect's starting of its embedded server, with another program in the place of the server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
        monkeypatch.setenv("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
        self.starts = 0

        def start(_: object) -> subprocess.Popen[Any]:
            self.starts += 1
            return prefect_startup._OwnGroup().Popen(args=[sys.executable, "-c", code])

        monkeypatch.setattr(prefect_server.SubprocessASGIServer, "_run_uvicorn_command", start)
        monkeypatch.setattr(prefect_server.SubprocessASGIServer, "_instances", {})
        monkeypatch.setattr(prefect_server, "atexit", SimpleNamespace(register=lambda _stop: None))


def test_an_embedded_server_that_fails_is_started_once_and_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = "'no such revision\\nERROR:    Application startup failed. Exiting.'"
    embedding = Embedding(monkeypatch, f"import sys; print({said}, file=sys.stderr); sys.exit(3)")
    with temporary_settings({PREFECT_API_URL: None, PREFECT_HOME: tmp_path, **EMBEDDED}):
        api = prefect_startup.StartingApi()
        api.run()
    with pytest.raises(PrefectUnavailable, match="does not start: no such revision"):
        api.wait()
    assert embedding.starts == 1


def test_a_port_that_was_taken_meanwhile_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    code = "import sys; print('[Errno 98] address already in use', file=sys.stderr); sys.exit(3)"
    process = prefect_startup._OwnGroup().Popen(args=[sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.poll() == 3


@pytest.mark.parametrize("absence", ["home", "settings"])
def test_the_command_ends_with_code_2_and_a_sentence(absence: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def build():\n    pass\n")
    (tmp_path / "run.yaml").write_text(
        "run: mine\nstorage: ./runs\ndata: {source: digits}\nmodel: model.py:build\n"
        "train: {steps: 10, global_batch_size: 8}\n"
    )
    before = tree(tmp_path)
    settings = {"PREFECT_API_URL": "http://[bad"} if absence == "settings" else {}
    home = Path(os.devnull) if absence == "home" else tmp_path
    done = baton(environment_with(home, **settings), "run", str(tmp_path / "run.yaml"))
    assert done.returncode == 2, done.stderr
    assert "PREFECT_HOME" in done.stderr
    assert "unexpected" not in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "hint: " in done.stderr
    assert tree(tmp_path) == before
