"""Reads real files with the real pipeline."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tasks.foundation.dataset import order
from baton.tasks.foundation.dataset import read as reader
from baton.tasks.foundation.dataset.evaluation_sets import set_batches, set_remainder
from baton.tasks.foundation.dataset.shards import original_read_errors
from baton.tasks.foundation.errors import DamagedDataset, StorageError
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.far_storage import PATIENCE, FailOnce, FarStorage, bytes_below, wait_for_threads

EXAMPLES = [4, pytest.param(10, marks=pytest.mark.nightly)]


def training(prepared: Any, **changed: Any) -> Any:
    settings_ = {"seed": 0, "global_batch_size": 4, "window_shards": 2, "first_batch": 0, **changed}
    return reader.training_dataset(prepared.storage, prepared.ref, **settings_)


@pytest.mark.slow
@pytest.mark.parametrize("examples", EXAMPLES)
def test_epoch_is_a_permutation_from_any_first_batch(
    numbered: Callable[..., Any], labels: Callable[..., list[list[int]]], examples: int
) -> None:
    @settings(max_examples=examples, derandomize=True)
    @given(
        counts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
        window_shards=st.integers(1, 6),
        batch=st.integers(1, 7),
    )
    def check(counts: list[int], window_shards: int, batch: int) -> None:
        prepared = numbered(counts)
        total = sum(counts)
        batches = -(-3 * total // batch)
        straight = labels(training(prepared, global_batch_size=batch, window_shards=window_shards), batches)
        stream = [label for labels_ in straight for label in labels_]
        for epoch in range(3):
            assert sorted(stream[epoch * total : (epoch + 1) * total]) == list(range(total))
        for first in {0, 1, batches // 2, batches - 1}:
            dataset = training(prepared, global_batch_size=batch, window_shards=window_shards, first_batch=first)
            assert labels(dataset, batches - first) == straight[first:]

    check()


@pytest.mark.slow
@pytest.mark.parametrize("examples", EXAMPLES)
def test_hosts_and_replicas_in_order_form_the_global_batch(
    numbered: Callable[..., Any], labels: Callable[..., list[list[int]]], examples: int
) -> None:
    @settings(max_examples=examples, derandomize=True)
    @given(
        shares=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
        first_batch=st.integers(0, 9),
    )
    def check(shares: tuple[int, int, int], first_batch: int) -> None:
        hosts, replicas, per_replica = shares
        prepared = numbered([5, 5, 5, 2])
        batch = hosts * replicas * per_replica
        common = {"global_batch_size": batch, "first_batch": first_batch}
        whole = labels(training(prepared, **common), 5)
        slices = [
            labels(training(prepared, **common, host=host, hosts=hosts, local_replicas=replicas), 5 * replicas)
            for host in range(hosts)
        ]
        for k, expected in enumerate(whole):
            put_together = [slice_[k * replicas + replica] for slice_ in slices for replica in range(replicas)]
            assert [label for part in put_together for label in part] == expected

    check()


@pytest.mark.slow
@pytest.mark.parametrize("examples", EXAMPLES)
def test_global_batches_keep_the_order_of_the_source(
    numbered: Callable[..., Any], labels: Callable[..., list[list[int]]], examples: int
) -> None:
    """Whatever hosts, replicas and cuts there are, row i of batch b is row b * B + i of the epochs in a row."""

    @settings(max_examples=examples, derandomize=True)
    @given(
        counts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
        shares=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
        window_shards=st.integers(1, 3),
        first_batch=st.integers(0, 9),
        in_memory=st.booleans(),
    )
    def check(
        *, counts: list[int], shares: tuple[int, int, int], window_shards: int, first_batch: int, in_memory: bool
    ) -> None:
        hosts, replicas, per_replica = shares
        batch = hosts * replicas * per_replica
        prepared = numbered(counts)
        settings_ = {"shuffle": False, "global_batch_size": batch, "first_batch": first_batch, "in_memory": in_memory}
        settings_ |= {"window_shards": window_shards, "hosts": hosts, "local_replicas": replicas}
        of_hosts = [labels(training(prepared, host=host, **settings_), 5 * replicas) for host in range(hosts)]
        for number in range(5):
            parts = [each[number * replicas + replica] for each in of_hosts for replica in range(replicas)]
            begin = (first_batch + number) * batch
            assert [label for part in parts for label in part] == [n % sum(counts) for n in range(begin, begin + batch)]

    check()


def test_pipeline_follows_the_computed_order(
    numbered: Callable[..., Any], labels: Callable[..., list[list[int]]]
) -> None:
    from baton.tasks.foundation.dataset import order

    counts = [4, 4, 4, 3]
    window = next(order.windows(counts, seed=9, window_shards=2, first_example=0))
    held = [4 * shard + position for shard in window.shards for position in range(counts[shard])]
    expected = [held[index] for index in order.permutation(window.examples, window.seed)]
    assert labels(training(numbered(counts), seed=9, global_batch_size=window.examples), 1) == [expected]


def test_no_batch_is_lost_when_many_are_parsed_at_once(
    numbered: Callable[..., Any], labels: Callable[..., list[list[int]]]
) -> None:
    prepared = numbered([700, 700, 300])
    stream = [
        label for batch in labels(training(prepared, global_batch_size=17, window_shards=1), 300) for label in batch
    ]
    for epoch in range(3):
        assert sorted(stream[epoch * 1700 : (epoch + 1) * 1700]) == list(range(1700))


def test_elements_match_train_step_with_static_shapes(numbered: Callable[..., Any]) -> None:
    dataset = training(numbered([5]), global_batch_size=6, local_replicas=2)
    x, y = dataset.element_spec
    assert (x.shape, x.dtype.name) == ((3, 2), "float32")
    assert (y.shape, y.dtype.name) == ((3,), "int64")
    first_x, first_y = next(dataset.as_numpy_iterator())
    np.testing.assert_array_equal(first_x, np.stack([first_y, first_y / 2], axis=1).astype(np.float32))


def test_store_without_local_files_gives_the_same_batches(
    numbered: Callable[..., Any], labels: Callable[..., list[list[int]]]
) -> None:
    near, far = numbered([5, 5, 3], [3]), numbered([5, 5, 3], [3], MemoryStorage("reader-test"))
    assert labels(training(far), 20) == labels(training(near), 20)
    assert labels(set_batches(far.storage, far.ref, on="validation", batch_size=3), -1) == [[1000, 1001, 1002]]


def test_copies_of_remote_shards_do_not_pile_up(
    numbered: Callable[..., Any], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = numbered([2] * 8, storage=MemoryStorage("copies-test"))
    window = 2 * prepared.manifest.train[0].size
    monkeypatch.setenv("BATON_CACHE_BYTES", str(3 * window))
    most = 0
    for _ in training(prepared, window_shards=2).take(40):
        most = max(most, bytes_below(temporary))
    assert window <= most <= 3 * window
    wait_for_threads()
    assert bytes_below(temporary) <= 3 * window


@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize("windows", [1, 2, 3, 100])
def test_dataset_larger_than_the_cache_gives_the_same_batches(
    numbered: Callable[..., Any],
    labels: Callable[..., list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    windows: int,
) -> None:
    near = numbered([3] * 9, [2] * 5)
    far = numbered([3] * 9, [2] * 5, FarStorage(MemoryStorage(f"larger-{windows}")))
    monkeypatch.setenv("BATON_CACHE_BYTES", str(windows * 2 * near.manifest.train[0].size))
    assert labels(training(far), 30) == labels(training(near), 30)
    dataset = set_batches(far.storage, far.ref, on="validation", batch_size=3)
    assert [label for batch in labels(dataset, -1) for label in batch] == list(range(1000, 1009))


@pytest.mark.usefixtures("temporary")
def test_restart_downloads_only_shards_it_reads(
    numbered: Callable[..., Any], labels: Callable[..., list[list[int]]]
) -> None:
    counts = [4] * 64
    far = numbered(counts, storage=FarStorage(MemoryStorage("restart-test")))
    first_batch = 1003
    dataset = training(far, first_batch=first_batch)
    assert far.storage.of("download") == []
    assert len(labels(dataset, 1)) == 1
    wait_for_threads()
    coming = order.windows(counts, seed=0, window_shards=2, first_example=4 * first_batch)
    fetched = far.storage.of("download")
    windows = [{far.manifest.train[shard].path for shard in next(coming).shards} for _ in range(10)]
    # A window has two batches. TensorFlow reads some windows ahead by itself, and one more is downloaded.
    assert any(set(fetched) == set().union(*windows[:count]) for count in range(2, 10))


@pytest.mark.usefixtures("temporary")
def test_validation_downloads_several_shards_ahead(numbered: Callable[..., Any]) -> None:
    far = numbered([2], [2] * 9, FarStorage(MemoryStorage("validation-test"), transfers=4))
    begun: list[int] = []
    together = threading.Barrier(4)

    def before(method: str, path: str) -> None:
        if method == "download" and len(begun) < 4 and "validation" in path:
            begun.append(1)
            together.wait(PATIENCE)  # fails unless four downloads run at once

    far.storage.before = before
    assert len(list(set_batches(far.storage, far.ref, on="validation", batch_size=6))) == 3


@pytest.mark.usefixtures("temporary")
def test_storage_error_while_reading_is_not_damage(numbered: Callable[..., Any]) -> None:
    far = numbered([2] * 8, storage=FarStorage(MemoryStorage("failing-test")))
    window = list(order.permutation(8, order.seed_of(0, 0)))
    far.storage.before = FailOnce(far.manifest.train[window[5]].path, StorageError("the store is away"))
    with pytest.raises(StorageError, match="the store is away") as caught, original_read_errors():
        list(training(far, global_batch_size=2, window_shards=2).take(8))
    assert type(caught.value) is StorageError
    assert len(list(training(far, global_batch_size=2, window_shards=2).take(8))) == 8


@pytest.mark.parametrize(
    ("counts", "batch_size"), [([], 3), ([1], 1), ([4], 4), ([3, 2], 4), ([5, 5, 1], 3), ([8], 4), ([8], 100)]
)
def test_validation_reads_each_example_once_in_order(
    numbered: Callable[..., Any], labels: Callable[..., list[list[int]]], counts: list[int], batch_size: int
) -> None:
    prepared = numbered([2], counts)
    full = labels(set_batches(prepared.storage, prepared.ref, on="validation", batch_size=batch_size), -1)
    remainder = set_remainder(prepared.storage, prepared.ref, on="validation", batch_size=batch_size)
    rest = [] if remainder is None else labels(remainder, -1)
    assert [len(batch) for batch in full] == [batch_size] * (sum(counts) // batch_size)
    assert [len(batch) for batch in rest] == ([sum(counts) % batch_size] if sum(counts) % batch_size else [])
    assert [label for batch in full + rest for label in batch] == list(range(1000, 1000 + sum(counts)))


def test_remainder_has_a_static_shape(numbered: Callable[..., Any]) -> None:
    prepared = numbered([2], [5])
    remainder = set_remainder(prepared.storage, prepared.ref, on="validation", batch_size=3)
    assert remainder.element_spec[0].shape == (2, 2)


def test_an_iterator_that_each_evaluation_deletes_is_not_autotuned(numbered: Callable[..., Any]) -> None:
    prepared = numbered([2], [5])
    for dataset in (
        set_batches(prepared.storage, prepared.ref, on="validation", batch_size=3),
        set_remainder(prepared.storage, prepared.ref, on="validation", batch_size=3),
    ):
        assert dataset.options().autotune.enabled is False
        assert dataset.map(lambda *batch: batch).prefetch(1).options().autotune.enabled is False


@pytest.mark.parametrize("part", ["train-00001", "validation-00000"])
def test_flipped_byte_is_found_before_tensorflow_reads_it(numbered: Callable[..., Any], part: str) -> None:
    prepared = numbered([4, 4], [4])
    shard = prepared.storage.root / prepared.ref.folder / f"{part}.tfrecord"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    dataset = (
        training(prepared)
        if part.startswith("train")
        else set_batches(prepared.storage, prepared.ref, on="validation", batch_size=2)
    )
    with pytest.raises(DamagedDataset) as damaged, original_read_errors():
        list(dataset.take(4))
    assert f"{part}.tfrecord" in str(damaged.value)
    assert "delete that folder" in str(damaged.value)


def test_shard_damaged_after_verification_is_found(numbered: Callable[..., Any]) -> None:
    prepared = numbered([4, 4])
    list(training(prepared).take(4))
    shard = prepared.storage.root / prepared.ref.folder / "train-00000.tfrecord"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(DamagedDataset, match=r"train-00000\.tfrecord"), original_read_errors():
        list(training(prepared).take(4))


def test_other_tensorflow_errors_are_unchanged() -> None:
    import tensorflow as tf

    with pytest.raises(tf.errors.InvalidArgumentError), original_read_errors():
        tf.debugging.assert_equal(1, 2)
    with pytest.raises(DamagedDataset, match="changed while it was being read"), original_read_errors():
        raise tf.errors.DataLossError(None, None, "corrupted record at 12")
