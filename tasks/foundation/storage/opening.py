"""From an address to a store."""

import os
from pathlib import Path

from tasks.foundation.errors import InvalidInput
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.memory import MemoryStorage

_SHOWN = 60


def open_storage(address: str, *, relative_to: Path) -> Storage:
    """The store at a folder name, file:// or memory:// address.

    Args:
        address: a folder is taken relative to `relative_to`.
        relative_to: the run file's folder, or the working folder for an address typed at the command line.

    Raises:
        InvalidInput: no store of that kind is known, or a file stands where the folder should be.
    """
    scheme, separator, rest = address.partition("://")
    if not separator or scheme == "file":
        return LocalStorage(_folder(rest if separator else address, relative_to))
    if scheme == "memory":
        return MemoryStorage(rest)
    if scheme == "gs":
        raise InvalidInput(f"storage {address}: gs:// is not supported by this version; use a folder of this machine")
    raise InvalidInput(f"storage {address}: {scheme}:// is unknown; use a folder of this machine or gs://")


def _folder(address: str, relative_to: Path) -> Path:
    """An absolute folder that is there or can be made."""
    try:
        folder = (relative_to / Path(address).expanduser()).resolve()
        nearest = next(place for place in (folder, *folder.parents) if place.exists())
    except (OSError, ValueError, RuntimeError) as fault:
        shown = address if len(address) < _SHOWN else f"{address[:_SHOWN]}..."
        raise InvalidInput(f"storage {shown!r} is no folder name ({fault}); name a folder") from fault
    if not nearest.is_dir():
        raise InvalidInput(f"storage {address}: {nearest} is a file; name a folder")
    if nearest != folder and not os.access(nearest, os.W_OK | os.X_OK):
        raise InvalidInput(f"storage {address}: {nearest} does not let you make folders in it; name another folder")
    return folder
