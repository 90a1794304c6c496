"""An unusable Prefect is refused at once, with the setting and the remedy; nothing is written."""

import http.server
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    PREFECT_SERVER_EPHEMERAL_ENABLED,
    temporary_settings,
)

from flows.prefect_compat import require_prefect
from tasks.foundation.errors import InvalidInput
from tests.support.prefect_server import baton, environment_with

MakeHome = Callable[[Path], Path]
EMBEDDED = {PREFECT_SERVER_EPHEMERAL_ENABLED: True}


def files_in(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@contextmanager
def assert_refused(watched: Path, *words: str) -> Iterator[None]:
    before = files_in(watched)
    with pytest.raises(InvalidInput) as caught:
        yield
    text = str(caught.value)
    for word in (*words, "PREFECT_API_URL"):
        assert word in text
    assert "secret" not in text
    assert caught.value.exit_code == 2
    assert files_in(watched) == before


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


@pytest.mark.parametrize(
    ("code", "body", "kind", "words"),
    [
        (404, "no such page", "text/plain", ["not Prefect's API (HTTP 404)", "ends in /api"]),
        (200, "<html>Welcome</html>", "text/html", ["not Prefect's API", "ends in /api"]),
        (200, '{"status": "up"}', "application/json", ["not Prefect's API"]),
        (401, "{}", "application/json", ["HTTP 401", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"]),
        (403, "{}", "application/json", ["HTTP 403", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"]),
        (503, "{}", "application/json", ["has a problem (HTTP 503)"]),
    ],
)
def test_a_server_that_is_not_usable_as_prefect_is_refused(
    code: int, body: str, kind: str, words: list[str], tmp_path: Path
) -> None:
    with server_with_response(code, body, kind) as port:
        url = f"http://127.0.0.1:{port}/api"
        with temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: tmp_path}), assert_refused(tmp_path, url, *words):
            require_prefect.require_prefect()


@pytest.mark.parametrize(
    ("url", "shown", "words"),
    [
        ("http://127.0.0.1:9/api", "http://127.0.0.1:9/api", ["refused", "prefect server start"]),
        ("http://me:secret@127.0.0.1:9/api", "http://***@127.0.0.1:9/api", ["refused"]),
        ("http://nowhere.invalid/api", "http://nowhere.invalid/api", ["no Prefect server is reachable"]),
        ("ftp://127.0.0.1/api", "ftp://127.0.0.1/api", ["not the address", "http://HOST:4200/api"]),
        ("127.0.0.1:4200/api", "127.0.0.1:4200/api", ["not the address", "http://HOST:4200/api"]),
    ],
)
def test_an_unreachable_address_is_refused(url: str, shown: str, words: list[str], tmp_path: Path) -> None:
    with (
        temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: tmp_path}),
        assert_refused(tmp_path, f"PREFECT_API_URL = {shown}: ", *words),
    ):
        require_prefect.require_prefect()


def test_https_to_an_http_server_names_the_scheme(tmp_path: Path) -> None:
    with server_with_response(200, "true") as port:
        url = f"https://127.0.0.1:{port}/api"
        with (
            temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: tmp_path}),
            assert_refused(tmp_path, url, "http://"),
        ):
            require_prefect.require_prefect()


def test_a_hanging_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(require_prefect, "_HEALTH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/api"
        with (
            temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: tmp_path}),
            assert_refused(tmp_path, url, "no response within"),
        ):
            require_prefect.require_prefect()


def test_no_server_and_no_embedding_is_refused(tmp_path: Path) -> None:
    settings = {PREFECT_SERVER_EPHEMERAL_ENABLED: False, PREFECT_HOME: tmp_path}
    with temporary_settings(settings), assert_refused(tmp_path, "PREFECT_SERVER_EPHEMERAL_ENABLED = false"):
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
        (newer_database, ["a newer Prefect than this one", "revision is fff"]),
    ],
    ids=["file", "below-file", "unwritable", "no-database", "newer"],
)
def test_an_unusable_prefect_home_is_refused(home_of: MakeHome, words: list[str], tmp_path: Path) -> None:
    home = home_of(tmp_path)
    url = f"sqlite+aiosqlite:///{home}/prefect.db"
    settings = {PREFECT_HOME: home, PREFECT_SERVER_DATABASE_CONNECTION_URL: url, **EMBEDDED}
    with temporary_settings(settings), assert_refused(tmp_path, f"PREFECT_HOME = {home}: ", *words):
        require_prefect.require_prefect()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(require_prefect.tempfile, "TemporaryFile", lambda **_: open("/dev/full", "wb"))  # noqa: SIM115, PTH123
    settings = {PREFECT_HOME: tmp_path, PREFECT_SERVER_DATABASE_CONNECTION_URL: None, **EMBEDDED}
    with temporary_settings(settings), assert_refused(tmp_path, "No space left on device"):
        require_prefect.require_prefect()


def test_a_locked_database_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(require_prefect, "_DATABASE_SECONDS", 0.1)
    home = database(tmp_path, "CREATE TABLE a (b)")
    url = f"sqlite+aiosqlite:///{home}/prefect.db"
    settings = {PREFECT_HOME: home, PREFECT_SERVER_DATABASE_CONNECTION_URL: url, **EMBEDDED}
    with closing(sqlite3.connect(home / "prefect.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with temporary_settings(settings), assert_refused(tmp_path / "nowhere", "database is locked", "fuser"):
            require_prefect.require_prefect()


@pytest.mark.parametrize(
    ("rows", "complete"),
    [
        (["INSERT INTO alembic_version VALUES ('a3b9c7d2e5f1')"], True),
        (["INSERT INTO alembic_version VALUES ('f416ea180ae1')"], False),
        ([], False),
    ],
)
def test_a_database_with_every_migration_is_known(rows: list[str], complete: bool, tmp_path: Path) -> None:
    home = database(tmp_path, "CREATE TABLE alembic_version (version_num)", *rows)
    assert require_prefect.require_database(home / "prefect.db", "PREFECT_HOME") == complete
    assert not require_prefect.require_database(tmp_path / "new" / "prefect.db", "PREFECT_HOME")


def test_a_current_and_a_new_database_are_accepted(tmp_path: Path) -> None:
    home = database(tmp_path, "CREATE TABLE alembic_version (version_num)")
    for version in ("a1b2c3d4e5f7", "a3b9c7d2e5f1"):  # the file name of the first revision does not contain it
        with closing(sqlite3.connect(home / "prefect.db")) as made:
            made.execute("DELETE FROM alembic_version")
            made.execute("INSERT INTO alembic_version VALUES (?)", (version,))
            made.commit()
        for folder in (home, tmp_path / "new" / "home"):
            url = f"sqlite+aiosqlite:///{folder}/prefect.db"
            settings = {PREFECT_HOME: folder, PREFECT_SERVER_DATABASE_CONNECTION_URL: url, **EMBEDDED}
            with temporary_settings(settings):
                require_prefect.require_prefect()


@pytest.mark.parametrize("absence", ["home", "settings"])
def test_the_command_exits_2_with_a_hint(absence: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def build():\n    pass\n")
    (tmp_path / "run.yaml").write_text(
        "run: mine\nstorage: ./runs\ndata: {source: digits}\nmodel: model.py:build\n"
        "train: {steps: 10, global_batch_size: 8}\n"
    )
    before = files_in(tmp_path)
    settings = {"PREFECT_API_URL": "http://[bad"} if absence == "settings" else {}
    home = Path(os.devnull) if absence == "home" else tmp_path
    done = baton(environment_with(home, **settings), "run", str(tmp_path / "run.yaml"))
    assert done.returncode == 2, done.stderr
    assert "PREFECT_HOME" in done.stderr
    assert "unexpected" not in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "hint: " in done.stderr
    assert files_in(tmp_path) == before
