"""memory://: a store within this process, through fsspec. For tests and trials."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fsspec.implementations.memory import MemoryFileSystem

from tasks.foundation.errors import FileAlreadyThere, FileMissing
from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.checksum import checksum_bytes
from tasks.foundation.storage.download import copy_blocks, local_target
from tasks.foundation.storage.path_guard import require_inside

# fsspec's memory file system is one for the process, and its create-only mode looks before it writes.
_LOCK = threading.Lock()


class MemoryStorage:
    """Files below a folder of fsspec's memory file system."""

    def __init__(self, root: str) -> None:
        self.root = "/" + root.strip("/")
        self._files = MemoryFileSystem()

    @property
    def uri(self) -> str:
        """Address, beginning with memory://."""
        return f"memory:/{self.root}"

    @property
    def transfers(self) -> int:
        """Nothing is waited for."""
        return 1

    def at(self, folder: str) -> "MemoryStorage":
        """The same, one folder down."""
        require_inside(folder, root=self.uri)
        return MemoryStorage(f"{self.root}/{folder}")

    def with_deadline(self, seconds: float) -> "MemoryStorage":  # noqa: ARG002
        """Nothing is waited for."""
        return self

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        try:
            return bytes(self._files.cat_file(self._full(path)))
        except (FileNotFoundError, IsADirectoryError) as fault:
            raise FileMissing(f"{self.uri}/{path} is not there") from fault

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        return bool(self._files.isfile(self._full(path)))

    def create(self, path: str, data: bytes) -> None:
        """See `Storage.create`."""
        with _LOCK:
            if self.exists(path):
                raise FileAlreadyThere(f"{self.uri}/{path} exists already")
            self._files.pipe_file(self._full(path), data)

    def write(self, path: str, data: bytes) -> None:
        """See `Storage.write`."""
        with _LOCK:
            self._files.pipe_file(self._full(path), data)

    def upload(self, source: Path, path: str) -> Stored:
        """See `Storage.upload`."""
        data = source.read_bytes()
        self.write(path, data)
        return checksum_bytes(data)

    def copy(self, path: str, target: str) -> None:
        """See `Storage.copy`."""
        self.write(target, self.read(path))

    def stat(self, path: str) -> Stored:
        """See `Storage.stat`."""
        return checksum_bytes(self.read(path))

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> Stored:
        """See `Storage.checksum`."""
        return copy_blocks([self.read(path)[begin:]], None, size, where=f"{self.uri}/{path}")

    def local_path(self, path: str) -> Path | None:  # noqa: ARG002 - nothing here is a file
        """See `Storage.local_path`."""
        return None

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> Stored:
        """See `Storage.download`."""
        data = self.read(path)[begin:]
        with local_target(target) as file:
            return copy_blocks([data], file, size, where=f"{self.uri}/{path}")

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        """See `Storage.read_range`."""
        return self.read(path)[begin : begin + size]

    def files(self, folder: str) -> Iterator[str]:
        """See `Storage.files`."""
        for path in self._found(folder):
            yield path.removeprefix(f"{self.root.rstrip('/')}/")

    def _found(self, folder: str) -> list[str]:
        while True:
            try:
                return list(self._files.find(self._full(folder)))
            except RuntimeError:  # others wrote while fsspec looked through its dictionary
                continue

    def folders(self, folder: str) -> Iterator[str]:
        """See `Storage.folders`."""
        above = f"{folder}/" if folder else ""
        below = {
            path.removeprefix(above).split("/")[0] for path in self.files(folder) if "/" in path.removeprefix(above)
        }
        yield from (f"{above}{name}" for name in sorted(below))

    def delete(self, folder: str) -> None:
        """See `Storage.delete`."""
        with _LOCK, suppress(FileNotFoundError):
            self._files.rm(self._full(folder), recursive=True)

    def probe(self) -> list[str]:
        """Nothing to ask: it is this process's own."""
        return []

    def _full(self, path: str) -> str:
        require_inside(path, root=self.uri)
        return f"{self.root.rstrip('/')}/{path}".rstrip("/")
