"""Datasets in place: ranges of external files, which hold training and validation examples."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tasks.foundation.contracts.dataset import (
    DatasetManifest,
    DatasetRef,
    Feature,
    HeldOut,
    ShardRecord,
    content_digest,
)
from baton.tasks.foundation.dataset import read
from baton.tasks.foundation.dataset.evaluation_sets import set_batches, set_remainder
from baton.tasks.foundation.dataset.manifest import (
    held_out_mask,
    manifest_path,
    positions_of_part,
)
from baton.tasks.foundation.dataset.shards import original_read_errors
from baton.tasks.foundation.errors import DamagedDataset
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage

LABEL = Feature(name="y", dtype="int64", shape=(), key="label", encoding="int64")
FEATURES = (Feature(name="x", dtype="float32", shape=(2,), key="values", encoding="float"), LABEL)
# For each record: bytes of padding, and whether a range or a file ends after it.
LAYOUTS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["", "", "range", "file"])), min_size=2, max_size=25)


@dataclasses.dataclass(frozen=True)
class Prepared:
    storage: LocalStorage
    ref: DatasetRef
    manifest: DatasetManifest


def record(number: int, padding: int = 0, **features: Any) -> bytes:
    import tensorflow as tf

    lists = {
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
        "values": tf.train.Feature(float_list=tf.train.FloatList(value=[number, number / 2])),
        "other": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"\0" * padding])),
    }
    return bytes(tf.train.Example(features=tf.train.Features(feature={**lists, **features})).SerializeToString())


def write(file: Path, records: Sequence[bytes]) -> bytes:
    import tensorflow as tf

    file.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(file)) as writer:
        for each in records:
            writer.write(each)
    return file.read_bytes()


def ranges_of(folder: Path, layout: Sequence[tuple[int, str]], make: Callable[[int, int], bytes]) -> list[ShardRecord]:
    """Write files with the given layout, and return all their ranges."""
    ranges: list[ShardRecord] = []
    held: list[bytes] = []
    begin = first = number = 0

    def end_range() -> None:
        nonlocal begin, first
        if number > first:
            size = sum(16 + len(each) for each in held[-(number - first) :])
            ranges.append(
                ShardRecord(
                    path=str(folder / f"{files:03d}.tfrecord"),
                    begin=begin,
                    size=size,
                    crc32c="00000000",
                    first=first,
                    records=number - first,
                    examples=number - first,
                )
            )
            begin, first = begin + size, number

    files = 0
    for index, (padding, ends) in enumerate(layout):
        held.append(make(number, padding))
        number += 1
        last = index == len(layout) - 1
        if ends or last:
            end_range()
        if ends == "file" or last:
            write(folder / f"{files:03d}.tfrecord", held)
            held, begin, files = [], 0, files + 1
    return [shard.model_copy(update={"crc32c": f"{google_crc32c.value(_bytes(shard)):08x}"}) for shard in ranges]


def _bytes(shard: ShardRecord) -> bytes:
    return Path(shard.path).read_bytes()[shard.begin : shard.begin + shard.size]


def commit(
    folder: Path, ranges: Sequence[ShardRecord], held_out: HeldOut | None, features: Sequence[Feature] = FEATURES
) -> Prepared:
    storage = LocalStorage(folder / "storage")
    parts: list[tuple[ShardRecord, ...]] = []
    for part in ("train", "validation"):
        counts = [
            (len(positions_of_part(part, held_out, [shard])) if held_out else shard.examples * (part == "train"))  # type: ignore[arg-type]
            for shard in ranges
        ]
        parts.append(
            tuple(shard.model_copy(update={"examples": n}) for shard, n in zip(ranges, counts, strict=True) if n)
        )
    digest = content_digest(features, *parts, held_out)
    manifest = DatasetManifest(
        digest="external",
        content_digest=digest,
        source="tfrecord",
        origin={},
        features=tuple(features),
        train=parts[0],
        validation=parts[1],
        held_out=held_out,
    )
    storage.write(manifest_path("datasets/external"), manifest.to_json())
    ref = DatasetRef(
        folder="datasets/external",
        content_digest=digest,
        train_examples=manifest.train_examples,
        validation_examples=manifest.validation_examples,
        already_prepared=False,
    )
    return Prepared(storage, ref, manifest)


@pytest.fixture
def external(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Prepared]:
    def make(layout: Sequence[tuple[int, str]], held_out: HeldOut | None) -> Prepared:
        folder = tmp_path_factory.mktemp("external")
        return commit(folder, ranges_of(folder / "files", layout, record), held_out)

    return make


def training(prepared: Any, **changed: Any) -> Any:
    settings_ = {"seed": 0, "global_batch_size": 4, "window_shards": 2, "first_batch": 0, **changed}
    return read.training_dataset(prepared.storage, prepared.ref, **settings_)


def rule_for(fraction: float, seed: int, total: int) -> HeldOut | None:
    if not fraction:
        return None
    plain = HeldOut(fraction=fraction, seed=seed)
    held_out = int(held_out_mask(plain, 0, total).sum())
    return plain if 0 < held_out < total else plain.model_copy(update={"exception": seed % total})


@pytest.mark.slow
@pytest.mark.parametrize("examples", [4, pytest.param(7, marks=pytest.mark.nightly)])
def test_epoch_has_each_example_once_from_any_first_batch(
    external: Callable[..., Prepared], labels: Callable[..., list[list[int]]], examples: int
) -> None:
    @settings(max_examples=examples, derandomize=True)
    @given(
        layout=LAYOUTS,
        split=st.tuples(st.sampled_from([0, 0.1, 0.5, 0.9]), st.integers(0, 2**31 - 1)),
        sizes=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    )
    def check(layout: list[tuple[int, str]], split: tuple[float, int], sizes: tuple[int, int]) -> None:
        (fraction, seed), (batch, window_shards) = split, sizes
        rule = rule_for(fraction, seed, len(layout))
        prepared = external(layout, rule)
        held_out = [] if rule is None else np.flatnonzero(held_out_mask(rule, 0, len(layout))).tolist()
        trained = sorted(set(range(len(layout))) - set(held_out))
        common = {"global_batch_size": batch, "window_shards": window_shards, "seed": seed}
        batches = -(-2 * len(trained) // batch)
        straight = labels(training(prepared, **common), batches)
        stream = [label for labels_ in straight for label in labels_]
        assert sorted(stream[: len(trained)]) == sorted(stream[len(trained) : 2 * len(trained)]) == trained
        first = seed % batches
        assert labels(training(prepared, **common, first_batch=first), batches - first) == straight[first:]
        # In source order, however it is cut into ranges.
        full = labels(set_batches(prepared.storage, prepared.ref, on="validation", batch_size=batch), -1)
        remainder = set_remainder(prepared.storage, prepared.ref, on="validation", batch_size=batch)
        rest = [] if remainder is None else labels(remainder, -1)
        assert [label for labels_ in full + rest for label in labels_] == held_out

    check()


def test_images_decoded_in_parallel_stay_in_order(tmp_path: Path) -> None:
    import tensorflow as tf

    def image(number: int, _padding: int) -> bytes:
        # Later images are smaller, so without ordering they would be done first.
        side = 400 - 10 * number
        png = tf.io.encode_png(np.full((side, side, 3), number, np.uint8)).numpy()
        return record(number, image=tf.train.Feature(bytes_list=tf.train.BytesList(value=[png])))

    pixels = Feature(name="x/pixels", dtype="uint8", shape=(8, 8, 3), key="image", encoding="image")
    scaled = Feature(name="x/scaled", dtype="float32", shape=(4, 2, 1), key="image", encoding="image")
    ranges = ranges_of(tmp_path / "files", [(0, "range" if index % 10 == 9 else "") for index in range(30)], image)
    prepared = commit(tmp_path, ranges, HeldOut(fraction=0.2, seed=0), (pixels, scaled, LABEL))
    numbered = commit(tmp_path / "numbers", ranges, HeldOut(fraction=0.2, seed=0), FEATURES)
    expected = [y.tolist() for _, y in training(numbered, global_batch_size=6).take(8).as_numpy_iterator()]
    for dataset in (training(prepared, global_batch_size=6), training(prepared, global_batch_size=6)):
        assert dataset.element_spec[0]["pixels"].shape == (6, 8, 8, 3)
        found = list(dataset.take(8).as_numpy_iterator())
        assert [y.tolist() for _, y in found] == expected
        for x, y in found:
            np.testing.assert_array_equal(x["pixels"], np.broadcast_to(y[:, None, None, None], (6, 8, 8, 3)))
            np.testing.assert_allclose(x["scaled"], np.broadcast_to(y[:, None, None, None] / 255, (6, 4, 2, 1)), 1e-5)
    (x, y) = next(set_batches(prepared.storage, prepared.ref, on="validation", batch_size=2).as_numpy_iterator())
    np.testing.assert_array_equal(x["pixels"][:, 0, 0, 0], y)


@pytest.mark.parametrize(
    ("feature", "value", "expected"),
    [
        (Feature(name="x", dtype="bool", shape=(2,), key="k", encoding="int64"), [0, 1], [False, True]),
        (Feature(name="x", dtype="uint8", shape=(2,), key="k", encoding="int64"), [0, 255], [0, 255]),
        (Feature(name="x", dtype="uint64", shape=(1,), key="k", encoding="int64"), [2**62], [2**62]),
        (Feature(name="x", dtype="float32", shape=(2,), key="k", encoding="int64"), [1, -2], [1.0, -2.0]),
        (Feature(name="x", dtype="float16", shape=(2, 1), key="k", encoding="float"), [0.5, 2], [[0.5], [2]]),
        (Feature(name="x", dtype="float64", shape=(), key="k", encoding="float"), [0.5], 0.5),
        (Feature(name="x", dtype="int16", shape=(2,), key="k"), b"\x01\x00\xff\xff", [1, -1]),
        (Feature(name="k", dtype="uint32", shape=()), b"\xff\xff\xff\xff", 2**32 - 1),
    ],
)
def test_values_of_every_kind_are_parsed(feature: Feature, value: Any, expected: Any) -> None:
    import tensorflow as tf

    from baton.tasks.foundation.dataset.shards import parse

    lists = {
        "int64": lambda: tf.train.Feature(int64_list=tf.train.Int64List(value=value)),
        "float": lambda: tf.train.Feature(float_list=tf.train.FloatList(value=value)),
        "raw": lambda: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value])),
    }
    found = parse(tf.constant([record(0, k=lists[feature.encoding]())] * 3), [feature])[feature.name]
    assert (found.dtype.name, found.shape) == (feature.dtype, (3, *feature.shape))
    np.testing.assert_array_equal(found.numpy(), [expected] * 3)


def test_records_in_a_store_are_read_like_local_ones(tmp_path: Path, labels: Callable[..., list[list[int]]]) -> None:
    ranges = ranges_of(tmp_path / "files", [(index, "range" if index % 3 else "") for index in range(12)], record)
    storage = MemoryStorage("external-test/files")
    far = []
    for shard in ranges:
        name = Path(shard.path).name
        storage.write(name, Path(shard.path).read_bytes())
        far.append(shard.model_copy(update={"path": f"memory://external-test/files/{name}"}))
    rule = HeldOut(fraction=0.3, seed=3)
    here, there = commit(tmp_path / "here", ranges, rule), commit(tmp_path / "there", far, rule)
    assert labels(training(there), 9) == labels(training(here), 9)
    # The folder of the files is not part of the content.
    assert there.ref.content_digest == here.ref.content_digest


@pytest.mark.parametrize("layout", [[(9, "")] * 8, [(9, "range")] * 8])
def test_file_changed_after_preparing_is_damage(
    external: Callable[..., Prepared], layout: list[tuple[int, str]]
) -> None:
    prepared = external(layout, HeldOut(fraction=0.2, seed=0))
    file = Path(prepared.manifest.train[0].path)
    data = bytearray(file.read_bytes())
    for at in range(20, len(data), len(data) // 8):
        data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedDataset, match=r"000\.tfrecord.*its manifest says") as damaged, original_read_errors():
        list(training(prepared).take(4))
    assert "delete that folder" not in str(damaged.value)
    file.unlink()
    with pytest.raises(DamagedDataset, match=r"000\.tfrecord is missing"), original_read_errors():
        list(training(prepared).take(4))


def test_digest_covers_everything_that_decides_the_reading() -> None:
    shard = ShardRecord(path="/a/b.tfrecord", examples=2, size=9, crc32c="00000000", begin=3, first=4, records=3)
    rule = HeldOut(fraction=0.5, seed=0)
    digest = content_digest(FEATURES, [shard], [shard], rule)
    assert content_digest(FEATURES, [shard.model_copy(update={"path": "gs://c/b.tfrecord"})], [shard], rule) == digest
    others = [
        content_digest(FEATURES, [shard.model_copy(update=change)], [shard], rule)
        for change in ({"path": "/a/c.tfrecord"}, {"begin": 4}, {"first": 5}, {"records": 4}, {"examples": 1})
    ]
    others += [
        content_digest(FEATURES, [shard], [shard], changed)
        for changed in (
            None,
            HeldOut(fraction=0.4, seed=0),
            HeldOut(fraction=0.5, seed=1),
            HeldOut(fraction=0.5, seed=0, exception=1),
        )
    ]
    for change in ({"key": "other"}, {"encoding": "int64"}, {"dtype": "int32"}):
        others.append(content_digest([FEATURES[0].model_copy(update=change), LABEL], [shard], [shard], rule))
    assert len({digest, *others}) == 1 + len(others)


@given(
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**31 - 1),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
)
def test_held_out_examples_do_not_depend_on_the_ranges(fraction: float, seed: int, cuts: list[int]) -> None:
    total = sum(cuts)
    rule = HeldOut(fraction=fraction, seed=seed, exception=seed % total)
    firsts = np.cumsum([0, *cuts[:-1]]).tolist()
    shards = [
        ShardRecord(path="/a", examples=1, size=1, crc32c="00000000", first=first, records=count)
        for first, count in zip(firsts, cuts, strict=True)
    ]
    held_out = positions_of_part("validation", rule, shards).tolist()
    assert held_out == np.flatnonzero(held_out_mask(rule, 0, total)).tolist()
    assert sorted(held_out + positions_of_part("train", rule, shards).tolist()) == list(range(total))
    plain = held_out_mask(rule.model_copy(update={"exception": None}), 0, total)
    assert np.flatnonzero(plain != held_out_mask(rule, 0, total)).tolist() == [rule.exception]
