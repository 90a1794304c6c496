"""Stores to keep a run in."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.memory import MemoryStorage


@pytest.fixture
def memory() -> Iterator[MemoryStorage]:
    store = MemoryStorage(f"runlog-{uuid.uuid4().hex}")
    yield store
    for path in [path for path in MemoryFileSystem.store if path.startswith(f"{store.root}/")]:
        del MemoryFileSystem.store[path]  # deleting 10,000 files through fsspec takes a while


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, memory: MemoryStorage, tmp_path: Path) -> Storage:
    return memory if request.param == "memory" else LocalStorage(tmp_path / "home")
