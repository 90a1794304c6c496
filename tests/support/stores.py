"""Fixtures: stores for the home of a run."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.rival_writers import Scene


@pytest.fixture
def memory() -> Iterator[MemoryStorage]:
    store = MemoryStorage(f"log-{uuid.uuid4().hex}")
    yield store
    for path in [path for path in MemoryFileSystem.store if path.startswith(f"{store.root}/")]:
        del MemoryFileSystem.store[path]  # deleting 10,000 files through fsspec takes a while


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, memory: MemoryStorage, tmp_path: Path) -> Storage:
    return memory if request.param == "memory" else LocalStorage(tmp_path / "home")


@pytest.fixture(params=["memory", "file"])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """The home of a run, in memory and on a disk."""
    if request.param == "memory":
        memory = MemoryStorage(f"interleavings-{uuid.uuid4().hex}")
        yield memory
        memory.delete("")
        return
    # The order of calls does not depend on fsync, which takes most of the time.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    shared_memory = Path("/dev/shm")  # noqa: S108 - a fast file system
    folder = tempfile.mkdtemp(dir=shared_memory if os.access(shared_memory, os.W_OK) else tmp_path)
    yield LocalStorage(Path(folder) / "home")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene()
