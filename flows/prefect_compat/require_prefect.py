"""Whether Prefect can be had: looked at once, before a command waits for TensorFlow or writes anything.

With PREFECT_API_URL a server must answer there, as Prefect's API. Without it Prefect's server is embedded in the
command, which needs a folder that can be written and a database that this version of Prefect can use.
"""

import sqlite3
import ssl
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import httpx

from tasks.foundation.errors import PrefectUnavailable
from tasks.foundation.messages import message, without_password

if TYPE_CHECKING:
    from prefect.exceptions import PrefectHTTPStatusError

_HEALTH_SECONDS: Final = 20.0  # to say that it is there
_ANSWER_SECONDS: Final = 60.0  # to look into its database, which may be busy
_DATABASE_SECONDS: Final = 15.0  # until another process has ended its transaction
_ROOM_BYTES: Final = 64 << 10  # less is no room for a database
_AUTHENTICATION: Final = frozenset({401, 403})
_BUSY: Final = frozenset({408, 429})
_SERVER_FAULT: Final = 500
_EXAMPLE: Final = "http://HOST:4200/api"
_EMBED: Final = "or unset PREFECT_API_URL, and Prefect's server is embedded in the command"
_ELSEWHERE: Final = "or set PREFECT_HOME to another folder, or PREFECT_API_URL to a server"


def require_prefect() -> None:
    """Refuse to begin where Prefect cannot be had.

    Raises:
        InvalidInput: the setting that is wrong, its value, and what to do.
    """
    try:
        from prefect.settings import get_current_settings

        settings = get_current_settings()
    except ValueError as fault:  # of pydantic, of TOML: the environment, a profile or prefect.toml
        why = next((line.strip() for line in str(fault).splitlines()[1:] if line.strip()), str(fault))
        raise PrefectUnavailable(
            message(
                f"Prefect's settings cannot be read: {why}",
                hints=["correct the environment variables PREFECT_..., PREFECT_HOME/profiles.toml or prefect.toml"],
            )
        ) from fault
    if settings.api.url:
        _require_server(settings.api.url)
    elif not settings.server.ephemeral.enabled:
        raise PrefectUnavailable(
            message(
                "PREFECT_API_URL is not set, and PREFECT_SERVER_EPHEMERAL_ENABLED = false forbids an embedded server",
                hints=[f"set PREFECT_API_URL to a server, as {_EXAMPLE}, or unset PREFECT_SERVER_EPHEMERAL_ENABLED"],
            )
        )
    else:
        _require_database(settings.server.database.connection_url, settings.home)


def _require_server(url: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            with get_client(httpx_settings={"timeout": _HEALTH_SECONDS}, sync_client=True) as client:
                fault = client.api_healthcheck()
            if fault is not None:
                raise fault
            # Its health is told to everybody, and a page says 200 too; this only Prefect answers, to whom it knows.
            with get_client(httpx_settings={"timeout": _ANSWER_SECONDS}, sync_client=True) as client:
                client.read_flows(limit=1)
    except PrefectHTTPStatusError as fault:
        _refuse_status(url, fault)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as fault:
        _refuse_url(url, f"this is no address of a server ({fault})", [f"set it as {_EXAMPLE}"], fault)
    except httpx.TimeoutException as fault:
        hints = ["see what its server is busy with", _EMBED]
        _refuse_url(url, f"nothing answers within {_HEALTH_SECONDS:.0f} seconds", hints, fault)
    except (httpx.HTTPError, OSError) as fault:
        hints = ["start the server (prefect server start), or correct the address", _EMBED]
        if _is_of_tls(fault):
            scheme = "set the scheme that the server has, http:// or https://"
            hints.insert(0, f"{scheme}, or PREFECT_API_SSL_CERT_FILE to its certificates")
        _refuse_url(url, f"no Prefect server can be reached ({fault})", hints, fault)
    except ValueError as fault:  # not JSON, or not what Prefect answers
        _refuse_stranger(url, "its answers are not Prefect's", fault)


def _refuse_status(url: str, fault: "PrefectHTTPStatusError") -> NoReturn:
    code = fault.response.status_code
    if code in _AUTHENTICATION:
        from flows.launching.prefect_api import require_passing

        require_passing(fault)
    if code >= _SERVER_FAULT or code in _BUSY:
        _refuse_url(url, f"its server is not well (HTTP {code})", ["run again when it is", _EMBED], fault)
    _refuse_stranger(url, f"HTTP {code}", fault)


def _refuse_stranger(url: str, why: str, fault: Exception) -> NoReturn:
    hints = [f"a Prefect server's address ends in /api, as {_EXAMPLE}", _EMBED]
    _refuse_url(url, f"what answers there is not Prefect's API ({why})", hints, fault)


def _refuse_url(url: str, why: str, hints: Sequence[str], fault: Exception) -> NoReturn:
    why = why.replace(url, without_password(url))
    raise PrefectUnavailable(message(f"PREFECT_API_URL = {without_password(url)}: {why}", hints=hints)) from fault


def _is_of_tls(fault: BaseException) -> bool:
    known: BaseException | None = fault
    while known is not None and not isinstance(known, ssl.SSLError):
        known = known.__cause__ or known.__context__
    return known is not None


def _require_database(url: object, home: Path) -> None:
    """The folder, and the database if it is there already; one that is no file is left to Prefect's own words."""
    from sqlalchemy.engine import make_url

    address = make_url(getattr(url, "get_secret_value", lambda: str(url))())
    if address.get_backend_name() != "sqlite" or not address.database or address.database.startswith((":", "file:")):
        return
    path = Path(address.database)
    named = f"PREFECT_HOME = {home}"
    if path.parent != home:
        named = f"PREFECT_SERVER_DATABASE_CONNECTION_URL = {address.render_as_string()}"
    _require_room(path.parent, named)
    if path.exists():
        _require_usable(path, named)


def _require_room(folder: Path, named: str) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix=".baton-") as file:
            file.write(bytes(_ROOM_BYTES))
            file.flush()
    except OSError as fault:
        raise PrefectUnavailable(
            message(
                f"{named}: Prefect's embedded server cannot write there ({fault.strerror or fault})",
                hints=["make it a folder that this user can write, with room", _ELSEWHERE],
            )
        ) from fault


def _require_usable(path: Path, named: str) -> None:
    try:
        with closing(sqlite3.connect(path, timeout=_DATABASE_SECONDS, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                versions = _versions(database)
            finally:
                database.execute("ROLLBACK")
    except sqlite3.Error as fault:
        hint = f"move {path} away, and Prefect makes a new one"
        if "locked" in str(fault):
            hint = f"end the process that holds it (fuser {path})"
        elif "readonly" in str(fault) or "open" in str(fault):
            hint = "let this user write it"
        words = f"{named}: Prefect's database {path.name} cannot be used ({fault})"
        raise PrefectUnavailable(message(words, hints=[hint, _ELSEWHERE])) from fault
    unknown = [version for version in versions if not _is_known(version)]
    if unknown:
        import prefect

        words = f"{named}: the database {path.name} is of a newer Prefect than this one, {prefect.__version__}"
        hints = [f"install the Prefect that wrote it (its revision is {unknown[0]})", _ELSEWHERE]
        raise PrefectUnavailable(message(words, hints=hints))


def _versions(database: sqlite3.Connection) -> list[str]:
    """Revisions that the database is at; none before Prefect has filled it."""
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchall():
        return []
    return [str(version) for (version,) in database.execute("SELECT version_num FROM alembic_version")]


def _is_known(version: str) -> bool:
    """Whether this Prefect has the migration."""
    import prefect

    folder = Path(prefect.__file__).parent / "server" / "database" / "_migrations" / "versions" / "sqlite"
    files = list(folder.glob("*.py"))
    return not files or any(version in file.read_text(encoding="utf-8") for file in files)
