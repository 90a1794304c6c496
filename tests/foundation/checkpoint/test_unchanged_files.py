"""Data files that stay the same are linked or copied in the store, and never lose a byte by it."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.tasks.foundation.checkpoint import tensor_bundle as module
from baton.tasks.foundation.checkpoint.restore import restore_checkpoint
from baton.tasks.foundation.checkpoint.snapshot import take_snapshot
from baton.tasks.foundation.checkpoint.tensor_bundle import arrange
from baton.tasks.foundation.checkpoint.verify import find_damage, read_manifest
from baton.tasks.foundation.checkpoint.write import write_snapshot
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef, FileRecord
from baton.tasks.foundation.errors import StorageError
from baton.tasks.foundation.state.digest import OBJECT_GRAPH
from baton.tasks.foundation.state.train_state import EarlierFiles
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.storage.local import LocalStorage
from tests.fakes.gcs.server import FakeGcs
from tests.fakes.gcs.wire import Call, Request, Response
from tests.support.crashing_store import CrashingStore, Died
from tests.support.far_storage import FarStorage
from tests.support.lab import Lab, built, lab_of, spec_of

MODEL = """
def build():
    x = keras.Input((6,))
    y = keras.layers.Dense(128, name="stem", trainable=False)(x)
    y = keras.layers.Dense(512, name="backbone", trainable=False)(y)
    model = keras.Model(x, keras.layers.Dense(3, name="top")(y))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


BACKBONE_BYTES = 128 * 512 * 4


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of(tmp_path_factory.mktemp("frozen"), MODEL)


@pytest.fixture(scope="module")
def state(lab: Lab) -> Any:
    return built(lab, spec_of("build"))


@pytest.fixture(autouse=True)
def _forget(state: Any) -> None:
    state.earlier_files = EarlierFiles()


def variable(state: Any, name: str) -> Any:
    return next(found for key, found in state.saved.items() if key.startswith(name))


def train(state: Any) -> None:
    """Change what training changes."""
    for key, found in state.saved.items():
        if "top/kernel" in key or key.startswith("optimizer/"):
            found.assign_add(np.ones(found.shape, found.dtype.as_numpy_dtype))


class Saves:
    """Saves a state to a home again and again."""

    def __init__(self, state: Any, home: Any) -> None:
        self.state, self.home, self.count = state, home, 0

    def __call__(self, home: Any = None) -> CheckpointRef:
        train(self.state)
        snapshot = take_snapshot(self.state)
        assert snapshot is not None
        self.count += 1
        saved = write_snapshot(snapshot, home or self.home, base=7, attempt=f"a{self.count}")
        assert saved.state_digest == self.state.digest().root
        return saved


@pytest.fixture
def saves(state: Any, staging_home: LocalStorage) -> Saves:
    return Saves(state, staging_home)


def files(home: LocalStorage, ref: CheckpointRef) -> list[Path]:
    return sorted(Path(home.uri, ref.path).glob("ckpt.data*"))


def frozen_file(home: LocalStorage, ref: CheckpointRef) -> Path:
    """The file of the backbone's kernel, which is the last."""
    found = files(home, ref)[-1]
    assert found.stat().st_size == BACKBONE_BYTES
    return found


def test_frozen_weights_are_written_once(saves: Saves, staging_home: LocalStorage) -> None:
    first = saves()
    store: Any = FarStorage(staging_home, transfers=1)
    refs = [saves(store) for _ in range(3)]
    written = [path for method, path in store.calls if method == "write_buffers"]
    size = sum((Path(staging_home.uri) / path).stat().st_size for path in written)
    assert size <= 0.12 * sum(ref.size for ref in refs)
    assert len({frozen_file(staging_home, ref).stat().st_ino for ref in (first, *refs)}) == 1
    staging_home.delete(first.path)
    staging_home.delete(refs[0].path)
    assert [find_damage(staging_home, ref) for ref in refs[1:]] == [None, None]


def test_frozen_weights_are_uploaded_once(
    saves: Saves, staging_home: LocalStorage, cloud: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = CloudStorage("bucket", "runs/run")
    home.create("log/00000007.json", staging_home.read("log/00000007.json"))
    first = saves(home)
    cloud.reset_counters()
    respond, uploaded = cloud.service.respond, []

    def count(call: Call, request: Request) -> Response:
        uploaded.append(len(request.body))
        return respond(call, request)

    monkeypatch.setattr(cloud.service, "respond", count)
    second = saves(home)
    assert cloud.count("object.rewrite") == 1
    assert second.size - first.size < 100
    assert 0.05 * second.size < sum(uploaded) <= 0.12 * second.size
    home.delete(first.path)
    assert find_damage(home, second, read_bytes=True) is None


def test_restored_checkpoint_shares_its_files(saves: Saves, state: Any, staging_home: LocalStorage) -> None:
    first = saves()
    state.earlier_files = EarlierFiles()
    restore_checkpoint(state, staging_home, first)
    assert frozen_file(staging_home, saves()).samefile(frozen_file(staging_home, first))


def test_changed_weights_are_written(saves: Saves, state: Any, staging_home: LocalStorage) -> None:
    first = saves()
    backbone = variable(state, "model/backbone/kernel")
    backbone.assign_add(np.ones((128, 512), np.float32))
    second = saves()
    assert not frozen_file(staging_home, second).samefile(frozen_file(staging_home, first))
    assert find_damage(staging_home, second) is None


def test_other_bytes_with_the_same_checksum_are_written(saves: Saves, state: Any, staging_home: LocalStorage) -> None:
    """A checksum of 32 bits agrees by chance once in four billion."""
    first = saves()
    folder = first.path
    (record,) = [file for file in read_manifest(staging_home, first).files if file.sha256 is not None]
    forged = record.model_copy(update={"sha256": "0" * 64})
    state.earlier_files.remember(folder, [forged])
    second = saves()
    assert not frozen_file(staging_home, second).samefile(frozen_file(staging_home, first))


def test_file_without_sha256_is_written_once_more(saves: Saves, state: Any, staging_home: LocalStorage) -> None:
    """Manifests of earlier versions have none."""
    first = saves()
    manifest = read_manifest(staging_home, first)
    state.earlier_files.remember(
        first.path,
        [FileRecord(name=file.name, size=file.size, crc32c=file.crc32c) for file in manifest.files],
    )
    second, third = saves(), saves()
    assert not frozen_file(staging_home, second).samefile(frozen_file(staging_home, first))
    assert frozen_file(staging_home, third).samefile(frozen_file(staging_home, second))


def test_large_trainable_value_that_rests_is_shared(
    saves: Saves, staging_home: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an embedding that no batch touches: its file is shared from the third save on."""
    monkeypatch.setattr(module, "SHARD_BYTES", 2 * BACKBONE_BYTES)
    monkeypatch.setattr(module, "_LEAST_RESTING_BYTES", 1 << 40)
    refs = [saves(), saves(), saves()]
    large = [next(file for file in files(staging_home, ref) if file.stat().st_size == BACKBONE_BYTES) for ref in refs]
    assert not large[0].samefile(large[1])
    assert large[1].samefile(large[2])
    assert [find_damage(staging_home, ref) for ref in refs] == [None] * 3


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damaged_file_is_not_shared(saves: Saves, staging_home: LocalStorage, damage: str) -> None:
    first = saves()
    file = frozen_file(staging_home, first)
    if damage == "gone":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[1000] ^= 1
        file.write_bytes(data[: 5000 if damage == "cut" else None])
    second = saves()
    assert find_damage(staging_home, second) is None
    assert frozen_file(staging_home, saves()).samefile(frozen_file(staging_home, second))


def test_another_home_gets_files_of_its_own(saves: Saves, staging_home: LocalStorage, tmp_path: Path) -> None:
    saves()
    other = LocalStorage(tmp_path / "other")
    other.create("log/00000007.json", staging_home.read("log/00000007.json"))
    second = saves(other)
    assert frozen_file(other, second).stat().st_nlink == 1
    assert find_damage(other, second) is None


@pytest.mark.parametrize("remote", [False, True])
def test_deletion_of_the_earlier_one_at_any_time(
    saves: Saves, staging_home: LocalStorage, cloud: FakeGcs, remote: bool
) -> None:
    """Retirement by a rival, before or after each call of a save: the save is whole, or not staged."""
    del cloud  # only so that the store is reachable
    home: Any = CloudStorage("bucket", "runs/run") if remote else staging_home
    if remote:
        home.create("log/00000007.json", staging_home.read("log/00000007.json"))
    number, shared = 0, set()
    while True:
        first = saves(home)
        store: Any = FarStorage(home, transfers=1)
        seen = iter(range(1000))
        hit = []

        def retire(_method: str, _path: str, *, seen: Iterator[int] = seen, at: int = number, hit: Any = hit) -> None:
            if next(seen) == at:
                hit.append(at)
                home.delete(first.path)  # noqa: B023  # called within the loop

        store.before = store.after = retire
        second = saves(store)
        assert find_damage(home, second, read_bytes=True) is None, number
        shared.add("copy" in {method for method, _ in store.done})
        home.delete(second.path)
        if not hit:
            break
        number += 1
    assert number > 8
    assert shared == {True, False}


def test_death_at_any_call_leaves_earlier_checkpoints_whole(saves: Saves, staging_home: LocalStorage) -> None:
    first = saves()
    dies_at, died = 0, True
    while died:
        before = files(staging_home, first)
        store: Any = CrashingStore(staging_home, random.Random(dies_at), dies_at=dies_at, pauses_at=-1)
        try:
            saves(store)
            died = False
        except Died:
            pass
        assert files(staging_home, first) == before
        assert find_damage(staging_home, first) is None
        restarted = EarlierFiles()
        restarted.remember(first.path, read_manifest(staging_home, first).files)
        saves.state.earlier_files = restarted
        second = saves()
        assert find_damage(staging_home, second) is None
        assert frozen_file(staging_home, second).samefile(frozen_file(staging_home, first))
        dies_at += 1
    assert dies_at > 5


def test_store_that_cannot_copy_gets_the_bytes(saves: Saves, staging_home: LocalStorage) -> None:
    first = saves()
    store: Any = FarStorage(staging_home)

    def refuse(method: str, _path: str) -> None:
        if method == "copy":
            raise StorageError("refused")

    store.before = refuse
    second = saves(store)
    assert not frozen_file(staging_home, second).samefile(frozen_file(staging_home, first))
    assert find_damage(staging_home, second) is None


@settings(derandomize=True)
@example(moving=[0], resting=[0], shard_bytes=1)
@example(moving=[0], resting=[5], shard_bytes=1)
@given(
    moving=st.lists(st.integers(0, 300), max_size=12),
    resting=st.lists(st.integers(0, 300), max_size=12),
    shard_bytes=st.integers(1, 400),
)
def test_files_hold_values_of_one_kind(moving: list[int], resting: list[int], shard_bytes: int) -> None:
    sizes = {f"m{number}": size for number, size in enumerate(moving)}
    apart = {f"a{number}": size for number, size in enumerate(resting)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHARD_BYTES", shard_bytes)
        layout = arrange({**sizes, **apart}, graph_bytes=10, resting=apart)
    file_of = {key: found.shard for key, found in layout.locations.items()}
    assert file_of.keys() == {OBJECT_GRAPH, *sizes, *apart}
    assert {file_of[key] for key in apart} == layout.resting_files
    # A value without bytes changes no file.
    assert not {file_of[key] for key, size in sizes.items() if size} & layout.resting_files
    assert 0 not in layout.resting_files


@settings(derandomize=True)
@given(
    values=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2), st.booleans()), max_size=12),
    apart=st.tuples(st.integers(0, 500), st.integers(0, 500)),
    shard_bytes=st.integers(1, 400),
)
def test_each_file_belongs_to_one_host(
    values: list[tuple[int, int, bool]], apart: tuple[int, int], shard_bytes: int
) -> None:
    sizes = {f"v{number}": size for number, (size, _, _) in enumerate(values)}
    owners = {f"v{number}": host for number, (_, host, _) in enumerate(values)}
    resting = {f"v{number}" for number, (_, _, rests) in enumerate(values) if rests}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHARD_BYTES", shard_bytes)
        one, other = (
            arrange({**sizes, "host/callbacks": size}, graph_bytes=10, resting=resting, owners=owners, hosts=3)
            for size in apart
        )
    assert one.locations.keys() == {OBJECT_GRAPH, "host/callbacks", *sizes}
    # What only the chief knows moves no value of any host, and is one file.
    assert (one.files_of, one.resting_files) == (other.files_of, other.resting_files)
    assert {key: one.locations[key] for key in sizes} == {key: other.locations[key] for key in sizes}
    assert one.locations["host/callbacks"].shard == one.locations[OBJECT_GRAPH].shard == one.files_of[0][-1]
    assert [index for files in one.files_of for index in files] == list(range(one.files))
    for key, location in one.locations.items():
        assert location.shard in one.files_of[owners.get(key, 0)]
        assert (location.shard in one.resting_files) <= (key in resting or not sizes.get(key, 1))
