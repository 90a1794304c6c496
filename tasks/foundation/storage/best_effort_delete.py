"""Best-effort deletion of files that are no longer needed. A failed deletion never ends a run.

Deletion can fail for long: a hold on the bucket, a role without the permission to delete, a symbolic link in place of a
folder, or a file that NFS keeps because it is open somewhere. The first failure is logged, and later calls retry with
growing intervals.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.foundation.errors import StorageError, StoreUnreachable
from tasks.foundation.storage.base import Storage

_LOGGER = logging.getLogger(__name__)
_DEADLINE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Failure:
    attempts: int
    retry_at: int


# A module global on purpose: it limits warnings and retries to what one process needs. A new process starts fresh.
_FAILURES: dict[tuple[str, str], _Failure] = {}


def discard(storage: Storage, path: str, *, files: Sequence[str] | None = None, now: int | None = None) -> bool:
    """Delete a file or folder that is no longer needed.

    Args:
        storage: the store.
        path: relative to the storage's root.
        files: all files below the folder, if the caller has just listed them.
        now: a counter such as the number of commits of the run. After each failure, the interval before the next
            attempt doubles. Left out: every call tries.

    Returns:
        Whether it is gone.

    Raises:
        StoreUnreachable: this process was asked to stop, and the store does not respond.
    """
    if now is not None and is_postponed(storage, path, now=now):
        return False
    key = (storage.uri, path)
    previous = _FAILURES.get(key, _Failure(attempts=0, retry_at=0))
    try:
        storage.with_deadline(_DEADLINE_SECONDS).delete(path, files=files)
    except StoreUnreachable:
        raise
    except StorageError as error:
        _FAILURES[key] = _Failure(attempts=previous.attempts + 1, retry_at=(now or 0) + 2**previous.attempts)
        if previous.attempts == 0:
            _LOGGER.warning("%s/%s: cannot delete, will retry later: %s", storage.uri, path, error)
        return False
    _FAILURES.pop(key, None)
    return True


def is_postponed(storage: Storage, path: str, *, now: int) -> bool:
    """Whether earlier failures postpone the next attempt to delete; see `discard`."""
    previous = _FAILURES.get((storage.uri, path))
    return previous is not None and now < previous.retry_at
