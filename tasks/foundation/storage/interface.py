"""The interface to a store: small on purpose, because Baton relies only on operations that every store has.

Files below one root, named by plain relative paths. There is no rename and no append. Names in a run's home may come
from an untrusted author, so every store checks paths here before it touches a file; the user's own sources (data,
weights) may have any names and be links to anywhere, so their stores are opened with `guarded=False`.

A deletion of what is no longer needed is best effort (`discard`): it can fail for long (a hold on the bucket, a role
without the permission to delete, a link in place of a folder, a file that NFS keeps open) and never ends a run. So is
all other work after a commit that the next step does not need (`best_effort`): its failures, whatever they are, are
warnings.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import Field

from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.errors import BatonError, PathRefused, StorageError, StoreUnreachable
from baton.tasks.foundation.text import abridged, visible

_LOGGER = logging.getLogger(__name__)
_DEADLINE_SECONDS = 30.0
# Limits of file systems for one name, and of Cloud Storage for a whole path.
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 1024
_SHOWN_CHARS = 120
# Control characters, the backslash (a separator on some systems), and lone surrogates, which no file system accepts.
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]")


class FileStat(Contract):
    """Size and checksum of a file."""

    size: int = Field(ge=0, description="bytes")
    crc32c: str


class Storage(Protocol):
    """Files below one root. Paths are relative to it, with forward slashes.

    There is no rename and no append. Listings may be stale, so neither commits nor their readers depend on them.
    """

    @property
    def uri(self) -> str:
        """Address of the root, without a trailing slash."""

    @property
    def transfers(self) -> int:
        """The recommended number of parallel uploads or downloads."""

    def at(self, folder: str) -> "Storage":
        """The same store, rooted at a folder below this root."""

    def with_deadline(self, seconds: float) -> "Storage":
        """The same store for best effort: `seconds` limit all attempts of an operation, and waits are not logged."""

    def read(self, path: str) -> bytes:
        """Read a whole file. Only the user's own sources, whose stores are not guarded, may have any size.

        Raises:
            FileMissing: it does not exist.
            FileTooLarge: it is larger than any of its kind, see `home_files.py`; not more than that is read.
        """

    def read_own(self, path: str) -> bytes:
        """Read a whole file that only this user can have written, such as code that is going to run.

        Raises:
            ForeignFile: on a local disk, another user id owns the root, the file or a folder between them, or may write
                to it; in a bucket, always.
            FileMissing: it does not exist.
        """

    def exists(self, path: str) -> bool:
        """Whether `path` is a file; False for a folder."""

    def create(self, path: str, data: bytes) -> None:
        """Write a file that must not exist yet, atomically. It is durable on return.

        Raises:
            FileAlreadyThere: it exists. An earlier attempt of this process may have written it.
            FileTooLarge: no reader would read it.
        """

    def write(self, path: str, data: bytes) -> None:
        """Write or replace a file. Readers see either the old bytes or the new ones.

        Raises:
            FileTooLarge: no reader would read it.
        """

    def upload(self, source: Path, path: str) -> FileStat:
        """Copy a local file to `path`, replacing an existing file.

        Returns:
            Size and checksum of the bytes read from `source`.
        """

    def write_buffers(self, path: str, buffers: Sequence[memoryview]) -> FileStat:
        """Write one large file from memory, replacing an existing file. It is durable on return.

        The store is known to hold these bytes on return: a local disk is read again and compared, Cloud Storage reports
        the checksum of what arrived.

        Args:
            buffers: its content, contiguous bytes each. They must not change meanwhile.

        Returns:
            Size and checksum of the bytes.

        Raises:
            StorageError: the store refused or failed, or holds other bytes.
        """

    def copy(self, path: str, target: str) -> None:
        """Copy a file to `target`, replacing an existing file. It is durable on return.

        The bytes stay within the store: a hard link on a local disk, a copy inside the bucket on Cloud Storage.

        Raises:
            FileMissing: `path` does not exist.
        """

    def stat(self, path: str) -> FileStat:
        """Size and checksum according to the store.

        Raises:
            FileMissing: it does not exist.
        """

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> FileStat:
        """Read a file, or `size` bytes from offset `begin`, and compute size and checksum of what arrives.

        Raises:
            FileMissing: it does not exist.
            FileTooShort: it ends before begin + size.
        """

    def local_path(self, path: str) -> Path | None:
        """Path of the file on this machine, for libraries that need one; None in a remote store. Do not write to it.

        Raises:
            FileMissing: the store is local and the file does not exist.
        """

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> FileStat:
        """Copy a file, or `size` bytes from offset `begin`, to a local file. Memory does not grow with its size.

        Returns:
            Size and checksum of the bytes that arrived, for the caller to verify.

        Raises:
            FileMissing: it does not exist.
            FileTooShort: it ends before begin + size.
            StorageError: the store, or the local disk, refused or failed.
        """

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        """Read at most `size` bytes from offset `begin`; fewer if the file ends before.

        Raises:
            FileMissing: it does not exist.
        """

    def files(self, folder: str, *, deep: bool = True) -> Iterator[str]:
        """Paths of all files below `folder`, in any order; none if it does not exist.

        Args:
            folder: where to look.
            deep: also in the folders in it; otherwise only its own files.
        """

    def folders(self, folder: str) -> Iterator[str]:
        """Paths of the folders directly below `folder`, in any order, including those with unfinished files only."""

    def delete(self, folder: str, *, files: Sequence[str] | None = None) -> None:
        """Delete a file, or a folder with all its files. Does nothing if it does not exist.

        Args:
            folder: the file or folder.
            files: all files below the folder, if the caller has just listed them; a remote store then lists none.
        """

    def probe(self, home: str = "") -> list[str]:
        """Check early that files can be created, read and deleted. Leaves nothing behind.

        Args:
            home: a run's folder, whose folders must be writable too as far as they exist; left out: none.

        Returns:
            Warnings about this store for the user.

        Raises:
            StoreRefused: credentials, permissions or the store's settings do not allow it.
        """


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


# As `_FAILURES`: what has failed and was said, by store.
_SAID: set[tuple[str, str]] = set()


@contextmanager
def best_effort(storage: Storage, problem: str, *, then: str) -> Iterator[None]:
    """Do work that no step of the training needs. A failure is one warning, until the work succeeds again.

    Args:
        problem: what a failure means, as "log/HINT could not be written".
        then: what comes of it, and when it is tried again.
    """
    said = (storage.uri, problem)
    try:
        yield
    except Exception as fault:  # noqa: BLE001 - whatever fails here must not end a training
        if said not in _SAID:
            _SAID.add(said)
            why = str(fault) if isinstance(fault, BatonError) else f"{type(fault).__name__}: {fault}"
            _LOGGER.warning("%s, which no training needs; %s: %s", problem, then, why)
    else:
        _SAID.discard(said)


def is_inside(path: str) -> bool:
    """Whether a path stays below its root, by its text only; "" is the root itself."""
    if not path:
        return True
    parts = path.split("/")
    return (
        not _FORBIDDEN.search(path)
        and not any(part in {"", ".", ".."} for part in parts)
        and len(path.encode()) <= _MAX_PATH_BYTES
        and all(len(part.encode()) <= _MAX_NAME_BYTES for part in parts)
    )


def require_inside(path: str, *, root: str) -> None:
    """Refuse everything but plain relative paths.

    Raises:
        PathRefused: it is absolute, has "..", empty parts, backslashes or control characters, or is too long.
    """
    if not is_inside(path):
        raise PathRefused(
            f"{root}: {abridged(visible(path), _SHOWN_CHARS)!r} is not a path below this folder (absolute, with '..', "
            "'\\', control characters, or too long); Baton did not write the files that name it, or they were changed: "
            "do not use them unless you trust their origin"
        )
