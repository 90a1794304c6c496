"""A command uses the server that is configured; it embeds one as early as it is certain that none is."""

import os
from pathlib import Path
from types import SimpleNamespace

import prefect.context
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_SERVER_EPHEMERAL_ENABLED, temporary_settings

from flows.prefect_compat import prefect_startup
from flows.prefect_compat.prefect_startup import PrefectStart, home_of_certain_embedding
from flows.prefect_compat.require_prefect import DATABASE_FILE


def test_without_settings_the_server_is_embedded(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert home_of_certain_embedding({"PREFECT_HOME": str(home)}, tmp_path) == home
    assert home_of_certain_embedding({}, tmp_path) in {Path.home() / ".prefect", None}  # the developer's own
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\n")
    harmless = {"PREFECT_HOME": str(home), "PREFECT_LOGGING_LEVEL": "DEBUG", "PREFECT_API_URL": ""}
    assert home_of_certain_embedding(harmless | prefect_startup._PREFECT_DEFAULTS, tmp_path) == home


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
    assert home_of_certain_embedding({"PREFECT_HOME": str(tmp_path / "home"), name: "1"}, tmp_path) is None


@pytest.mark.parametrize("name", ["home/profiles.toml", ".env", "prefect.toml", "pyproject.toml"])
def test_a_file_with_settings_leaves_it_to_prefect(name: str, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / name).write_text('[tool.prefect]\napi.url = "http://127.0.0.1:1/api"\n')
    assert home_of_certain_embedding({"PREFECT_HOME": str(tmp_path / "home")}, tmp_path) is None


class FakeServers:
    """Counts embedded servers instead of starting them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        monkeypatch.setattr(prefect_startup.EmbeddedServer, "start", self.start)
        monkeypatch.setattr(prefect.context, "GLOBAL_SETTINGS_CONTEXT", prefect.context.GLOBAL_SETTINGS_CONTEXT)

    def start(self, *_environment: object, migrated: bool = False) -> SimpleNamespace:
        assert not migrated  # there is no database yet
        self.events.append("start")
        return SimpleNamespace(
            api_url="http://127.0.0.1:1/api",
            end=lambda: self.events.append("end"),
            wait=lambda: self.events.append("wait"),
        )


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> FakeServers:
    return FakeServers(monkeypatch)


def certain(monkeypatch: pytest.MonkeyPatch, home: Path | None) -> None:
    monkeypatch.setattr(prefect_startup, "home_of_certain_embedding", lambda *_: home)


def test_a_certain_server_is_started_before_prefect_is(
    servers: FakeServers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certain(monkeypatch, tmp_path)
    start = PrefectStart()
    assert servers.events == ["start"]
    url = f"sqlite+aiosqlite:///{tmp_path / DATABASE_FILE}"
    with embedding(tmp_path, url):
        start.connect()
    start.wait()
    assert servers.events == ["start", "wait"]
    assert os.environ.get("PREFECT_API_URL") is None  # processes that the command starts are no clients
    assert prefect.context.GLOBAL_SETTINGS_CONTEXT.settings.api.url == "http://127.0.0.1:1/api"


def embedding(home: Path, database: str | None = None) -> object:
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL

    return temporary_settings(
        {
            PREFECT_API_URL: None,
            PREFECT_HOME: home,
            PREFECT_SERVER_EPHEMERAL_ENABLED: True,
            PREFECT_SERVER_DATABASE_CONNECTION_URL: database or f"sqlite+aiosqlite:///{home}/prefect.db",
        }
    )


def test_a_server_with_the_wrong_database_is_replaced(
    servers: FakeServers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certain(monkeypatch, tmp_path)
    start = PrefectStart()
    with embedding(tmp_path, f"sqlite+aiosqlite:///{tmp_path}/another.db"):
        start.connect()
    assert servers.events == ["start", "end", "start"]


def test_an_uncertain_command_starts_the_server_after_reading_settings(
    servers: FakeServers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certain(monkeypatch, None)
    start = PrefectStart()
    assert servers.events == []
    with embedding(tmp_path):
        start.connect()
    assert servers.events == ["start"]


def test_a_configured_server_is_used_and_none_is_embedded(
    servers: FakeServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    certain(monkeypatch, None)
    asked: list[str] = []
    monkeypatch.setattr("flows.prefect_compat.require_prefect._require_server", asked.append)
    start = PrefectStart()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:2/api"}):
        start.connect()
    start.wait()
    assert (asked, servers.events) == (["http://127.0.0.1:2/api"], [])
