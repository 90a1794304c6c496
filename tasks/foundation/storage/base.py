"""The interface to a store. Small on purpose: what it cannot do, no protocol may rely on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from pydantic import Field

from tasks.foundation.contracts.base import Contract


class Stored(Contract):
    """What the store says about a file."""

    size: int = Field(ge=0, description="bytes")
    crc32c: str


class Storage(Protocol):
    """Files below one root. Paths are relative to it, with forward slashes.

    There is no rename and no append. A listing may be late: no commit, and no reading of one, depends on it.
    """

    @property
    def uri(self) -> str:
        """Address of the root, without a trailing slash."""

    @property
    def transfers(self) -> int:
        """How many uploads or downloads are worth doing side by side."""

    def at(self, folder: str) -> "Storage":
        """The same store, rooted at a folder below this root."""

    def with_deadline(self, seconds: float) -> "Storage":
        """The same store for best effort: one deadline of `seconds` for all tries of an operation, not logged."""

    def read(self, path: str) -> bytes:
        """The whole file.

        Raises:
            FileMissing: it is not there.
        """

    def exists(self, path: str) -> bool:
        """Whether there is a file (not a folder) at `path`."""

    def create(self, path: str, data: bytes) -> None:
        """Write a file that must not be there yet, all or nothing, durable on return.

        Raises:
            FileAlreadyThere: somebody, perhaps this process in an earlier try, wrote it before.
        """

    def write(self, path: str, data: bytes) -> None:
        """Write or replace a file. Readers see the old bytes or the new ones."""

    def upload(self, source: Path, path: str) -> Stored:
        """Copy a local file to `path`, replacing what is there; says what was read from `source`."""

    def copy(self, path: str, target: str) -> None:
        """Have the content of `path` at `target` too, replacing what is there, durable on return.

        The bytes stay within the store: a hard link on a local disk, a copy inside the bucket on Cloud Storage.

        Raises:
            FileMissing: there is nothing at `path`.
        """

    def stat(self, path: str) -> Stored:
        """Size and checksum as the store has them.

        Raises:
            FileMissing: it is not there.
        """

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> Stored:
        """Size and checksum of a file, or of `size` bytes of it from `begin` on, as they arrive here: reads them.

        Raises:
            FileMissing: it is not there.
            FileTooShort: it ends before begin + size.
        """

    def local_path(self, path: str) -> Path | None:
        """Where the file lies on this machine, for readers that need one; None if it is elsewhere. Do not write to it.

        Raises:
            FileMissing: it is not there, if it should lie on this machine.
        """

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> Stored:
        """Copy a file, or `size` bytes of it from `begin` on, to a local file; memory does not grow with its size.

        Returns:
            Size and checksum of the bytes as they arrived: for the caller to compare.

        Raises:
            FileMissing: it is not there.
            FileTooShort: it ends before begin + size.
            StorageError: the store, or the local disk, refused or failed.
        """

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        """At most `size` bytes from `begin` on; fewer where the file ends.

        Raises:
            FileMissing: it is not there.
        """

    def files(self, folder: str) -> Iterator[str]:
        """Paths of all files below `folder`, in no particular order; none if it is not there."""

    def folders(self, folder: str) -> Iterator[str]:
        """Paths of the folders directly below `folder`, also of those that hold nothing finished; in no order."""

    def delete(self, folder: str) -> None:
        """Delete a file, or a folder with all that is below it; nothing happens if it is not there."""

    def probe(self) -> list[str]:
        """See early whether files can be made, read and deleted here; leaves nothing behind.

        Returns:
            What the user should know about this store.

        Raises:
            StoreRefused: credentials, permissions or the store's settings do not allow it.
        """
