"""An interrupted preparation continues: finished shards stay in the store, and the bytes are the same."""

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.errors import SourceError, StorageError
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.storage.transfers import checksum_file
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.prepare_data import shard_writers
from baton.tasks.prepare_data.shard_writers import BlockWriter, ShardUploads
from tests.support import forked
from tests.support.far_storage import PATIENCE, FarStorage

COUNTING = """
import numpy as np

def load(n=100):
    for number in range(n):
        yield np.full(3, number, np.float32), number
"""
# A source of unknown length is written in blocks, one of known length through a temporary file.
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("data.py:load", {"n": 60}),
    "scattered": ("npz", {"path": "data.npz", "y": "y"}),
}
LAYOUT = {"shard_examples": 7, "validation_fraction": 0.2}


class Killed(BaseException):
    """Ends the preparation like a kill: no handler catches it."""


@dataclass
class KillAt:
    """Ends the preparation at the n-th call of the store, before or after the call takes effect."""

    number: int
    after: bool
    seen: int = field(default=0)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, _method: str, _path: str) -> None:
        with self.lock:
            self.seen += 1
            if self.seen >= self.number:
                raise Killed

    def into(self, far: FarStorage) -> None:
        setattr(far, "after" if self.after else "before", self)


@pytest.fixture
def far(workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FarStorage]:
    """The workshop's store as a remote one; checks that the temporary folder is empty at the end."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    workshop.write("data.py", COUNTING)
    workshop.write("data.npz", {"x": np.arange(60), "y": np.arange(60)})
    memory = MemoryStorage(f"resuming/{tmp_path.name}")
    workshop.storage = FarStorage(memory)
    yield workshop.storage
    memory.delete("")
    assert list((tmp_path / "temporary").iterdir()) == []


def as_next_process(workshop: Any, far: FarStorage) -> FarStorage:
    """Return the same store, as the next process sees it."""
    workshop.storage = FarStorage(far.inner, transfers=far.transfers)
    return workshop.storage


def prepare(workshop: Any, kind: str, **changed: Any) -> DatasetRef:
    source, options = SOURCES[kind]
    return workshop.prepare(source, options, **{**LAYOUT, **changed})


def uploads(*stores: FarStorage) -> Counter[str]:
    return Counter(name for store in stores for name in store.of("upload"))


# Datasets of the first release: source and layout -> the dataset's folder and its content.
FIRST_RELEASE: dict[str, tuple[dict[str, Any], str, str]] = {
    "data.py:load": (
        LAYOUT,
        "datasets/f314ab7dfa6cd5f6b5a49c65",
        "111c2ff6faf3ea482713ecde0566fd47ee7ab6d2fc167341e5c4ade864b848e7",
    ),
    "digits": (
        {"shard_examples": 500},
        "datasets/fc4240a9e2268fab30dbb788",
        "8d2a0488f6be1eb19404afb36c2279c1d362023217923410c52a0ca84aaa929b",
    ),
}


@pytest.mark.parametrize("source", FIRST_RELEASE)
def test_dataset_names_and_content_are_pinned(workshop: Any, far: FarStorage, source: str) -> None:
    """Existing datasets are found again, and runs that started with them continue."""
    layout, folder, content = FIRST_RELEASE[source]
    ref = workshop.prepare(source, **layout)
    assert ref.content_digest == content
    assert ref.folder == folder
    assert uploads(far).total() == len(list(far.inner.files(ref.folder))) - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "after", "transfers"),
    [
        ("blocks", True, 3),
        ("scattered", False, 1),
        *(pytest.param(*more, marks=pytest.mark.nightly) for more in (("blocks", False, 1), ("scattered", True, 3))),
    ],
)
def test_preparation_continues_after_a_kill_at_any_call(
    workshop: Any, far: FarStorage, kind: str, *, after: bool, transfers: int
) -> None:
    far.transfers = transfers
    ref = prepare(workshop, kind, shard_examples=28)
    calls = len(far.calls)
    whole = {path: far.inner.read(path) for path in far.inner.files(ref.folder)}
    assert calls > 2 * len(whole)
    for number in range(1, calls + 1):
        far.inner.delete("datasets")
        first = as_next_process(workshop, far)
        KillAt(number, after).into(first)
        try:
            prepare(workshop, kind, shard_examples=28)
        except Killed:
            # Every shard in the store is complete.
            left = {path: far.inner.read(path) for path in far.inner.files(ref.folder)}
            assert left.items() <= whole.items()
        second = as_next_process(workshop, far)
        again = prepare(workshop, kind, shard_examples=28)
        assert again.content_digest == ref.content_digest
        assert {path: far.inner.read(path) for path in far.inner.files(ref.folder)} == whole
        # Shards that had arrived are not uploaded again.
        arrived = {path for method, path in first.done if method == "upload"}
        assert not arrived & {path for method, path in second.calls if method == "upload"}


@pytest.mark.parametrize("fault", [StorageError("the store is away"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("kind", SOURCES)
def test_finished_shards_stay_after_a_storage_failure(
    workshop: Any, far: FarStorage, kind: str, fault: BaseException
) -> None:
    far.transfers = 1

    def fail_later(method: str, _path: str) -> None:
        if method == "upload" and uploads(far).total() == 6:
            raise fault

    far.before = fail_later
    with pytest.raises(type(fault)):
        prepare(workshop, kind)
    assert len(list(far.inner.files("datasets"))) == 5
    second = as_next_process(workshop, far)
    ref = prepare(workshop, kind)
    manifest = load_manifest(far.inner, ref)
    shards = len(manifest.train) + len(manifest.validation)
    assert uploads(second).total() == shards - 5
    assert Note(text=f"kept 5 of {shards} shards from an earlier attempt") in workshop.events


def test_first_attempt_mentions_no_kept_shards(workshop: Any, far: FarStorage) -> None:
    prepare(workshop, "blocks")
    assert far.calls
    assert not any(isinstance(event, Note) for event in workshop.events)


@pytest.mark.parametrize("transfers", [1, 4])
def test_invalid_record_in_the_middle_leaves_nothing(workshop: Any, far: FarStorage, transfers: int) -> None:
    far.transfers = transfers
    workshop.write("data.py", COUNTING + "    yield np.full(4, 1, np.float32), 1\n")  # of another shape
    with pytest.raises(SourceError):
        prepare(workshop, "blocks")
    assert uploads(far).total() > 1
    assert list(far.inner.files("datasets")) == []


def test_shards_are_uploaded_in_parallel_and_few_stay_local(workshop: Any, far: FarStorage, tmp_path: Path) -> None:
    far.transfers = 3
    together = threading.Barrier(3)
    begun: list[str] = []
    here: list[int] = []

    def before(method: str, path: str) -> None:
        if method == "upload":
            here.append(len(list((tmp_path / "temporary").rglob("*.tfrecord"))))
            begun.append(path)
            if len(begun) <= 3:
                together.wait(PATIENCE)  # fails unless three downloads run at once

    far.before = before
    ref = prepare(workshop, "scattered")
    manifest = load_manifest(far.inner, ref)
    assert len(begun) == len(manifest.train) + len(manifest.validation)
    # The shards that are uploading, and the one that is being written.
    assert max(here) <= 4


def test_failed_upload_is_reported_while_writing_others(workshop: Any, far: FarStorage) -> None:
    def before(method: str, path: str) -> None:
        if method == "upload" and "train-00001" in path:
            raise StorageError("the store is away")

    far.before = before
    far.transfers = 2
    workshop.write("data.py", COUNTING.replace("n=100", "n=1000"))
    with pytest.raises(StorageError, match="the store is away"):
        workshop.prepare("data.py:load", **LAYOUT)
    assert uploads(far).total() < 20


def test_failed_upload_is_reported_before_the_next_block(far: FarStorage) -> None:
    def before(method: str, _path: str) -> None:
        if method == "upload":
            raise StorageError("the store is away")

    far.before = before
    with ShardUploads(far.at("datasets/x")) as shards:
        writer = BlockWriter(shards, part="train", seed=0, shard_examples=1000)
        writer.add(b"1")
        assert isinstance(shards.write("another", [b"1"]).exception(PATIENCE), StorageError)
        with pytest.raises(StorageError, match="the store is away"):
            writer.add(b"2")


@pytest.mark.parametrize("kind", SOURCES)
def test_store_that_alters_a_shard_gets_no_manifest(workshop: Any, far: FarStorage, kind: str) -> None:
    def after(method: str, path: str) -> None:
        if method == "upload" and "train-00002" in path:
            data = bytearray(far.inner.read(path))
            data[len(data) // 2] ^= 1
            far.inner.write(path, bytes(data))

    far.after = after
    with pytest.raises(StorageError, match=r"train-00002.*bytes were written.*instead of.*run again"):
        prepare(workshop, kind)
    assert not any(path.endswith("manifest.json") for path in far.inner.files("datasets"))
    second = as_next_process(workshop, far)
    load_manifest(far.inner, prepare(workshop, kind))
    assert [name[:11] for name in second.of("upload")].count("train-00002") == 1


def test_only_a_lost_shard_is_uploaded_again(workshop: Any, far: FarStorage) -> None:
    ref = prepare(workshop, "blocks")
    far.inner.delete(f"{ref.folder}/train-00001.tfrecord")
    second = as_next_process(workshop, far)
    assert prepare(workshop, "blocks") == ref
    assert uploads(second) == Counter({"train-00001.tfrecord": 1})


@pytest.mark.parametrize("kind", SOURCES)
def test_two_processes_write_one_dataset(workshop: Any, far: FarStorage, kind: str) -> None:
    with ThreadPoolExecutor(3) as threads:
        refs = list(threads.map(lambda _: prepare(workshop, kind), range(3)))
    assert len({ref.content_digest for ref in refs}) == 1
    manifest = load_manifest(far.inner, refs[0])
    assert len(list(far.inner.files("datasets"))) == len(manifest.train) + len(manifest.validation) + 1
    assert as_next_process(workshop, far).of("upload") == []
    assert prepare(workshop, kind).already_prepared


def test_existing_shards_need_no_disk_space(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = workshop.storage.root
    folder.mkdir()
    (folder / "a.tfrecord").write_bytes(bytes(60))
    usage = shard_writers.shutil.disk_usage(folder)
    monkeypatch.setattr(shard_writers.shutil, "disk_usage", lambda _: usage._replace(free=50))
    shard_writers.require_space(workshop.storage, 110, includes_written_shards=True)
    for size, counts in ((111, True), (51, False)):
        with pytest.raises(StorageError, match="the dataset needs"):
            shard_writers.require_space(workshop.storage, size, includes_written_shards=counts)


def test_continuing_needs_space_for_the_rest_only(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.write("data.npz", {"x": np.zeros((60, 100)), "y": np.arange(60)})
    ref = prepare(workshop, "scattered")
    manifest = load_manifest(workshop.storage, ref)
    usage = shard_writers.shutil.disk_usage(workshop.code)
    monkeypatch.setattr(shard_writers.shutil, "disk_usage", lambda _: usage._replace(free=2 * manifest.train[0].size))
    workshop.storage.delete(f"{ref.folder}/{manifest.train[0].path}")
    assert prepare(workshop, "scattered") == ref
    workshop.storage.delete(ref.folder)
    with pytest.raises(StorageError, match="the dataset needs"):
        prepare(workshop, "scattered")


def test_started_upload_is_completed(far: FarStorage) -> None:
    entered, gate = threading.Event(), threading.Event()

    def before(method: str, _path: str) -> None:
        if method == "upload":
            entered.set()
            assert gate.wait(PATIENCE)

    def open_once_left(shards: ShardUploads) -> None:
        assert shards._pool is not None
        assert shards._folder is not None
        while not shards._pool._shutdown:
            pass
        # Long enough for a bug to delete the file during its upload.
        assert all(shards._folder.exists() for _ in range(10_000))
        gate.set()

    far.before = before
    shards = ShardUploads(far.at("datasets/x"))
    with ThreadPoolExecutor(1) as pool, shards:
        shards.write("a", [b"1"])
        assert entered.wait(PATIENCE)
        opened = pool.submit(open_once_left, shards)
    opened.result()
    assert ("stat", "datasets/x/a") in far.done


PROGRAM = """
import os, signal, sys
from pathlib import Path
from tests.prepare_data.conftest import LocalStorage, Workshop

class Deadly(LocalStorage):
    def at(self, folder):
        return Deadly(self.root / folder, self._seen)
    def upload(self, source, path):
        if "00003" in path:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().upload(source, path)

Workshop(Path(sys.argv[1]), Deadly(Path(sys.argv[2]))).prepare("data.py:load", shard_examples=7)
"""


@pytest.mark.slow
def test_kill_leaves_shards_in_the_store_and_no_local_files(
    workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.write("data.py", COUNTING)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    root = workshop.storage.root
    program = [sys.executable, "-c", PROGRAM, str(workshop.code), str(root)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    killed = forked.run(program, capture_output=True, env=environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert len(list(temporary.glob("baton-preparing-*"))) == 1
    shards = {file: (file.stat().st_ino, checksum_file(file)) for file in root.rglob("*.tfrecord")}
    assert len(shards) == 3
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    ref = workshop.prepare("data.py:load", shard_examples=7)
    assert list(temporary.glob("baton-preparing-*")) == []
    assert {file: (file.stat().st_ino, checksum_file(file)) for file in shards} == shards
    assert sorted(workshop.labels(ref) + workshop.labels(ref, "validation")) == list(range(100))
