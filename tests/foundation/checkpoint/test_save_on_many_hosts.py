"""Several hosts save one state: each writes its share, all wait together, and all of them learn how it ended."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.checkpoint.restore import restore_checkpoint
from baton.tasks.foundation.checkpoint.save import AsyncSaves, wait_for_save
from baton.tasks.foundation.checkpoint.snapshot import snapshot_bytes, take_snapshot
from baton.tasks.foundation.checkpoint.verify import find_damage, read_manifest
from baton.tasks.foundation.checkpoint.write import write_snapshot
from baton.tasks.foundation.contracts.log_entry import Commit, Entry
from baton.tasks.foundation.errors import AcceleratorLost, HostsDiffer, NonFinite, StaleWriter, StorageError
from baton.tasks.foundation.log.fold import fold
from baton.tasks.foundation.machine.collectives import OneHost
from baton.tasks.foundation.state.digest import stored_name
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.far_storage import FarStorage
from tests.support.lab import Lab, built, lab_of, spec_of
from tests.support.linked_hosts import Group, Host, in_threads, linked_states, stage_on_all
from tests.support.small_logs import origin, ref
from tests.support.train_states import changed, nearest_other

MODEL = """
def build():
    x = keras.Input((6,))
    y = keras.layers.Dense(128, name="backbone", trainable=False)(x)
    y = keras.layers.Dense(256, name="frozen", trainable=False)(y)
    y = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(64, name="body")(y))
    model = keras.Model(x, keras.layers.Dense(3, name="top")(keras.layers.Dropout(0.5)(y)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model
"""
SPEC = spec_of("build")


def saving(commit: Callable[..., Entry]) -> Callable[[Host], Any]:
    """Each host saves step 7 and waits for it; only the chief has a save."""

    def work(host: Host) -> Any:
        saves = AsyncSaves()
        if host.is_chief:
            saves.begin(lambda: ref(7))
            saves.commit(commit)
        return wait_for_save(saves, host)

    return work


def entry_12(*_: object) -> Entry:
    body = Commit(checkpoint=ref(7), parent=None, exit_reason="interval")
    return Entry(number=12, time="", attempt="a", body=body, head=fold(fold(None, origin()), body))


def fail(fault: Exception) -> Callable[..., Entry]:
    def commit(*_: object) -> Entry:
        raise fault

    return commit


def test_every_host_learns_the_number_of_the_entry() -> None:
    assert Group(3).run(saving(entry_12)) == [12, 12, 12]


def test_nothing_in_flight_is_no_entry() -> None:
    assert Group(2).run(lambda host: wait_for_save(AsyncSaves(), host)) == [None, None]
    assert wait_for_save(None, OneHost()) is None


def test_every_host_rewinds_from_weights_that_are_not_finite() -> None:
    fault = NonFinite("step 7: dense/kernel holds NaN", step=7)
    chief, *others = Group(3).run(saving(fail(fault)))
    assert chief is fault
    assert [(type(other), other.step) for other in others] == [(NonFinite, 7)] * 2


def test_another_failure_of_the_chief_ends_every_host() -> None:
    fault = StaleWriter("the tip has moved")
    chief, other = Group(2).run(saving(fail(fault)))
    assert chief is fault
    assert isinstance(other, AcceleratorLost)
    with pytest.raises(AcceleratorLost, match="the chief could not commit"):
        raise other


@pytest.fixture(scope="module")
def many_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of(tmp_path_factory.mktemp("many"), MODEL)


three_hosts = pytest.mark.parametrize("states", [3], indirect=True)


@pytest.fixture(params=[2, 3])
def states(request: pytest.FixtureRequest, many_lab: Lab) -> Iterator[list[Any]]:
    """The states of several hosts, whose replicas differ where they may."""
    with linked_states(many_lab, SPEC, request.param) as found:
        for host, state in enumerate(found):
            for leaf in state.leaves:
                if leaf.per_replica:
                    part = leaf.components[0]
                    part.assign(tf.cast(tf.ones_like(part) * (host + 1), part.dtype))
        yield found


def files_of(store: FarStorage) -> set[str]:
    return {Path(path).name for method, path in store.calls if method in {"write_buffers", "create", "copy"}}


def test_each_host_writes_its_share(states: list[Any], staging_home: LocalStorage, many_lab: Lab) -> None:
    stores: list[Any] = [FarStorage(staging_home) for _ in states]
    chief, *others = stage_on_all(states, stores)
    assert others == [None] * (len(states) - 1)
    manifest = read_manifest(staging_home, chief)
    # Each file belongs to one host; the chief writes the index and the manifest.
    written = [files_of(store) for store in stores]
    names = {file.name for file in manifest.files}
    assert set.union(*written) == {*names, "manifest.json"}
    assert sum(map(len, written)) == len(names) + 1
    assert {"ckpt.index", "manifest.json"} <= written[0]
    shares = [sum(file.size for file in manifest.files if file.name in each) for each in written]
    largest = max(state_bytes for state_bytes in states[0].shares.sizes.values())
    assert max(shares) <= sum(shares) / len(states) + largest + 4096
    assert [snapshot_bytes(state) <= sum(shares) / len(states) + largest for state in states] == [True] * len(states)
    # The digest is that of the whole state, by whichever number of hosts it was written.
    assert chief.state_digest == states[0].digest().root == states[-1].digest().root
    assert find_damage(staging_home, chief, read_bytes=True) is None
    # TensorFlow reads it.
    reader = tf.train.load_checkpoint(f"{staging_home.uri}/{chief.path}/ckpt")
    for key, variable in states[0].saved.items():
        assert np.array_equal(reader.get_tensor(stored_name(key)), variable.numpy()), key
    # So does one host, and again all of them.
    alone = built(many_lab, SPEC)
    restore_checkpoint(alone, staging_home, chief)
    for leaf in alone.leaves:
        if not leaf.per_replica:
            assert np.array_equal(leaf.variable.numpy(), states[0].saved[leaf.path].numpy())
    assert in_threads([lambda each=each: restore_checkpoint(each, staging_home, chief) for each in states]) == [
        None for _ in states
    ]


@three_hosts
def test_a_resting_file_is_shared_by_its_own_host(states: list[Any], staging_home: LocalStorage) -> None:
    first = stage_on_all(states, staging_home)[0]
    stores: list[Any] = [FarStorage(staging_home) for _ in states]
    second = stage_on_all(states, stores, attempt="def")[0]
    shared = {Path(path).name for store in stores for method, path in store.calls if method == "copy"}
    resting = {file.name: file.size for file in read_manifest(staging_home, first).files if file.sha256 is not None}
    assert 128 * 256 * 4 in resting.values()
    assert resting.keys() <= shared
    home = Path(staging_home.uri)
    assert all((home / first.path / name).samefile(home / second.path / name) for name in shared)


def nothing_is_staged(home: LocalStorage) -> bool:
    return not list(home.root.rglob("manifest.json"))


def trainable_of(states: list[Any], host: int) -> str:
    """A trainable variable that a host saves."""
    paths = {leaf.path for leaf in states[0].leaves if leaf.trainable}
    return next(key for key, owner in states[0].shares.owners.items() if owner == host and key in paths)


@three_hosts
def test_weights_that_are_not_finite_end_every_host(states: list[Any], staging_home: LocalStorage) -> None:
    key = trainable_of(states, len(states) - 1)
    for state in states:
        state.saved[key].assign(tf.ones_like(state.saved[key]) * np.nan)
    found = stage_on_all(states, staging_home)
    assert [(type(fault), fault.step) for fault in found] == [(NonFinite, 0)] * len(states)
    assert str(found[0]).startswith(f"host {len(states) - 1}: step 0: {key} holds NaN")
    assert nothing_is_staged(staging_home)


@three_hosts
def test_a_full_disk_of_one_host_ends_every_host(states: list[Any], staging_home: LocalStorage) -> None:
    full: Any = FarStorage(staging_home)

    def refuse(method: str, _path: str) -> None:
        if method == "write_buffers":
            raise StorageError("the disk is full")

    full.before = refuse
    homes = [staging_home] * (len(states) - 1) + [full]

    def save(state: Any, home: Any) -> Any:
        saves = AsyncSaves()
        snapshot = take_snapshot(state)
        assert snapshot is not None
        saves.begin(lambda: write_snapshot(snapshot, home, base=7, attempt="abc"))
        if state.accelerator.is_chief:
            saves.commit(entry_12)
        return wait_for_save(saves, state.accelerator)

    found = in_threads([lambda one=one: save(*one) for one in zip(states, homes, strict=True)])
    assert [type(fault) for fault in found[1:-1]] == [AcceleratorLost] * (len(states) - 2)
    assert (type(found[0]), str(found[0])) == (StorageError, f"host {len(states) - 1}: the disk is full")
    assert (type(found[-1]), str(found[-1])) == (StorageError, "the disk is full")
    assert nothing_is_staged(staging_home)
    # The next save has nothing left of this one.
    found = in_threads([lambda state=state: save(state, staging_home) for state in states])
    assert found == [12] * len(states)


@three_hosts
def test_a_host_that_dies_in_a_save_leaves_nothing_staged(states: list[Any], staging_home: LocalStorage) -> None:
    dying: Any = FarStorage(staging_home)
    links = [state.accelerator.link for state in states]
    dying.before = lambda _method, _path: links[-1].close()
    snapshots = in_threads([lambda state=state: take_snapshot(state) for state in states])
    homes = [staging_home] * (len(states) - 1) + [dying]
    found = in_threads(
        [
            lambda one=one: write_snapshot(one[0], one[1], base=7, attempt="abc")
            for one in zip(snapshots, homes, strict=True)
        ]
    )
    assert [type(fault) for fault in (found[0], found[-1])] == [AcceleratorLost] * 2
    assert str(found[0]).startswith(f"host {len(states) - 1} closed its connection")
    assert nothing_is_staged(staging_home)


@pytest.mark.parametrize("owner", [0, 1])
def test_a_flipped_bit_is_found_within_n_saves(states: list[Any], staging_home: LocalStorage, owner: int) -> None:
    hosts = len(states)
    for number in range(hosts):  # sound hosts save
        for state in states:
            state.step = 10 + number
        assert stage_on_all(states, staging_home, attempt=f"s{number}")[0].step == 10 + number
    key, wrong = trainable_of(states, owner), states[-1]
    with changed(wrong.saved[key], nearest_other(wrong.saved[key].numpy())):
        for number in range(1, hosts + 1):
            for state in states:
                state.step = 20 + number
            found = stage_on_all(states, staging_home, attempt=f"w{number}")
            if isinstance(found[0], Exception):
                break
    assert {str(fault) for fault in found} == {str(found[0])}
    assert [type(fault) for fault in found] == [HostsDiffer] * hosts
    odd = f"host {hosts - 1} (" if hosts > 2 else "hosts 0 ("
    assert str(found[0]).startswith(f"step {20 + number}: {odd}")
    assert f"hold different values of {key}, which must be the same" in str(found[0])
    # The newest step since which every leaf was compared with every host.
    assert f"the whole state was the same up to step {10 + number - 1};" in str(found[0])
    assert found[0].exit_code == 4
