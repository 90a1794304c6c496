"""The one connection of this process to Cloud Storage, or to a local server that stands in for it."""

import asyncio
import os
import threading
import warnings
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

from tasks.foundation.errors import InvalidInput
from tasks.foundation.storage.gcs.answers import Answered

# What Google's own client libraries listen to, too: the address of a local server.
LOCAL_SERVER = "STORAGE_EMULATOR_HOST"
_LOCK = threading.Lock()
# What is in memory of a body that goes up, besides what the connection holds.
BLOCK_BYTES = 1 << 20


def connect(stall_seconds: float) -> Any:
    """The process's gcsfs file system, made at the first call.

    Credentials are Google's usual defaults: GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`,
    or the service account that the machine runs as. A local server is asked without any.

    Args:
        stall_seconds: how long a connection may stand still, in either direction.

    Raises:
        google.auth.exceptions.GoogleAuthError: there are no credentials.
        OSError: their file cannot be read.
        InvalidInput: the local server's address is none.
    """
    with _LOCK:  # two threads must not ask for credentials at once
        return _connect(os.environ.get(LOCAL_SERVER) or None, stall_seconds)


@cache
def _connect(local_server: str | None, stall_seconds: float) -> Any:
    if local_server is not None:
        # Read when gcsfs is imported. Without it, a plain gcsfs in the user's own code asks a local server for each
        # bucket's type, and waits a minute for the answer.
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        local_server = _address(local_server)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"google\.api_core")  # the age of this Python
        import aiohttp
        from gcsfs.core import GCSFileSystem

    limits = aiohttp.ClientTimeout(
        total=None, connect=stall_seconds, sock_connect=stall_seconds, sock_read=stall_seconds
    )

    class Files(GCSFileSystem):  # type: ignore[misc]
        """gcsfs for addresses and credentials, with an own way to ask.

        gcsfs would try again by itself and silently, lose the store's words, follow a 308 that is no redirect, and wait
        without end where a body is not taken.
        """

        async def _request(
            self,
            method: str,
            path: str,
            *args: str,
            headers: Any = None,
            json: Any = None,
            data: Any = None,
            **more: Any,
        ) -> tuple[int, Any, Any, bytes]:
            await self._set_session()
            async with asyncio.timeout(None) as limit:
                body = None if data is None else _watched(data, limit, stall_seconds)
                size = {"Content-Length": str(len(data))} if isinstance(data, bytes) else {}
                async with self.session.request(
                    method,
                    self._format_path(path, args),
                    params=self._get_params(more),
                    json=json,
                    headers=self._get_headers({**(headers or {}), **size}),
                    data=body,
                    allow_redirects=False,
                    timeout=limits,
                ) as answer:
                    contents = await answer.read()
                    if answer.status >= 400:  # noqa: PLR2004 - HTTP's errors
                        raise Answered(answer.status, contents)
                    return answer.status, answer.headers, answer.request_info, contents

    return Files(
        token="anon" if local_server is not None else "google_default",
        endpoint_url=local_server,
        use_listings_cache=False,
        skip_instance_cache=True,
    )


async def _watched(data: bytes | AsyncIterator[bytes], limit: asyncio.Timeout, seconds: float) -> AsyncIterator[bytes]:
    """A body, block by block; the request is given up if one of them is not taken in time."""
    blocks = _blocks(data) if isinstance(data, bytes) else data
    clock = asyncio.get_running_loop().time
    async for block in blocks:
        limit.reschedule(clock() + seconds)
        yield block
    limit.reschedule(None)  # from here on the answer is waited for, which has a limit of its own


async def _blocks(data: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), BLOCK_BYTES):
        yield data[begin : begin + BLOCK_BYTES]


def _address(local_server: str) -> str:
    address = local_server if "://" in local_server else f"http://{local_server}"
    if not address.partition("://")[2].strip("/"):
        raise InvalidInput(f"{LOCAL_SERVER}={local_server} names no server; set host:port, or unset it")
    return address.rstrip("/")
