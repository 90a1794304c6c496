"""From an address to a store."""

from pathlib import Path

from tasks.foundation.errors import InvalidInput
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.memory import MemoryStorage


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
        folder = (relative_to / (rest if separator else address)).expanduser().resolve()
        if folder.exists() and not folder.is_dir():
            raise InvalidInput(f"storage {address}: {folder} is a file; name a folder")
        return LocalStorage(folder)
    if scheme == "memory":
        return MemoryStorage(rest)
    if scheme == "gs":
        raise InvalidInput(f"storage {address}: gs:// is not supported by this version; use a folder of this machine")
    raise InvalidInput(f"storage {address}: {scheme}:// is unknown; use a folder of this machine or gs://")
