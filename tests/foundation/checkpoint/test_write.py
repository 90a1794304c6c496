"""Writing a snapshot: files, then the manifest, from any thread; a failure leaves no manifest."""

import threading
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.checkpoint import tensor_bundle as module
from baton.tasks.foundation.checkpoint import write
from baton.tasks.foundation.checkpoint.snapshot import Snapshot, take_snapshot
from baton.tasks.foundation.checkpoint.verify import verify_checkpoint
from baton.tasks.foundation.checkpoint.write import write_snapshot
from baton.tasks.foundation.errors import RunLogError, StorageError
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.far_storage import PATIENCE, FarStorage


def taken(state: Any) -> Snapshot:
    found = take_snapshot(state)
    assert found is not None
    return found


@pytest.mark.parametrize("transfers", [1, 4])
def test_the_manifest_comes_after_every_file(
    state: Any, staging_home: LocalStorage, monkeypatch: pytest.MonkeyPatch, transfers: int
) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 400)
    far: Any = FarStorage(staging_home, transfers=transfers)
    ref = write_snapshot(taken(state), far, base=7, attempt="abc")
    written = [Path(path).name for method, path in far.done if method in {"write_buffers", "create"}]
    assert written[-1] == "manifest.json"
    assert "ckpt.index" in written
    assert len(written) > 4
    assert {path for method, path in far.calls if method in {"stat", "checksum", "upload", "files"}} == set()
    assert len(verify_checkpoint(staging_home, ref).files) == len(written) - 1


def test_the_index_does_not_wait_for_the_data(state: Any, staging_home: LocalStorage) -> None:
    far: Any = FarStorage(staging_home)
    indexed = threading.Event()

    def wait(method: str, path: str) -> None:
        if method == "write_buffers" and "ckpt.data" in path:
            assert indexed.wait(PATIENCE)

    far.before = wait
    far.after = lambda _, path: indexed.set() if path.endswith("ckpt.index") else None
    ref = write_snapshot(taken(state), far, base=7, attempt="abc")
    assert verify_checkpoint(staging_home, ref).step == ref.step


def test_an_index_that_cannot_be_written_gets_no_manifest(state: Any, staging_home: LocalStorage) -> None:
    far: Any = FarStorage(staging_home)

    def fail(_method: str, path: str) -> None:
        if path.endswith("ckpt.index"):
            raise StorageError("away")

    far.before = fail
    with pytest.raises(StorageError, match="away"):
        write_snapshot(taken(state), far, base=7, attempt="abc")
    assert not list(Path(staging_home.uri).rglob("manifest.json"))


def test_files_for_a_run_that_is_gone_are_deleted(state: Any, staging_home: LocalStorage) -> None:
    far: Any = FarStorage(staging_home)
    with pytest.raises(RunLogError, match=r"log/00000008\.json is missing"):
        write_snapshot(taken(state), far, base=8, attempt="abc")
    assert far.of("write_buffers")
    assert not list(staging_home.files("checkpoints"))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_store_that_fails_gets_no_manifest(
    state: Any, staging_home: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 400)
    far: Any = FarStorage(staging_home)

    def fail(method: str, _path: str) -> None:
        if method == "write_buffers" and len(far.of("write_buffers")) > number:
            raise StorageError("away")

    far.before = fail
    snapshot = taken(state)
    with pytest.raises(StorageError, match="away"):
        write_snapshot(snapshot, far, base=7, attempt="abc")
    assert not list(Path(staging_home.uri).rglob("manifest.json"))
    assert taken(state).memory is not None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("baton-digest")]


def test_memory_is_given_back(state: Any, staging_home: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    snapshot = taken(state)
    give_back = snapshot.buffer.give_back
    monkeypatch.setattr(snapshot.buffer, "give_back", lambda memory: (given.append(memory), give_back(memory)))
    write_snapshot(snapshot, staging_home, base=7, attempt="abc")
    assert given == [snapshot.memory]


@pytest.mark.parametrize(
    "work",
    [
        lambda values, given_up: write._hasher(values).hash_leaves(lambda data: write._blocks(data, given_up)),
        write._checksums,
    ],
)
def test_a_digest_that_nobody_needs_is_given_up(state: Any, work: Any) -> None:
    """A large state takes seconds, and a process that stops has few."""
    given_up = threading.Event()
    values = taken(state).values
    work(values, given_up)
    given_up.set()
    with pytest.raises(write._GivenUp):
        work(values, given_up)


def test_another_thread_writes_it(state: Any, staging_home: LocalStorage) -> None:
    snapshot, found = taken(state), []
    thread = threading.Thread(
        target=lambda: found.append(write_snapshot(snapshot, staging_home, base=7, attempt="abc"))
    )
    thread.start()
    thread.join()
    assert found[0].state_digest == state.digest().root
