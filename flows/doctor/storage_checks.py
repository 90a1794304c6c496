"""Check that the storage can be reached and written to."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from flows.doctor.finding import Finding
from flows.run import storage_of
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.errors import StorageError
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.local_files import temporary_folder

# Not a valid run name.
_PREFIX = ".baton-doctor-"
_PROBE = b"written by baton doctor, which deletes it again\n"


def check_storage(run: RunFile) -> Finding:
    """Write, read and delete a small file below the storage root; the finding's value is the `Storage`.

    Raises:
        InvalidInput: the address is not a supported storage.
        StorageError: the storage refuses or fails.
    """
    storage = storage_of(run)
    notes = storage.probe(run.spec.run)
    with scratch_folder(storage) as scratch:
        scratch.create("file", _PROBE)
        if scratch.read("file") != _PROBE:
            raise StorageError(f"{scratch.uri}/file: read back other bytes than were written; check this storage")
    text = f"{storage.uri}: wrote, read and deleted a file"
    # The value is a new object, because this one has cached a folder that no longer exists.
    value = storage_of(run)
    if notes:
        return Finding(check="storage", verdict="warn", text=text, remedy="; ".join(notes), value=value)
    return Finding(check="storage", verdict="pass", text=text, value=value)


@contextmanager
def scratch_folder(storage: Storage) -> Iterator[Storage]:
    """Make a temporary folder below the storage root, and delete it afterwards with all parents that it created.

    On a local disk the folder is locked, so that the next `baton doctor` can delete the folder of a killed one.
    """
    missing = _missing_folders(storage)
    name = f"{_PREFIX}{secrets.token_hex(8)}"
    try:
        with ExitStack() as locked:
            if isinstance(storage, LocalStorage):
                with suppress(OSError):  # the storage itself reports why it is not writable
                    storage.root.mkdir(parents=True, exist_ok=True)
                    name = locked.enter_context(temporary_folder(_PREFIX, within=storage.root)).name
            try:
                yield storage.at(name)
            finally:
                with suppress(StorageError):  # an error here must not hide the one that ended the check
                    storage.delete(name)
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _missing_folders(storage: Storage) -> list[Path]:
    """Return the local folders that writing would create: the root and its parents that do not exist yet."""
    if not isinstance(storage, LocalStorage):
        return []
    return [folder for folder in (storage.root, *storage.root.parents) if not folder.exists()]
