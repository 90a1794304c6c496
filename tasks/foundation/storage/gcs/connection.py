"""The one connection of this process to Cloud Storage, or to a local server that stands in for it."""

import asyncio
import os
import threading
import warnings
from collections.abc import AsyncIterator, Mapping
from functools import cache
from typing import Any, Self

from tasks.foundation.errors import InvalidInput
from tasks.foundation.storage.deadline import LAST_SECONDS, LEAVING, Deadline
from tasks.foundation.storage.gcs.responses import Answer

# What Google's own client libraries listen to, too: the address of a local server.
LOCAL_SERVER = "STORAGE_EMULATOR_HOST"
_LOCK = threading.Lock()
# What is in memory of a body that goes up, besides what the connection holds.
BLOCK_BYTES = 1 << 20
_LOOK_SECONDS = 0.5


def connect() -> Any:
    """The process's gcsfs file system, made at the first call; it has one method more, `ask`.

    Credentials are Google's usual defaults: GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`,
    or the service account that the machine runs as. A local server is asked without any.

    Raises:
        google.auth.exceptions.GoogleAuthError: there are no credentials.
        OSError: their file cannot be read.
        InvalidInput: the local server's address is none.
    """
    with _LOCK:  # two threads must not ask for credentials at once
        return _connect(os.environ.get(LOCAL_SERVER) or None)


@cache
def _connect(local_server: str | None) -> Any:
    if local_server is not None:
        # Read when gcsfs is imported. Without it, a plain gcsfs in the user's own code asks a local server for each
        # bucket's type, and waits a minute for the answer.
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        local_server = _address(local_server)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"google\.api_core")  # the age of this Python
        import aiohttp
        from fsspec.asyn import sync_wrapper
        from gcsfs.core import GCSFileSystem

    no_limits = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)

    class Files(GCSFileSystem):  # type: ignore[misc]
        """gcsfs for addresses and credentials, with an own way to ask.

        gcsfs would try again by itself and silently, lose the store's words, follow redirects, unpack what is stored
        packed, and wait without end where a body is not taken.
        """

        async def _ask(
            self,
            method: str,
            path: str,
            *names: str,
            stall_seconds: float,
            headers: Mapping[str, str] | None = None,
            json: Any = None,
            data: bytes | AsyncIterator[bytes] | None = None,
            **parameters: str | int | None,
        ) -> Answer:
            """One request; any answer is returned.

            Args:
                method: of HTTP.
                path: below the JSON API, with {} for names; or a whole address.
                names: are quoted and put into the path.
                stall_seconds: how long nothing may move, in either direction.
                headers: besides those that credentials need.
                json: a body.
                data: a body.
                parameters: of the query; None is left out.
            """
            await self._set_session()
            size = {"Content-Length": str(len(data))} if isinstance(data, bytes) else {}
            # Checksums are of the bytes as they are stored: nothing may be packed or unpacked on the way.
            more = {"Accept-Encoding": "identity", **(headers or {}), **size}
            async with asyncio.timeout(None) as limit:
                with _Watch(limit, stall_seconds, LEAVING) as watch:
                    async with self.session.request(
                        method,
                        self._format_path(path, names),
                        params=self._get_params(parameters),
                        json=json,
                        headers=self._get_headers(more),
                        data=None if data is None else watch.each(_blocks(data) if isinstance(data, bytes) else data),
                        allow_redirects=False,
                        auto_decompress=False,
                        timeout=no_limits,
                    ) as answer:
                        contents = [block async for block in watch.each(answer.content.iter_any())]
                        return Answer(answer.status, answer.headers, b"".join(contents))

        ask = sync_wrapper(_ask)

    return Files(
        token="anon" if local_server is not None else "google_default",
        endpoint_url=local_server,
        use_listings_cache=False,
        skip_instance_cache=True,
    )


class _Watch:
    """Cancels a request when no bytes have moved for too long; after the deadline of the process that is sooner."""

    def __init__(self, limit: asyncio.Timeout, seconds: float, leaving: Deadline) -> None:
        self._limit, self._seconds, self._leaving = limit, seconds, leaving
        self._loop = asyncio.get_running_loop()
        self._moved = self._loop.time()
        self._next: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._look()
        return self

    def __exit__(self, *_: object) -> None:
        if self._next is not None:
            self._next.cancel()

    async def each(self, blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The blocks; notes the time whenever one passes."""
        async for block in blocks:
            self._moved = self._loop.time()
            yield block
            self._moved = self._loop.time()

    def _look(self) -> None:
        """Check, and check again soon: the deadline of the process may be set at any time."""
        allowed = self._seconds if self._leaving.left() > 0 else min(LAST_SECONDS, self._seconds)
        left = self._moved + allowed - self._loop.time()
        if left <= 0:
            self._limit.reschedule(self._loop.time())
        else:
            self._next = self._loop.call_later(min(left, _LOOK_SECONDS), self._look)


async def _blocks(data: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), BLOCK_BYTES):
        yield data[begin : begin + BLOCK_BYTES]


def _address(local_server: str) -> str:
    address = local_server if "://" in local_server else f"http://{local_server}"
    if not address.partition("://")[2].strip("/"):
        raise InvalidInput(f"{LOCAL_SERVER}={local_server} names no server; set host:port, or unset it")
    return address.rstrip("/")
