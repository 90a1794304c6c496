"""The interface to a store. It is small on purpose: Baton relies only on operations that every store has."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import Field

from tasks.foundation.contracts.base import Contract


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
            path: of the file.
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
