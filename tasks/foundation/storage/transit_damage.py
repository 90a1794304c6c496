"""Distinguishes damage in transit from damage in the store."""

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import FileStat, Storage

REMEDY = "check the network, proxies and this machine's memory, and run again"


def damaged_in_transit(source: str) -> StorageError:
    """The error for two reads of the same bytes that differ."""
    return StorageError(f"{source}: two reads returned different bytes, so the data is damaged in transit; {REMEDY}")


def size_on_disk(storage: Storage, path: str) -> int | None:
    """Return the bytes of a file on a local disk without reading them; None in a remote store, which says them anyway.

    Raises:
        FileMissing: it does not exist.
    """
    local = storage.local_path(path)
    return None if local is None else local.stat().st_size


def require_damage_in_store(storage: Storage, path: str, expected: FileStat) -> None:
    """Call this after two reads of a file returned other bytes than expected.

    The store's own size and checksum decide: if they are as expected, the file is intact and the bytes are damaged in
    transit.

    Raises:
        StorageError: the file is intact.
        FileMissing: it does not exist.
    """
    if size_on_disk(storage, path) in {None, expected.size} and storage.stat(path) == expected:
        raise StorageError(
            f"{storage.uri}/{path}: damaged in transit, in two reads; the store has the right bytes "
            f"(crc32c {expected.crc32c}), so the file is intact; {REMEDY}"
        )
