"""Deleting what nobody needs any more, as best effort: what cannot be deleted ends no run.

A hold of the bucket, a role without the permission to delete, a symbolic link in the place of a folder, or a file that
NFS keeps while somebody has it open: said once, and tried again later, each time after a longer while.
"""

import logging
from dataclasses import dataclass

from tasks.foundation.errors import StorageError, StoreUnreachable
from tasks.foundation.storage.base import Storage

_LOGGER = logging.getLogger(__name__)
_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Failed:
    tries: int
    again_at: int


# Of this process: a later one begins with a try of its own.
_FAILED: dict[tuple[str, str], _Failed] = {}


def discard(storage: Storage, path: str, *, now: int | None = None) -> bool:
    """Delete a file or a folder that is no longer needed.

    Args:
        storage: where it lies.
        path: relative to the storage's root.
        now: what counts up, such as the commits of the run: after each failure twice as much has to pass before the
            next try. Left out: it is tried each time.

    Returns:
        Whether it is gone.

    Raises:
        StoreUnreachable: this process was asked to go, and the store is away.
    """
    key = (storage.uri, path)
    before = _FAILED.get(key, _Failed(tries=0, again_at=0))
    if now is not None and now < before.again_at:
        return False
    try:
        storage.with_deadline(_SECONDS).delete(path)
    except StoreUnreachable:
        raise
    except StorageError as fault:
        _FAILED[key] = _Failed(tries=before.tries + 1, again_at=(now or 0) + 2**before.tries)
        if before.tries == 0:
            where = f"{storage.uri}/{path}"
            _LOGGER.warning(
                "%s is no longer needed and cannot be deleted, which is tried again later: %s", where, fault
            )
        return False
    _FAILED.pop(key, None)
    return True
