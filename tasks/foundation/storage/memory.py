"""memory://: a store within this process, through fsspec, for tests and experiments."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from fsspec.implementations.memory import MemoryFileSystem

from baton.tasks.foundation.contracts.home_files import refuse_unreadable, require_readable
from baton.tasks.foundation.errors import FileAlreadyThere, FileMissing
from baton.tasks.foundation.storage.interface import FileStat, require_inside
from baton.tasks.foundation.storage.transfers import checksum_bytes, copy_blocks, local_target

# A module global on purpose: fsspec has one memory file system per process, and its create-only mode is not atomic.
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
        """See `Storage.transfers`. Memory has no latency to hide."""
        return 1

    def at(self, folder: str) -> "MemoryStorage":
        """See `Storage.at`."""
        require_inside(folder, root=self.uri)
        return MemoryStorage(f"{self.root}/{folder}")

    def with_deadline(self, _seconds: float) -> "MemoryStorage":
        """See `Storage.with_deadline`. Memory never waits."""
        return self

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        data = self._content(path)
        require_readable(f"{self.uri}/{path}", data)
        return data

    def read_own(self, path: str) -> bytes:
        """See `Storage.read_own`. Only this process writes to its memory."""
        return self.read(path)

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        return bool(self._files.isfile(self._full(path)))

    def create(self, path: str, data: bytes) -> None:
        """See `Storage.create`."""
        refuse_unreadable(f"{self.uri}/{path}", data)
        with _LOCK:
            if self.exists(path):
                raise FileAlreadyThere(f"{self.uri}/{path} already exists")
            self._files.pipe_file(self._full(path), data)

    def write(self, path: str, data: bytes) -> None:
        """See `Storage.write`."""
        refuse_unreadable(f"{self.uri}/{path}", data)
        self._put(path, data)

    def _put(self, path: str, data: bytes) -> None:
        with _LOCK:
            self._files.pipe_file(self._full(path), data)

    def upload(self, source: Path, path: str) -> FileStat:
        """See `Storage.upload`."""
        data = source.read_bytes()
        self._put(path, data)
        return checksum_bytes(data)

    def write_buffers(self, path: str, buffers: Sequence[memoryview]) -> FileStat:
        """See `Storage.write_buffers`."""
        data = b"".join(buffers)
        self._put(path, data)
        return checksum_bytes(data)

    def copy(self, path: str, target: str) -> None:
        """See `Storage.copy`."""
        self._put(target, self._content(path))

    def stat(self, path: str) -> FileStat:
        """See `Storage.stat`."""
        return checksum_bytes(self._content(path))

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> FileStat:
        """See `Storage.checksum`."""
        return copy_blocks([self._content(path)[begin:]], None, size, source=f"{self.uri}/{path}")

    def local_path(self, _path: str) -> Path | None:
        """See `Storage.local_path`."""
        return None

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> FileStat:
        """See `Storage.download`."""
        data = self._content(path)[begin:]
        with local_target(target) as file:
            return copy_blocks([data], file, size, source=f"{self.uri}/{path}")

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        """See `Storage.read_range`."""
        return self._content(path)[begin : begin + size]

    def files(self, folder: str, *, deep: bool = True) -> Iterator[str]:
        """See `Storage.files`."""
        for found in self._found(folder):
            path = found.removeprefix(f"{self.root.rstrip('/')}/")
            if deep or "/" not in path.removeprefix(folder).strip("/"):
                yield path

    def _found(self, folder: str) -> list[str]:
        while True:
            try:
                return list(self._files.find(self._full(folder)))
            except RuntimeError:  # another thread wrote while fsspec iterated over its dictionary
                continue

    def folders(self, folder: str) -> Iterator[str]:
        """See `Storage.folders`."""
        parent = f"{folder}/" if folder else ""
        names = {
            path.removeprefix(parent).split("/")[0] for path in self.files(folder) if "/" in path.removeprefix(parent)
        }
        yield from (f"{parent}{name}" for name in sorted(names))

    def delete(self, folder: str, *, files: Sequence[str] | None = None) -> None:  # noqa: ARG002 - for remote stores
        """See `Storage.delete`."""
        with _LOCK, suppress(FileNotFoundError):
            self._files.rm(self._full(folder), recursive=True)

    def probe(self, home: str = "") -> list[str]:  # noqa: ARG002 - for local disks
        """See `Storage.probe`. There is nothing to check."""
        return []

    def _content(self, path: str) -> bytes:
        try:
            return bytes(self._files.cat_file(self._full(path)))
        except (FileNotFoundError, IsADirectoryError) as error:
            raise FileMissing(f"{self.uri}/{path} does not exist") from error

    def _full(self, path: str) -> str:
        require_inside(path, root=self.uri)
        return f"{self.root.rstrip('/')}/{path}".rstrip("/")
