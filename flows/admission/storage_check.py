"""The storage is tried out once for each command, before Prefect and TensorFlow are waited for."""

from tasks.foundation.storage.base import Storage

# Storage address -> notes for the user, kept until the flow in this process takes them.
_FOUND: dict[str, list[str]] = {}


def try_out(storage: Storage) -> None:
    """Check that runs can be kept there, and keep the notes for `notes_about`.

    Raises:
        StoreRefused: credentials, permissions or settings do not allow it.
    """
    _FOUND[storage.uri] = storage.probe()


def notes_about(storage: Storage) -> list[str]:
    """What the user should know about a storage. Tries it out, unless this command has done so before.

    Raises:
        StoreRefused: credentials, permissions or settings do not allow it.
    """
    found = _FOUND.pop(storage.uri, None)
    return storage.probe() if found is None else found
