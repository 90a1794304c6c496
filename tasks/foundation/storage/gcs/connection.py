"""The connection of this process to Cloud Storage, or to a local server that stands in for it."""

import asyncio
import math
import os
import socket
import threading
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from tasks.foundation.errors import InvalidInput
from tasks.foundation.storage.gcs.responses import BodyTooLarge, Response
from tasks.foundation.storage.transfers import LAST_SECONDS, PROCESS_DEADLINE, Deadline

# Google's own client libraries read the address of a local server from this variable, too.
_LOCAL_SERVER = "STORAGE_EMULATOR_HOST"
# Module globals on purpose: this lock and the cache of `_connect` give the process one file system, so it has one event
# loop, one connection pool and one set of credentials.
_LOCK = threading.Lock()
# A body is sent in blocks of this size, so that a stalled transfer is noticed within one.
BLOCK_BYTES = 1 << 20
_CHECK_SECONDS = 0.5
_SCHEMES = ("http", "https")
_CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"

_Block = TypeVar("_Block", bytes, bytes | memoryview)


def connect() -> Any:
    """The process's gcsfs file system, created by the first call; for addresses, credentials and connections.

    Credentials are Google's defaults: GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`,
    or the machine's service account. A local server gets requests without credentials.

    Raises:
        google.auth.exceptions.GoogleAuthError: there are no credentials.
        OSError: the credentials file cannot be read.
        InvalidInput: the address of the local server is not valid.
    """
    with _LOCK:  # only one thread at a time requests credentials
        return _connect(os.environ.get(_LOCAL_SERVER) or None)


@cache
def _connect(local_server: str | None) -> Any:
    if local_server is not None:
        # gcsfs reads this when it is imported. Without it, gcsfs in the user's own code asks a local server for the
        # type of each bucket, and waits a minute for the response.
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        local_server = _address(local_server)
    else:
        _require_file_of_credentials()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"google\.api_core")  # Python is too old
        from gcsfs.core import GCSFileSystem

    return GCSFileSystem(
        token="anon" if local_server is not None else "google_default",
        endpoint_url=local_server,
        use_listings_cache=False,
        skip_instance_cache=True,
    )


def send(files: Any, method: str, path: str, *names: str, **options: Any) -> Response:
    """Send one request; returns any response, errors included.

    gcsfs itself would retry silently, drop the store's message, follow redirects, decompress stored bytes, and wait
    forever when the store stops reading a body.

    Args:
        files: see `connect`.
        method: HTTP method.
        path: below the JSON API, with {} for names; or a whole URL.
        names: inserted into the path, quoted.
        options: stall_seconds: cancel the request after this time without a byte in either direction; headers: added to
            those for credentials; json: a body; data: a body in blocks, whose Content-Length `headers` has; most_bytes:
            of the response's body; all others: of the query, where None is left out.

    Raises:
        TimeoutError: the request stalled.
        BodyTooLarge: the response's body has more bytes than `most_bytes`.
    """
    from fsspec.asyn import sync

    response: Response = sync(files.loop, _send_once, files, method, path, names, **options)
    return response


async def _send_once(
    files: Any,
    method: str,
    path: str,
    names: Sequence[str],
    *,
    stall_seconds: float,
    headers: Mapping[str, str] | None = None,
    json: Any = None,
    data: AsyncIterator[bytes | memoryview] | None = None,
    most_bytes: int | None = None,
    **parameters: str | int | None,
) -> Response:
    import aiohttp

    await files._set_session()
    # Checksums are of the stored bytes, so nothing may be compressed or decompressed in transit.
    all_headers = {"Accept-Encoding": "identity", **(headers or {})}
    async with asyncio.timeout(None) as timeout:
        with _StallTimer(timeout, stall_seconds, PROCESS_DEADLINE) as timer:
            async with files.session.request(
                method,
                files._format_path(path, names),
                params=files._get_params(parameters),
                json=json,
                headers=files._get_headers(all_headers),
                data=None if data is None else timer.watch(data),
                allow_redirects=False,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
            ) as response:
                body, rest = [], math.inf if most_bytes is None else most_bytes
                async for block in timer.watch(response.content.iter_any()):
                    body.append(block)
                    rest -= len(block)
                    if rest < 0:
                        raise BodyTooLarge
                return Response(response.status, response.headers, b"".join(body))


class _StallTimer:
    """Cancels a request when no bytes have moved for too long; sooner once the process's deadline has passed."""

    def __init__(self, timeout: asyncio.Timeout, seconds: float, deadline: Deadline) -> None:
        self._timeout, self._seconds, self._deadline = timeout, seconds, deadline
        self._loop = asyncio.get_running_loop()
        self._last_moved = self._loop.time()
        self._next: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(self, *_: object) -> None:
        if self._next is not None:
            self._next.cancel()

    async def watch(self, blocks: AsyncIterator[_Block]) -> AsyncIterator[_Block]:
        """The same blocks; records the time whenever one passes."""
        async for block in blocks:
            self._last_moved = self._loop.time()
            yield block
            self._last_moved = self._loop.time()

    def _check(self) -> None:
        """Check now, and again soon, because the process's deadline may be set at any time."""
        allowed = self._seconds if self._deadline.remaining() > 0 else min(LAST_SECONDS, self._seconds)
        remaining = self._last_moved + allowed - self._loop.time()
        if remaining <= 0:
            self._timeout.reschedule(self._loop.time())
        else:
            self._next = self._loop.call_later(min(remaining, _CHECK_SECONDS), self._check)


def _require_file_of_credentials() -> None:
    """Refuse a pipe or a device, whose reading may never end, in place of the credentials file.

    Raises:
        OSError: it is one.
    """
    file = Path(os.environ.get(_CREDENTIALS) or ".")
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise OSError("it is not a regular file")


def _address(local_server: str) -> str:
    """The base of all URLs of a local server, whose host is known. A server that is not there yet is waited for."""
    address = local_server if "://" in local_server else f"http://{local_server}"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
        if parts.scheme not in _SCHEMES:
            why = f"does not begin with {' or '.join(f'{scheme}://' for scheme in _SCHEMES)}"
        elif not host:
            why = "has no host"
        else:
            socket.getaddrinfo(host, port)
            return address.rstrip("/")
    except (OSError, ValueError) as error:  # the name is unknown or malformed, or the port is no number
        why = f"is not the address of a server ({getattr(error, 'strerror', None) or error})"
    raise InvalidInput(f"{_LOCAL_SERVER}={local_server} {why}; set it to host:port, or unset it")
