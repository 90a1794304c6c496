"""The one connection of this process to Cloud Storage, or to a local server that stands in for it."""

import os
import threading
import warnings
from functools import cache
from typing import Any

from tasks.foundation.storage.gcs.patience import Patience

# What Google's own client libraries listen to, too: the address of a local server.
LOCAL_SERVER = "STORAGE_EMULATOR_HOST"
_LOCK = threading.Lock()


def connect(patience: Patience) -> Any:
    """The process's gcsfs file system, made at the first call.

    Credentials are Google's usual defaults: GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`,
    or the service account that the machine runs as. A local server is asked without any.

    Args:
        patience: how long an answer may take.

    Raises:
        google.auth.exceptions.GoogleAuthError: there are no credentials.
    """
    with _LOCK:  # two threads must not ask for credentials at once
        return _connect(os.environ.get(LOCAL_SERVER) or None, patience.stall_seconds)


@cache
def _connect(local_server: str | None, stall_seconds: float) -> Any:
    if local_server is not None:
        # Read when gcsfs is imported. Without it, a plain gcsfs in the user's own code asks a local server for each
        # bucket's type, and waits a minute for the answer.
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        local_server = local_server if "://" in local_server else f"http://{local_server}"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"google\.api_core")  # the age of this Python
        import aiohttp
        from gcsfs.core import GCSFileSystem

    class Files(GCSFileSystem):  # type: ignore[misc]
        """gcsfs without its own retries: one place decides what is tried again, and for how long."""

        _request = GCSFileSystem._request.__wrapped__

    return Files(
        token="anon" if local_server is not None else "google_default",
        endpoint_url=local_server,
        requests_timeout=aiohttp.ClientTimeout(
            total=None, connect=stall_seconds, sock_connect=stall_seconds, sock_read=stall_seconds
        ),
        use_listings_cache=False,
        skip_instance_cache=True,
    )
