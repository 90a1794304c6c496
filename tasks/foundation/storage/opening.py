"""From an address to a store."""

import os
import re
from pathlib import Path

from tasks.foundation.errors import InvalidInput
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.memory import MemoryStorage

_SHOWN = 60
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_PREFIX_PART = re.compile(r"[\w.=+@ -]+")


def open_storage(address: str, *, relative_to: Path, fenced: bool = True) -> Storage:
    """The store at a folder name, file:// or memory:// address.

    Args:
        address: a folder, file://, memory:// or gs://bucket/prefix; a folder is taken relative to `relative_to`.
        relative_to: the run file's folder, or the working folder for an address typed at the command line.
        fenced: False for the user's own sources, which may have any names and be links to anywhere.

    Raises:
        InvalidInput: no store of that kind is known, or a file stands where the folder should be.
    """
    scheme, separator, rest = address.partition("://")
    if not separator or scheme == "file":
        return LocalStorage(_folder(rest if separator else address, relative_to), fenced=fenced)
    if scheme == "memory":
        return MemoryStorage(rest)
    if scheme == "gs":
        return _cloud(address, rest, fenced=fenced)
    raise InvalidInput(f"storage {address}: {scheme}:// is unknown; use a folder of this machine or gs://")


def _cloud(address: str, rest: str, *, fenced: bool) -> Storage:
    """A bucket and a prefix."""
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidInput(
            f"storage {address}: {bucket!r} is no name of a bucket (3 to 222 lower-case letters, digits, '-', '_' and "
            "'.'); write gs://bucket/prefix"
        )
    prefix = prefix.rstrip("/")
    parts = prefix.split("/") if prefix else []
    if not all(_PREFIX_PART.fullmatch(part) and part not in {".", ".."} for part in parts):
        raise InvalidInput(
            f"storage {address}: {prefix!r} is no prefix; use letters, digits, '-', '_', '.', '=' and '+' between the "
            "slashes, as in gs://bucket/team/runs"
        )
    from tasks.foundation.storage.gcs.storage import CloudStorage

    return CloudStorage(bucket, "/".join(parts), fenced=fenced)


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
