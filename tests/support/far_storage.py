"""A remote store with shards: it records its calls, and hooks make them wait, fail or return other bytes."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from baton.tasks.foundation.contracts.dataset import ShardRecord
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.transfers import checksum_bytes

# Seconds; only a failing test waits this long.
PATIENCE = 30


class FarStorage:
    """Forwards every call to another store, which has no local files.

    Attributes:
        calls: (method, path) of each call, in the order in which they began.
        done: the same for calls that took effect.
        before: called with method and path before each call.
        after: called with both after each call that succeeded.
    """

    def __init__(
        self, inner: Storage, *, transfers: int = 4, top: "FarStorage | None" = None, folder: str = ""
    ) -> None:
        self.inner = inner
        self.transfers = transfers
        self.calls: list[tuple[str, str]] = []
        self.done: list[tuple[str, str]] = []
        self.before: Callable[[str, str], object] = _nothing
        self.after: Callable[[str, str], object] = _nothing
        self._top = top or self
        self._folder = folder

    def at(self, folder: str) -> "FarStorage":
        below = f"{self._folder}{folder}/"
        return FarStorage(self.inner.at(folder), transfers=self.transfers, top=self._top, folder=below)

    def of(self, method: str) -> list[str]:
        """Names of the files that a method was called for."""
        return [path.rpartition("/")[2] for name, path in self.calls if name == method]

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        if not callable(attribute):
            return attribute

        def recorded(*args: Any, **kwargs: Any) -> Any:
            named = args[1:] if name == "upload" else args  # a probe names no file
            path = f"{self._folder}{named[0] if named else ''}"
            self._top.calls.append((name, path))
            self._top.before(name, path)
            result = attribute(*args, **kwargs)
            self._top.done.append((name, path))
            self._top.after(name, path)
            return result

        return recorded


class FailOnce:
    """A hook: the first download of a file fails."""

    def __init__(self, name: str, fault: BaseException) -> None:
        self.name = name
        self.faults = [fault]

    def __call__(self, method: str, path: str) -> None:
        if method == "download" and path.endswith(self.name) and self.faults:
            raise self.faults.pop()


class Gate:
    """A hook: downloads of a file wait until the gate opens."""

    def __init__(self, name: str, patience: float | None = PATIENCE) -> None:
        self.name = name
        self.patience = patience
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, method: str, path: str) -> None:
        if method == "download" and path.endswith(self.name):
            self.reached.set()
            assert self.open.wait(self.patience)


def put_shards(store: FarStorage, sizes: Sequence[int]) -> list[ShardRecord]:
    """Write shards s0, s1, … of these sizes in bytes, each with other content."""
    records = []
    for index, size in enumerate(sizes):
        store.inner.write(f"s{index}", content(index, size))
        stored = checksum_bytes(content(index, size))
        records.append(ShardRecord(path=f"s{index}", examples=1, size=stored.size, crc32c=stored.crc32c))
    return records


def content(index: int, size: int) -> bytes:
    return (f"{index}:".encode() * size)[:size]


def contents(records: Sequence[ShardRecord]) -> list[bytes]:
    return [content(int(record.path[1:]), record.size) for record in records]


def read(paths: Sequence[str]) -> list[bytes]:
    return [Path(path).read_bytes() for path in paths]


def wait_for_threads() -> None:
    """Wait until all downloads in the background have ended."""
    for thread in threading.enumerate():
        if thread.name == "baton-fetch":
            thread.join(PATIENCE)
            assert not thread.is_alive()


def bytes_below(folder: Path) -> int:
    """Total size of the files below a folder, without those of AutoGraph; files may be deleted meanwhile."""
    return sum(_size(path) for path in folder.rglob("*") if not path.name.startswith("__autograph_generated_file"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def _nothing(_name: str, _path: str) -> None:
    pass
