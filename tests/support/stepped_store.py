"""The calls of a writer in `interleaving.py`, and its store."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tasks.foundation.storage.interface import FileStat, Storage

if TYPE_CHECKING:
    from tests.support.interleaving import Execution

_CHANGING = {"create", "write", "write_buffers", "upload", "copy", "delete"}


class Call(NamedTuple):
    """A storage call that a writer is about to make.

    Attributes:
        verb: the method.
        path: what it touches.
        writer: number of the writer; None: no other call is of the same writer.
    """

    verb: str
    path: str
    writer: int | None = None

    @property
    def changes(self) -> bool:
        return self.verb in _CHANGING

    def meets(self, other: "Call") -> bool:
        """Whether the order of the two can matter."""
        if self.writer is not None and self.writer == other.writer:
            return True
        if not (self.changes or other.changes):
            return False
        one, two = f"{self.path}/".lstrip("/"), f"{other.path}/".lstrip("/")
        return one.startswith(two) or two.startswith(one)


class Stepped:
    """A store or a folder of it; every call waits for the writer's turn."""

    def __init__(self, execution: "Execution", number: int, folder: str = "") -> None:
        self._execution, self._number, self._folder = execution, number, folder
        self._store = execution.store.at(folder) if folder else execution.store

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def transfers(self) -> int:
        return 1

    def with_deadline(self, _seconds: float) -> Storage:
        return self

    def at(self, folder: str) -> Storage:
        return Stepped(self._execution, self._number, f"{self._folder}/{folder}".lstrip("/"))

    def trains(self) -> None:
        """Let the other threads of the writer run, and other writers, as training does."""
        self._execution.turn(Call("trains", f"memory of {self._number}", self._number))

    def read(self, path: str) -> bytes:
        self._turn("read", path)
        return self._store.read(path)

    def exists(self, path: str) -> bool:
        self._turn("exists", path)
        return self._store.exists(path)

    def create(self, path: str, data: bytes) -> None:
        call = self._turn("create", path)
        self._store.create(path, data)
        self._execution.finish_call(call)

    def write(self, path: str, data: bytes) -> None:
        self._turn("write", path)
        self._store.write(path, data)

    def upload(self, source: Path, path: str) -> FileStat:
        self._turn("upload", path)
        return self._store.upload(source, path)

    def write_buffers(self, path: str, buffers: Sequence[memoryview]) -> FileStat:
        self._turn("write_buffers", path)
        return self._store.write_buffers(path, buffers)

    def copy(self, path: str, target: str) -> None:
        # No writer changes the source of a copy.
        self._turn("copy", target)
        self._store.copy(path, target)

    def stat(self, path: str) -> FileStat:
        self._turn("stat", path)
        return self._store.stat(path)

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> FileStat:
        self._turn("checksum", path)
        return self._store.checksum(path, begin=begin, size=size)

    def local_path(self, path: str) -> Path | None:
        self._turn("local_path", path)
        return self._store.local_path(path)

    def download(self, path: str, target: Path, *, begin: int = 0, size: int | None = None) -> FileStat:
        self._turn("download", path)
        return self._store.download(path, target, begin=begin, size=size)

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        self._turn("read_range", path)
        return self._store.read_range(path, begin, size)

    def files(self, folder: str) -> Iterator[str]:
        self._turn("files", folder)
        return iter(list(self._store.files(folder)))

    def folders(self, folder: str) -> Iterator[str]:
        self._turn("folders", folder)
        return iter(list(self._store.folders(folder)))

    def delete(self, folder: str, *, files: Sequence[str] | None = None) -> None:
        self._turn("delete", folder)
        self._store.delete(folder, files=files)

    def probe(self, home: str = "") -> list[str]:  # noqa: ARG002
        return []

    def _turn(self, verb: str, path: str) -> Call:
        call = Call(verb, f"{self._folder}/{path}".lstrip("/"), self._number)
        self._execution.turn(call)
        return call
