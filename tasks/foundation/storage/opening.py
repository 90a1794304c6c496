"""Opens the store at an address, and that of a shard."""

import os
import re
from pathlib import Path

from baton.tasks.foundation.contracts.dataset import ShardRecord
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.text import abridged

_SHOWN_CHARS = 60
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_PREFIX_PART = re.compile(r"[\w.=+@ -]+")


def open_storage(address: str, *, relative_to: Path, guarded: bool = True) -> Storage:
    """Open a store. Nothing is read or written.

    Args:
        address: a folder, file://, memory:// or gs://bucket/prefix. A folder may be relative to `relative_to`.
        relative_to: the run file's folder, or the working folder for an address from the command line.
        guarded: whether to refuse unusual names, and links that leave the root. False for the user's own sources.

    Raises:
        InvalidInput: the scheme is unknown, the address is malformed, or a file is in place of the folder.
    """
    scheme, separator, rest = address.partition("://")
    if not separator or scheme == "file":
        return LocalStorage(_folder(rest if separator else address, relative_to), guarded=guarded)
    if scheme == "memory":
        return MemoryStorage(rest)
    if scheme == "gs":
        return _cloud(address, rest, guarded=guarded)
    raise InvalidInput(f"storage {address}: {scheme}:// is unknown; use a local folder or gs://")


def open_home(address: str, *, relative_to: Path) -> tuple[Storage, Storage]:
    """Open a run's home, and the storage root that holds it. Nothing is read or written.

    A local home may be a link, to a larger disk for example. Its storage is where the address names it, as it is for
    the run file that began the run, and not where the link leads.

    Args:
        address: see `open_storage`.
        relative_to: the working folder.

    Returns:
        The root and the home.

    Raises:
        InvalidInput: see `open_storage`.
    """
    home = open_storage(address, relative_to=relative_to)
    if not isinstance(home, LocalStorage):
        above = home.uri.rpartition("/")[0]
        return open_storage(f"{above}/" if above.endswith(":/") else above, relative_to=relative_to), home
    named = relative_to / Path(address.removeprefix("file://")).expanduser()
    if named.name in {"", ".."}:
        named = home.root
    root = LocalStorage(named.parent.resolve())
    return root, LocalStorage(root.root / named.name)


def locate_shard(storage: Storage, record: ShardRecord) -> tuple[Storage, str]:
    """Return the store of a shard, and its path there.

    Args:
        storage: store rooted at the dataset's folder.
    """
    if not record.is_external:
        return storage, record.path
    folder, _, name = record.path.rpartition("/")
    return open_storage(folder or "/", relative_to=Path("/"), guarded=False), name


def _cloud(address: str, rest: str, *, guarded: bool) -> Storage:
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidInput(
            f"storage {address}: {bucket!r} is not a valid bucket name (3 to 222 lower-case letters, digits, '-', '_' "
            "and '.'); write gs://bucket/prefix"
        )
    prefix = prefix.rstrip("/")
    parts = prefix.split("/") if prefix else []
    if not all(_PREFIX_PART.fullmatch(part) and part not in {".", ".."} for part in parts):
        raise InvalidInput(
            f"storage {address}: {prefix!r} is not a valid prefix; use letters, digits, '-', '_', '.', '=' and '+' "
            "between the slashes, as in gs://bucket/team/runs"
        )
    from baton.tasks.foundation.storage.gcs.storage import CloudStorage

    return CloudStorage(bucket, "/".join(parts), guarded=guarded)


def _folder(address: str, relative_to: Path) -> Path:
    """The absolute path of a folder that exists or can be created."""
    try:
        folder = (relative_to / Path(address).expanduser()).resolve()
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
    except (OSError, ValueError, RuntimeError) as error:
        shown = abridged(address, _SHOWN_CHARS)
        raise InvalidInput(f"storage {shown!r} is not a valid folder name ({error}); name a folder") from error
    if not nearest.is_dir():
        raise InvalidInput(f"storage {address}: {nearest} is a file; name a folder")
    if nearest != folder and not os.access(nearest, os.W_OK | os.X_OK):
        raise InvalidInput(f"storage {address}: no permission to create folders in {nearest}; name another folder")
    return folder
