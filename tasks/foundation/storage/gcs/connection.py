"""The connection of this process to Cloud Storage, or to a local server that stands in for it, and its retries.

One request is sent at a time and ends when it stalls. Which errors are worth another attempt, how long to wait between
attempts, and when to give up is a policy. Every wait is logged.
"""

import asyncio
import logging
import math
import os
import random
import socket
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from baton.tasks.foundation.errors import BatonError, InvalidInput, StorageError, StoreUnreachable
from baton.tasks.foundation.storage.gcs.refusals import may_end, refusal
from baton.tasks.foundation.storage.gcs.responses import (
    UNAUTHORIZED,
    BodyTooLarge,
    ChecksumMismatch,
    ErrorResponse,
    MalformedResponse,
    Response,
    message_of,
)
from baton.tasks.foundation.storage.transfers import LAST_SECONDS, PROCESS_DEADLINE, Deadline

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
_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, _FACTOR = 0.5, 30.0, 2.0
_MAX_UNAUTHORIZED, _MAX_MISMATCHES = 3, 4
_RESUMABLE = "what is committed stays; run the same command to continue"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to wait for the store.

    Attributes:
        total_seconds: from the first failure of an operation without progress until it gives up.
        stall_seconds: without a byte sent or received until a request is cancelled.
        first_wait_seconds: the longest wait before the second attempt; doubles with each further one.
        best_effort: `total_seconds` count from the first attempt, and waits are logged at debug level.
    """

    total_seconds: float = 300.0
    stall_seconds: float = 60.0
    first_wait_seconds: float = _FIRST_WAIT_SECONDS
    best_effort: bool = False

    def with_deadline(self, seconds: float) -> "RetryPolicy":
        """The same policy as best effort, for about `seconds`."""
        return replace(
            self,
            total_seconds=min(self.total_seconds, seconds),
            stall_seconds=min(self.stall_seconds, seconds),
            best_effort=True,
        )

    @classmethod
    def of_environment(cls) -> "RetryPolicy":
        """The default policy, with BATON_STORAGE_PATIENCE_SECONDS and BATON_STORAGE_STALL_SECONDS applied.

        Raises:
            InvalidInput: one of them is not a number above 0.
        """
        default = cls()
        return cls(
            total_seconds=_seconds("BATON_STORAGE_PATIENCE_SECONDS", default.total_seconds),
            stall_seconds=_seconds("BATON_STORAGE_STALL_SECONDS", default.stall_seconds),
        )


class Retry:
    """The retries of one operation: exponential backoff with full jitter and one time limit for all attempts.

    Source: "Exponential Backoff And Jitter" (Brooker, 2015). A wait beyond the limit is cut to the time that remains,
    and a last attempt follows.
    """

    def __init__(self, where: str, policy: RetryPolicy, *, deadline: Deadline = PROCESS_DEADLINE) -> None:
        """Prepare for the first attempt.

        Args:
            where: address of the object or bucket, for messages.
            policy: the limits.
            deadline: of the process; also the clock, and used to sleep.
        """
        self._where, self._policy, self._deadline = where, policy, deadline
        self._unauthorized = self._mismatches = 0
        self.reset()

    def reset(self) -> None:
        """Start counting attempts and time again, because the operation made progress."""
        self._began = self._deadline.now()
        # Best effort has one limit from the first attempt; everything else gets at least two attempts.
        self._until = self._began + self._policy.total_seconds if self._policy.best_effort else None
        self._attempts = 0

    def before_first_attempt(self) -> None:
        """Check that the store is worth a request.

        Raises:
            StoreUnreachable: this process was asked to stop, and the store has not responded since.
        """
        if self._deadline.store_unreachable:
            raise StoreUnreachable(f"{self._where}: stopping, and the store does not respond; {_RESUMABLE}")

    def wait_after(self, error: Exception) -> None:
        """Wait before the next attempt.

        Raises:
            StorageError: the error is permanent, or the time is used up.
        """
        refused = not self._is_worth_retrying(error)
        # What worked before may work again: a token expires while no new one can be had, a role is given back.
        was_allowed = self._deadline.has_written and not self._policy.best_effort
        if refused and not (was_allowed and may_end(error)):
            raise refusal(error, where=self._where) from error
        now = self._deadline.now()
        self._until = now + self._policy.total_seconds if self._until is None else self._until
        self._attempts += 1
        remaining = min(self._until - now, self._deadline.remaining())
        if remaining <= 0:
            raise self._give_up(error, now - self._began, refused=refused) from error
        longest = min(self._policy.first_wait_seconds * _FACTOR ** min(self._attempts - 1, 32), _LONGEST_WAIT_SECONDS)
        wait = min(random.uniform(0, longest), remaining)  # noqa: S311 - spreads clients out, guards nothing
        level = logging.DEBUG if self._policy.best_effort else logging.WARNING
        _LOGGER.log(
            level, "%s: %s; retrying in %.1f s (attempt %d)", self._where, message_of(error), wait, self._attempts + 1
        )
        self._deadline.sleep(wait)

    def _give_up(self, error: Exception, seconds: float, *, refused: bool) -> StorageError:
        attempts = f"{self._attempts} attempts" if self._attempts > 1 else "one attempt"
        if not self._deadline.is_set:
            gave_up = (
                f"gave up after {attempts} in {seconds:.1f} s (BATON_STORAGE_PATIENCE_SECONDS"
                f"={self._policy.total_seconds:g})"
            )
            if refused:
                return StorageError(f"{refusal(error, where=self._where)}; {gave_up}; {_RESUMABLE}")
            return StorageError(
                f"{self._where}: {message_of(error)}; {gave_up}; check the network and the store's status page, and "
                "run again"
            )
        if self._deadline.remaining() <= 0:
            self._deadline.mark_store_unreachable()
        fails = "refuses" if refused else "does not respond"
        return StoreUnreachable(
            f"{self._where}: stopping, and the store {fails} ({message_of(error)}; {attempts} in {seconds:.1f} s); "
            f"{_RESUMABLE}"
        )

    def _is_worth_retrying(self, error: Exception) -> bool:
        """Whether to retry; raises StorageError after repeated checksum mismatches."""
        if isinstance(error, ErrorResponse) and error.code == UNAUTHORIZED:
            # An access token may have just expired; rejected credentials stay rejected.
            self._unauthorized += 1
            cause = error.__cause__
            return self._unauthorized < _MAX_UNAUTHORIZED and (cause is None or getattr(cause, "retryable", False))
        if isinstance(error, ChecksumMismatch):
            self._mismatches += 1
            if self._mismatches == _MAX_MISMATCHES:
                raise StorageError(
                    f"{self._where}: {message_of(error)}, {self._mismatches} times; check the network and this "
                    "machine's memory, and run again"
                ) from error
        return is_transient(error)


def retrying(once: Callable[[], _T], retry: Retry) -> _T:
    """Call `once` until it succeeds.

    Raises:
        FileNotFoundError: the store responded with 404.
        FileExistsError: raised by `once`.
        StorageError: see `Retry.wait_after`.
    """
    retry.before_first_attempt()
    while True:
        try:
            return once()
        except (FileNotFoundError, FileExistsError, BatonError):
            raise
        except Exception as error:  # noqa: BLE001 - unknown errors become a StorageError
            retry.wait_after(error)


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    import aiohttp
    import google.auth.exceptions

    if isinstance(error, ErrorResponse):
        return error.is_transient
    if isinstance(error, google.auth.exceptions.GoogleAuthError):
        # A token server that is down does not mean that the credentials are wrong.
        return error.retryable or isinstance(error, google.auth.exceptions.TransportError)
    if isinstance(error, aiohttp.InvalidURL | aiohttp.ClientSSLError):
        return False
    # aiohttp reports an unreadable status line as code 400, so its codes are ignored.
    return isinstance(
        error, ChecksumMismatch | MalformedResponse | TimeoutError | ConnectionError | aiohttp.ClientError
    )


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidInput(f"{variable}={text} is not a number of seconds; set a number above 0, or unset it")
    return seconds
