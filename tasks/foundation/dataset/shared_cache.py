"""The cache of shards of this process: its segments, and training and validation, share it.

The environment variable BATON_CACHE_BYTES sets its bound, in bytes; without it, that is the smaller of 8 GiB and half
of what is free in the temporary folder (TMPDIR). It is looked at when the first shard is asked for.
"""

import atexit
import os
import shutil
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

from tasks.foundation.dataset.cache import ShardCache
from tasks.foundation.errors import InvalidInput, StorageError
from tasks.foundation.storage.temporary_files import temporary_folder

_BOUND_BYTES = 8 << 30
_VARIABLE = "BATON_CACHE_BYTES"

_LOCK = threading.Lock()
_OPEN: list[tuple[ShardCache, ExitStack]] = []


def shared_cache() -> ShardCache:
    """The cache of this process. It is removed when the process ends; after a kill, when the next one begins.

    Raises:
        InvalidInput: BATON_CACHE_BYTES is no number of bytes.
        StorageError: there is no temporary folder that can be written to.
    """
    with _LOCK:
        if not _OPEN:
            with ExitStack() as stack:
                try:
                    folder = stack.enter_context(temporary_folder("baton-shards-"))
                    cache = ShardCache(folder, bound_bytes(folder))
                except OSError as fault:
                    raise StorageError(
                        f"there is no temporary folder for shards ({fault.strerror or fault}); set the environment "
                        "variable TMPDIR to a folder with room"
                    ) from fault
                stack.callback(cache.close)
                _OPEN.append((cache, stack.pop_all()))
            atexit.register(close_shared_cache)
        return _OPEN[0][0]


def close_shared_cache() -> None:
    """Remove the cache of this process; whoever asks for a shard next makes another."""
    with _LOCK:
        atexit.unregister(close_shared_cache)
        while _OPEN:
            with suppress(OSError):
                _OPEN.pop()[1].close()


def bound_bytes(folder: Path) -> int:
    """What a cache in a folder may take.

    Raises:
        InvalidInput: BATON_CACHE_BYTES is no number of bytes.
    """
    said = os.environ.get(_VARIABLE)
    if said is None:
        return min(_BOUND_BYTES, shutil.disk_usage(folder).free // 2)
    if not (said.isascii() and said.isdecimal() and int(said)):
        raise InvalidInput(
            f"{_VARIABLE}={said!r} is no number of bytes; set it to one such as {_BOUND_BYTES}, or unset it"
        )
    return int(said)
