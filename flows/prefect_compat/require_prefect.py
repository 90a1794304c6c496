"""Checks once that Prefect can be used, before a command imports TensorFlow or writes anything.

With PREFECT_API_URL, a Prefect API must respond there. Without it, Prefect's server is embedded in the command, which
needs a writable folder and a database that this version of Prefect can use.

Relies on internals of Prefect 3.8.8: the name of its database file, and its database migrations, which are files below
`server/database/_migrations`.
"""

import importlib.util
import re
import sqlite3
import ssl
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import httpx

from tasks.foundation.errors import PrefectUnavailable
from tasks.foundation.messages import masked, message

if TYPE_CHECKING:
    from prefect.exceptions import PrefectHTTPStatusError

_HEALTH_SECONDS: Final = 20.0  # limit of the health check
_REQUEST_SECONDS: Final = 60.0  # limit of a request that reads its database, which may be busy
_DATABASE_SECONDS: Final = 15.0  # limit of another process's transaction
_MIN_FREE_BYTES: Final = 64 << 10  # a database needs more
_AUTHENTICATION: Final = frozenset({401, 403})
_BUSY: Final = frozenset({408, 429})
_SERVER_FAULT: Final = 500
_EXAMPLE: Final = "http://HOST:4200/api"
_EMBED: Final = "or unset PREFECT_API_URL to use the server that is embedded in the command"
_REVISION: Final = re.compile(r"""^(revision|down_revision)\s*=\s*["'](\w+)["']""", re.MULTILINE)
DATABASE_FILE: Final = "prefect.db"  # the embedded server's, in PREFECT_HOME
_OTHER_SETTINGS: Final = "or set PREFECT_HOME to another folder, or PREFECT_API_URL to a server"


def require_prefect(*, started_in: Path | None = None) -> bool | None:
    """Refuse to start if Prefect cannot be used.

    Args:
        started_in: the PREFECT_HOME whose database was checked before the embedded server was started on it; None if
            no server was started.

    Returns:
        Whether a server must be embedded: False if one is configured, True if one must be started, and None if the one
        that was started is right.

    Raises:
        PrefectUnavailable: the message has the wrong setting, its value and the remedy.
    """
    try:
        from prefect.settings import get_current_settings

        settings = get_current_settings()
    except ValueError as fault:  # from pydantic or TOML: the environment, a profile or prefect.toml
        why = next((line.strip() for line in str(fault).splitlines()[1:] if line.strip()), str(fault))
        raise PrefectUnavailable(
            message(
                f"Prefect's settings cannot be read: {why}",
                hints=["correct the environment variables PREFECT_..., PREFECT_HOME/profiles.toml or prefect.toml"],
            )
        ) from fault
    if settings.api.url:
        _require_server(settings.api.url)
        return False
    if not settings.server.ephemeral.enabled:
        raise PrefectUnavailable(
            message(
                "PREFECT_API_URL is not set, and PREFECT_SERVER_EPHEMERAL_ENABLED = false disables the embedded server",
                hints=[f"set PREFECT_API_URL to a server, as {_EXAMPLE}, or unset PREFECT_SERVER_EPHEMERAL_ENABLED"],
            )
        )
    url = settings.server.database.connection_url
    address: str = getattr(url, "get_secret_value", lambda: str(url))()
    if started_in is not None and address == f"sqlite+aiosqlite:///{started_in / DATABASE_FILE}":
        return None
    _require_database_at(address, settings.home)
    return True


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
            # Any web page may return 200, and health needs no login. Only Prefect answers this, to a known user.
            with get_client(httpx_settings={"timeout": _REQUEST_SECONDS}, sync_client=True) as client:
                client.read_flows(limit=1)
    except PrefectHTTPStatusError as fault:
        _refuse_status(url, fault)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as fault:
        _refuse_url(url, f"this is not the address of a server ({fault})", [f"set it as {_EXAMPLE}"], fault)
    except httpx.TimeoutException as fault:
        hints = ["see why the server is busy", _EMBED]
        _refuse_url(url, f"no response within {_HEALTH_SECONDS:.0f} seconds", hints, fault)
    except (httpx.HTTPError, OSError) as fault:
        hints = ["start the server (prefect server start), or correct the address", _EMBED]
        if _is_tls_error(fault):
            scheme = "use the scheme of the server, http:// or https://"
            hints.insert(0, f"{scheme}, or PREFECT_API_SSL_CERT_FILE to its certificates")
        _refuse_url(url, f"no Prefect server is reachable ({fault})", hints, fault)
    except ValueError as fault:  # not JSON, or not Prefect's
        _refuse_other_service(url, "its responses are not Prefect's", fault)


def _refuse_status(url: str, fault: "PrefectHTTPStatusError") -> NoReturn:
    code = fault.response.status_code
    if code in _AUTHENTICATION:
        from flows.prefect_compat.api_refusals import require_temporary

        require_temporary(fault)
    if code >= _SERVER_FAULT or code in _BUSY:
        _refuse_url(url, f"the server has a problem (HTTP {code})", ["run again when it is solved", _EMBED], fault)
    _refuse_other_service(url, f"HTTP {code}", fault)


def _refuse_other_service(url: str, why: str, fault: Exception) -> NoReturn:
    hints = [f"a Prefect server's address ends in /api, as {_EXAMPLE}", _EMBED]
    _refuse_url(url, f"the service there is not Prefect's API ({why})", hints, fault)


def _refuse_url(url: str, why: str, hints: Sequence[str], fault: Exception) -> NoReturn:
    why = why.replace(url, masked(url))
    raise PrefectUnavailable(message(f"PREFECT_API_URL = {masked(url)}: {why}", hints=hints)) from fault


def _is_tls_error(fault: BaseException) -> bool:
    known: BaseException | None = fault
    while known is not None and not isinstance(known, ssl.SSLError):
        known = known.__cause__ or known.__context__
    return known is not None


def _require_database_at(address: str, home: Path) -> None:
    """Check the database at an address. Prefect itself reports on other databases than SQLite's files."""
    from sqlalchemy.engine import make_url

    url = make_url(address)
    if url.get_backend_name() != "sqlite" or not url.database or url.database.startswith((":", "file:")):
        return
    path = Path(url.database)
    named = f"PREFECT_HOME = {home}"
    if path.parent != home:
        named = f"PREFECT_SERVER_DATABASE_CONNECTION_URL = {url.render_as_string()}"
    require_database(path, named)


def require_database(path: Path, named: str) -> bool:
    """Check the folder of a database and, if it exists, the database. Does not import Prefect.

    Args:
        path: the SQLite file.
        named: the setting that says where it is, for messages.

    Returns:
        Whether the database has every migration of this Prefect, so that its server need not look for more.

    Raises:
        PrefectUnavailable: the folder is not writable, or the database cannot be used.
    """
    _require_writable(path.parent, named)
    return path.exists() and _require_usable(path, named)


def _require_writable(folder: Path, named: str) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix=".baton-") as file:
            file.write(bytes(_MIN_FREE_BYTES))
            file.flush()
    except OSError as fault:
        raise PrefectUnavailable(
            message(
                f"{named}: Prefect's embedded server cannot write there ({fault.strerror or fault})",
                hints=["make it a writable folder with free space", _OTHER_SETTINGS],
            )
        ) from fault


def _require_usable(path: Path, named: str) -> bool:
    try:
        with closing(sqlite3.connect(path, timeout=_DATABASE_SECONDS, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                versions = _versions(database)
            finally:
                database.execute("ROLLBACK")
    except sqlite3.Error as fault:
        hint = f"move {path} away; Prefect creates a new one"
        if "locked" in str(fault):
            hint = f"end the process that uses it (fuser {path})"
        elif "readonly" in str(fault) or "open" in str(fault):
            hint = "give this user write access to it"
        words = f"{named}: Prefect's database {path.name} cannot be used ({fault})"
        raise PrefectUnavailable(message(words, hints=[hint, _OTHER_SETTINGS])) from fault
    known, newest = _migrations()
    unknown = [version for version in versions if known and version not in known]
    if unknown:
        import prefect

        words = f"{named}: a newer Prefect than this one, {prefect.__version__}, wrote the database {path.name}"
        hints = [f"install that version of Prefect (the database revision is {unknown[0]})", _OTHER_SETTINGS]
        raise PrefectUnavailable(message(words, hints=hints))
    return bool(versions) and set(versions) == newest


def _versions(database: sqlite3.Connection) -> list[str]:
    """The revisions of the database; none if Prefect has not initialized it."""
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchall():
        return []
    return [str(version) for (version,) in database.execute("SELECT version_num FROM alembic_version")]


def _migrations() -> tuple[set[str], set[str]]:
    """The revisions of this Prefect's migrations, and those that no other follows; both empty if they are not found."""
    spec = importlib.util.find_spec("prefect")  # without importing it
    if spec is None or spec.origin is None:
        return set(), set()
    folder = Path(spec.origin).parent / "server" / "database" / "_migrations" / "versions" / "sqlite"
    found = [_REVISION.findall(file.read_text(encoding="utf-8")) for file in folder.glob("*.py")]
    known = {revision for lines in found for kind, revision in lines if kind == "revision"}
    return known, known - {revision for lines in found for kind, revision in lines if kind == "down_revision"}
