"""Telling damage on the way here from damage in the store."""

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import Storage, Stored

WHAT_TO_DO = "see to the network, to proxies and to this machine's memory, and run again"


def damaged_in_transit(where: str) -> StorageError:
    """The error for two reads of the same bytes that differ."""
    return StorageError(
        f"{where}: two reads brought different bytes, so they are damaged on the way here; {WHAT_TO_DO}"
    )


def require_damage_in_store(storage: Storage, path: str, expected: Stored) -> None:
    """Call this after two reads of a file that both brought other bytes than expected.

    The store's own size and checksum decide: if they are as expected, the file is sound, and bytes are damaged on the
    way here.

    Raises:
        StorageError: the file is sound.
        FileMissing: it is not there.
    """
    if storage.stat(path) == expected:
        raise StorageError(
            f"{storage.uri}/{path}: its bytes are damaged on the way here, twice now, while the store has them as they "
            f"were written (crc32c {expected.crc32c}). The file is sound; {WHAT_TO_DO}"
        )
