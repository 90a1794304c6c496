"""The shard cache of the process, shared by training and validation in all its segments.

The environment variable BATON_CACHE_BYTES limits it, in bytes. The default is 8 GiB, or half of the free space in the
temporary folder (TMPDIR) if that is less. The limit is read when the first shard is opened.
"""

import atexit
import os
import shutil
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

from tasks.foundation.dataset.cache import ShardCache
from tasks.foundation.errors import InvalidInput, StorageError
from tasks.foundation.storage.local_files import temporary_folder

_BOUND_BYTES = 8 << 30
_VARIABLE = "BATON_CACHE_BYTES"

# At most one open cache: a process has one local disk, and its segments reuse what they downloaded.
_LOCK = threading.Lock()
_OPEN: list[tuple[ShardCache, ExitStack]] = []


def shared_cache() -> ShardCache:
    """Return the cache of this process. It is deleted at exit; after a kill, the next process deletes it.

    Raises:
        InvalidInput: BATON_CACHE_BYTES is not a number of bytes.
        StorageError: there is no writable temporary folder.
    """
    with _LOCK:
        if not _OPEN:
            with ExitStack() as stack:
                try:
                    folder = stack.enter_context(temporary_folder("baton-shards-"))
                    cache = ShardCache(folder, bound_bytes(folder))
                except OSError as fault:
                    raise StorageError(
                        f"there is no writable temporary folder for shards ({fault.strerror or fault}); set the "
                        "environment variable TMPDIR to a folder with free space"
                    ) from fault
                stack.callback(cache.close)
                _OPEN.append((cache, stack.pop_all()))
            atexit.register(close_shared_cache)
        return _OPEN[0][0]


def close_shared_cache() -> None:
    """Delete the cache of this process; the next `shared_cache` call creates another."""
    with _LOCK:
        atexit.unregister(close_shared_cache)
        while _OPEN:
            with suppress(OSError):
                _OPEN.pop()[1].close()


def bound_bytes(folder: Path) -> int:
    """Return the maximum number of bytes for a cache in `folder`.

    Raises:
        InvalidInput: BATON_CACHE_BYTES is not a number of bytes.
    """
    value = os.environ.get(_VARIABLE)
    if value is None:
        return min(_BOUND_BYTES, shutil.disk_usage(folder).free // 2)
    if not (value.isascii() and value.isdecimal() and int(value)):
        raise InvalidInput(
            f"{_VARIABLE}={value!r} is not a number of bytes; set it to a number such as {_BOUND_BYTES}, or unset it"
        )
    return int(value)
