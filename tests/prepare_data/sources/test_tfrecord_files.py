"""The source `tfrecord`: existing files of records, indexed in place or copied."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from baton.tasks.foundation.dataset.manifest import load_manifest, manifest_path
from baton.tasks.foundation.errors import DamagedDataset, SourceError
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.prepare_data.sources.tfrecord_files import read_records
from baton.tasks.prepare_data.split import split
from tests.support.tfrecords import PLAIN, file_of, numbers, png, read_epoch, record


def test_records_are_read_in_place(workshop: Any, files: Callable[..., Any]) -> None:
    files(10, 1, 25)
    workshop.write("records/empty", b"")
    workshop.write("records/.hidden", b"no records")
    options = {**PLAIN, "x": {"v": "values", "c": "code", "i": "image"}}
    ref = workshop.prepare("tfrecord", options, classes=36, shard_examples=4)
    # Only the manifest is written.
    assert list(workshop.files()) == [manifest_path(ref.folder)]
    train, validation = read_epoch(workshop, ref)
    assert sorted(numbers(train) + numbers(validation)) == list(range(36))
    assert ref.validation_examples == len(validation) > 0
    in_memory, _ = read_epoch(workshop, ref, in_memory=True)
    assert numbers(in_memory) == numbers(train)
    for x, y in train + validation + in_memory:
        np.testing.assert_array_equal(x["v"], [[y[0], y[0] / 2]])
        np.testing.assert_array_equal(x["c"], [[y[0]] * 3])
        np.testing.assert_array_equal(x["i"], np.broadcast_to(y, (1, 4, 5, 3)))
    assert (x["v"].dtype, x["c"].dtype, x["i"].dtype, y.dtype) == (np.float32, np.int16, np.uint8, np.int64)


def test_copy_has_the_same_examples_in_the_same_parts(workshop: Any, files: Callable[..., Any]) -> None:
    files(10, 1, 25)
    options = {**PLAIN, "x": {"v": "values", "i": "image"}}
    there = workshop.prepare("tfrecord", options, shard_examples=4, validation_fraction=0.3, seed=5)
    copied = workshop.prepare("tfrecord", {**options, "copy": True}, shard_examples=4, validation_fraction=0.3, seed=5)
    assert any("train-00000" in name for name in workshop.files())
    assert sorted(workshop.labels(copied, "validation")) == numbers(read_epoch(workshop, there)[1])
    for example in workshop.examples(copied):
        assert (example["x/i"] == example["y"]).all()
        np.testing.assert_array_equal(example["x/v"], [example["y"], example["y"] / 2])
    assert sorted(workshop.labels(copied)) == sorted(numbers(read_epoch(workshop, there)[0]))


@pytest.mark.parametrize("shard_examples", [1, 3, 7, 1000])
def test_split_and_examples_do_not_depend_on_the_ranges(
    workshop: Any, files: Callable[..., Any], shard_examples: int
) -> None:
    files(10, 1, 14)
    ref = workshop.prepare("tfrecord", PLAIN, shard_examples=shard_examples, validation_fraction=0.2)
    manifest = load_manifest(workshop.storage, ref)
    train, validation = read_epoch(workshop, ref)
    assert sorted(numbers(train) + numbers(validation)) == list(range(25))
    # The same as with shards that Baton writes.
    assert numbers(validation) == [each for held_out, each in split(range(25), fraction=0.2, seed=0) if held_out]
    shards = {(shard.path, shard.begin): shard for shard in (*manifest.train, *manifest.validation)}
    ranges = [shards[key] for key in sorted(shards)]
    # The ranges together are the files, and each range is a valid TFRecord file.
    assert sum(shard.size for shard in ranges) == sum(f.stat().st_size for f in (workshop.code / "records").iterdir())
    for one, other in pairwise(ranges):
        assert other.begin == (one.begin + one.size if one.path == other.path else 0)
        assert other.first == one.first + one.records_held
    for shard in ranges:
        data = Path(shard.path).read_bytes()[shard.begin : shard.begin + shard.size]
        assert len(list(read_records([data], where=""))) == shard.records_held <= shard_examples
        assert f"{google_crc32c.value(data):08x}" == shard.crc32c


def test_ranges_have_about_the_size_of_a_shard(
    workshop: Any, files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    files(30)
    monkeypatch.setattr("baton.tasks.prepare_data.sources.tfrecord_files._RANGE_BYTES", 1000)
    ref = workshop.prepare("tfrecord", PLAIN, validation_fraction=0)
    sizes = [shard.size for shard in load_manifest(workshop.storage, ref).train]
    assert len(sizes) > 4
    assert max(sizes) <= 1000
    assert min(sizes[:-1]) > 700


def test_weights_and_values_of_other_dtypes(workshop: Any) -> None:
    made = [record(each, flag=[each % 2], small=[each], many=[1, 2, 3, 4]) for each in range(6)]
    workshop.write("records", file_of(made, workshop.code))
    spec = {
        "label": {"dtype": "float32"},
        "flag": {"dtype": "bool"},
        "small": {"dtype": "uint8", "shape": [1]},
        "many": {"dtype": "float16", "shape": [2, 2]},
    }
    options = {
        "path": "records",
        "features": spec,
        "x": {"a": "flag", "b": "many"},
        "y": {"out": "small"},
        "sample_weight": "label",
    }
    train, validation = read_epoch(workshop, workshop.prepare("tfrecord", options))
    for x, y, weight in train + validation:
        assert (x["a"].dtype, x["b"].dtype, y["out"].dtype, weight.dtype) == (bool, np.float16, np.uint8, np.float32)
        assert x["a"] == bool(weight % 2)
        np.testing.assert_array_equal(x["b"], [[[1, 2], [3, 4]]])
        assert y["out"] == weight
    assert sorted(float(weight[0]) for _, _, weight in train + validation) == list(range(6))


def test_images_in_records_are_resized(workshop: Any) -> None:
    made = [record(10, image=[png(10, 20, 9)]), record(20), record(30, image=[png(30, 1, 1)])]
    workshop.write("records", file_of(made, workshop.code))
    spec = {"image": {"dtype": "float32", "shape": [6, 6, 1], "encoding": "image"}, "label": {"dtype": "int64"}}
    options = {"path": "records", "features": spec, "x": "image", "y": "label"}
    train, _ = read_epoch(workshop, workshop.prepare("tfrecord", options, validation_fraction=0))
    for x, y in train:
        np.testing.assert_allclose(x, np.broadcast_to(y / 255, (1, 6, 6, 1)), atol=1e-6)


def test_preparing_twice_reads_nothing_and_writes_nothing(
    workshop: Any, files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    files(10, 5)
    first = workshop.prepare("tfrecord", PLAIN)
    before = workshop.files()
    monkeypatch.setattr("baton.tasks.prepare_data.sources.source_files.SourceFile.reading", None)
    assert workshop.prepare("tfrecord", PLAIN) == first.model_copy(update={"already_prepared": True})
    assert workshop.files() == before


def test_moved_files_are_the_same_dataset(workshop: Any, files: Callable[..., Any]) -> None:
    files(10, 5)
    first = workshop.prepare("tfrecord", PLAIN)
    (workshop.code / "records").rename(workshop.code / "elsewhere")
    second = workshop.prepare("tfrecord", {**PLAIN, "path": "elsewhere"})
    assert second.folder != first.folder
    # A run continues with them, because it records the content of its data.
    assert second.content_digest == first.content_digest
    assert sum(map(len, read_epoch(workshop, second))) == 15
    with pytest.raises(DamagedDataset, match="is missing"):
        read_epoch(workshop, first)


def test_rewritten_files_are_indexed_again(workshop: Any, files: Callable[..., Any]) -> None:
    files(10)
    first = workshop.prepare("tfrecord", PLAIN)
    workshop.write("records/part-0", file_of([record(each + 1) for each in range(10)], workshop.code))
    second = workshop.prepare("tfrecord", PLAIN)
    assert not second.already_prepared
    assert second.content_digest != first.content_digest


def test_file_changed_while_reading_is_refused(
    workshop: Any, files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = files(10, 5)
    workshop.emit = lambda _: workshop.write("records/part-0", made["part-1"])
    monkeypatch.setattr("baton.tasks.prepare_data.stage._REPORT_EVERY_EXAMPLES", 12)
    with pytest.raises(SourceError, match=r"part-0: changed while it was being read"):
        workshop.prepare("tfrecord", PLAIN)
    assert workshop.files() == {}


def test_labels_are_checked(workshop: Any, files: Callable[..., Any]) -> None:
    files(10, 5)
    with pytest.raises(SourceError, match=r"part-1, record 2 at byte \d+: label y is 12, outside of \[0, 12\)"):
        workshop.prepare("tfrecord", PLAIN, classes=12)


@pytest.mark.parametrize(
    ("counts", "expected"), [((0, 0), "none of these files has a record"), ((1,), "a single example")]
)
def test_too_few_records_are_refused(
    workshop: Any, files: Callable[..., Any], counts: Sequence[int], expected: str
) -> None:
    files(*counts)
    with pytest.raises(SourceError, match=expected):
        workshop.prepare("tfrecord", PLAIN)


def test_records_in_a_store(workshop: Any, files: Callable[..., Any]) -> None:
    storage = MemoryStorage("tfrecord-test")
    storage.delete("")
    for name, data in files(10, 1, 25).items():
        storage.write(f"data/{name}", data)
    near = workshop.prepare("tfrecord", PLAIN, shard_examples=4)
    for path in ("memory://tfrecord-test/data", "memory://tfrecord-test/*/part-?"):
        far = workshop.prepare("tfrecord", {**PLAIN, "path": path}, shard_examples=4)
        assert far.content_digest == near.content_digest
        assert [numbers(part) for part in read_epoch(workshop, far)] == [
            numbers(part) for part in read_epoch(workshop, near)
        ]
        assert load_manifest(workshop.storage, far).train[0].path == "memory://tfrecord-test/data/part-0"
    storage.write("data/part-1", storage.read("data/part-1")[:-3])
    with pytest.raises(SourceError, match="memory://tfrecord-test/data/part-1: record 0, at byte 0: the file ends"):
        workshop.prepare("tfrecord", {**PLAIN, "path": "memory://tfrecord-test/data"})
