"""`tfrecord`: real files of records that others wrote, indexed where they are, or copied."""

import gzip
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tasks.foundation.dataset.manifest import load_manifest, manifest_path
from tasks.foundation.dataset.reading_errors import reading_failures
from tasks.foundation.errors import DamagedDataset, RunFileError, SourceError
from tasks.foundation.storage.memory import MemoryStorage
from tasks.prepare_data.sources.tfrecord_framing import framed
from tasks.prepare_data.split import split

SPEC = {
    "values": {"dtype": "float32", "shape": [2]},
    "label": {"dtype": "int64", "shape": []},
    "code": {"dtype": "int16", "shape": [3], "encoding": "raw"},
    "image": {"dtype": "uint8", "shape": [4, 5, 3], "encoding": "image"},
}
PLAIN: dict[str, Any] = {"path": "records", "features": SPEC, "x": "values", "y": "label"}


def feature(value: Any) -> Any:
    """Integers, floats or bytes as the feature of an example."""
    import tensorflow as tf

    if isinstance(value[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
    if isinstance(value[0], int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))
    return tf.train.Feature(float_list=tf.train.FloatList(value=value))


def png(number: int, height: int = 4, width: int = 5) -> bytes:
    import tensorflow as tf

    return bytes(tf.io.encode_png(np.full((height, width, 3), number % 256, np.uint8)).numpy())


def record(number: int, drop: str = "", **changed: Any) -> bytes:
    """Everything in it tells the number."""
    import tensorflow as tf

    features = {
        "values": [float(number), number / 2],
        "label": [number],
        "code": [np.asarray([number] * 3, "<i2").tobytes()],
        "image": [png(number)],
        **changed,
    }
    lists = {name: feature(value) for name, value in features.items() if name != drop}
    example = tf.train.Example(features=tf.train.Features(feature=lists))
    return bytes(example.SerializeToString(deterministic=True))


def file_of(records: Sequence[bytes], folder: Path, kind: str = "") -> bytes:
    import tensorflow as tf

    file = folder / "made.tfrecord"
    with tf.io.TFRecordWriter(str(file), options=kind) as writer:
        for each in records:
            writer.write(each)
    data = file.read_bytes()
    file.unlink()
    return data


@pytest.fixture
def files(workshop: Any) -> Callable[..., dict[str, bytes]]:
    """Files of so many records each, numbered through, in the folder `records`."""

    def make(*counts: int, write: bool = True) -> dict[str, bytes]:
        made, number = {}, 0
        for index, count in enumerate(counts):
            made[f"part-{index}"] = file_of([record(each) for each in range(number, number + count)], workshop.code)
            number += count
        for name, data in made.items():
            if write:
                workshop.write(f"records/{name}", data)
        return made

    return make


def read(workshop: Any, ref: Any, **changed: Any) -> tuple[list[Any], list[Any]]:
    """All examples of one epoch of training, and of validation, as the reader gives them."""
    from tasks.foundation.dataset import reader

    asked = {"seed": 0, "global_batch_size": 1, "window_shards": 3, "first_batch": 0, **changed}
    with reading_failures():
        dataset = reader.training_dataset(workshop.storage, ref, **asked)
        train = list(islice(dataset.as_numpy_iterator(), ref.train_examples))
        validation = reader.validation_dataset(workshop.storage, ref, batch_size=1)
        return train, list(validation.as_numpy_iterator())


def numbers(examples: Sequence[Any]) -> list[int]:
    return [int(example[1][0]) for example in examples]


def test_records_are_read_where_they_are(workshop: Any, files: Callable[..., Any]) -> None:
    files(10, 1, 25)
    workshop.write("records/empty", b"")
    workshop.write("records/.hidden", b"no records")
    options = {**PLAIN, "x": {"v": "values", "c": "code", "i": "image"}}
    ref = workshop.prepare("tfrecord", options, classes=36, shard_examples=4)
    # Nothing but the manifest is written.
    assert list(workshop.files()) == [manifest_path(ref.folder)]
    train, validation = read(workshop, ref)
    assert sorted(numbers(train) + numbers(validation)) == list(range(36))
    assert ref.validation_examples == len(validation) > 0
    for x, y in train + validation:
        np.testing.assert_array_equal(x["v"], [[y[0], y[0] / 2]])
        np.testing.assert_array_equal(x["c"], [[y[0]] * 3])
        np.testing.assert_array_equal(x["i"], np.broadcast_to(y, (1, 4, 5, 3)))
    assert (x["v"].dtype, x["c"].dtype, x["i"].dtype, y.dtype) == (np.float32, np.int16, np.uint8, np.int64)


def test_a_copy_has_the_same_examples_in_the_same_parts(workshop: Any, files: Callable[..., Any]) -> None:
    files(10, 1, 25)
    options = {**PLAIN, "x": {"v": "values", "i": "image"}}
    there = workshop.prepare("tfrecord", options, shard_examples=4, validation_fraction=0.3, seed=5)
    copied = workshop.prepare("tfrecord", {**options, "copy": True}, shard_examples=4, validation_fraction=0.3, seed=5)
    assert any("train-00000" in name for name in workshop.files())
    assert sorted(workshop.labels(copied, "validation")) == numbers(read(workshop, there)[1])
    for example in workshop.examples(copied):
        assert (example["x/i"] == example["y"]).all()
        np.testing.assert_array_equal(example["x/v"], [example["y"], example["y"] / 2])
    assert sorted(workshop.labels(copied)) == sorted(numbers(read(workshop, there)[0]))


@pytest.mark.parametrize("shard_examples", [1, 3, 7, 1000])
def test_the_split_and_the_examples_do_not_depend_on_the_ranges(
    workshop: Any, files: Callable[..., Any], shard_examples: int
) -> None:
    files(10, 1, 14)
    ref = workshop.prepare("tfrecord", PLAIN, shard_examples=shard_examples, validation_fraction=0.2)
    manifest = load_manifest(workshop.storage, ref)
    train, validation = read(workshop, ref)
    assert sorted(numbers(train) + numbers(validation)) == list(range(25))
    # As where the shards are Baton's own.
    assert numbers(validation) == [each for held_out, each in split(range(25), fraction=0.2, seed=0) if held_out]
    shards = {(shard.path, shard.begin): shard for shard in (*manifest.train, *manifest.validation)}
    ranges = [shards[key] for key in sorted(shards)]
    # The ranges are the files, one after the other, and each is a TFRecord file by itself.
    assert sum(shard.size for shard in ranges) == sum(f.stat().st_size for f in (workshop.code / "records").iterdir())
    for one, other in pairwise(ranges):
        assert other.begin == (one.begin + one.size if one.path == other.path else 0)
        assert other.first == one.first + one.records_held
    for shard in ranges:
        data = Path(shard.path).read_bytes()[shard.begin : shard.begin + shard.size]
        assert len(list(framed([data], where=""))) == shard.records_held <= shard_examples
        assert f"{google_crc32c.value(data):08x}" == shard.crc32c


def test_ranges_are_of_about_the_size_of_a_shard(
    workshop: Any, files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    files(30)
    monkeypatch.setattr("tasks.prepare_data.sources.tfrecord_files._RANGE_BYTES", 1000)
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
    train, validation = read(workshop, workshop.prepare("tfrecord", options))
    for x, y, weight in train + validation:
        assert (x["a"].dtype, x["b"].dtype, y["out"].dtype, weight.dtype) == (bool, np.float16, np.uint8, np.float32)
        assert x["a"] == bool(weight % 2)
        np.testing.assert_array_equal(x["b"], [[[1, 2], [3, 4]]])
        assert y["out"] == weight
    assert sorted(float(weight[0]) for _, _, weight in train + validation) == list(range(6))


def test_images_are_brought_to_one_size(workshop: Any) -> None:
    made = [record(10, image=[png(10, 20, 9)]), record(20), record(30, image=[png(30, 1, 1)])]
    workshop.write("records", file_of(made, workshop.code))
    spec = {"image": {"dtype": "float32", "shape": [6, 6, 1], "encoding": "image"}, "label": {"dtype": "int64"}}
    options = {"path": "records", "features": spec, "x": "image", "y": "label"}
    train, _ = read(workshop, workshop.prepare("tfrecord", options, validation_fraction=0))
    for x, y in train:
        np.testing.assert_allclose(x, np.broadcast_to(y / 255, (1, 6, 6, 1)), atol=1e-6)


def test_preparing_twice_reads_nothing_and_writes_nothing(
    workshop: Any, files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    files(10, 5)
    first = workshop.prepare("tfrecord", PLAIN)
    before = workshop.files()
    monkeypatch.setattr("tasks.prepare_data.sources.source_file.SourceFile.reading", None)
    assert workshop.prepare("tfrecord", PLAIN) == first.model_copy(update={"already_prepared": True})
    assert workshop.files() == before


def test_files_that_were_moved_are_the_same_dataset_in_another_place(workshop: Any, files: Callable[..., Any]) -> None:
    files(10, 5)
    first = workshop.prepare("tfrecord", PLAIN)
    (workshop.code / "records").rename(workshop.code / "elsewhere")
    second = workshop.prepare("tfrecord", {**PLAIN, "path": "elsewhere"})
    assert second.folder != first.folder
    # So a run goes on with them: what it records of its data is the content.
    assert second.content_digest == first.content_digest
    assert sum(map(len, read(workshop, second))) == 15
    with pytest.raises(DamagedDataset, match="is not there"):
        read(workshop, first)


def test_files_that_were_written_anew_are_looked_through_again(workshop: Any, files: Callable[..., Any]) -> None:
    files(10)
    first = workshop.prepare("tfrecord", PLAIN)
    workshop.write("records/part-0", file_of([record(each + 1) for each in range(10)], workshop.code))
    second = workshop.prepare("tfrecord", PLAIN)
    assert not second.already_prepared
    assert second.content_digest != first.content_digest


def test_a_file_that_is_changed_while_it_is_read(
    workshop: Any, files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = files(10, 5)
    workshop.emit = lambda _: workshop.write("records/part-0", made["part-1"])
    monkeypatch.setattr("tasks.prepare_data.in_place._TOLD_EVERY_EXAMPLES", 12)
    with pytest.raises(SourceError, match=r"part-0: changed while it was being read"):
        workshop.prepare("tfrecord", PLAIN)
    assert workshop.files() == {}


@pytest.mark.parametrize(
    ("left", "told"),
    [
        (lambda ends: ends[3] + 5, "record 4, at byte {3}: the file ends within it, after 5 of 12 bytes of its length"),
        (lambda ends: ends[3] + 12, "record 4, at byte {3}: the file ends within it, after 0 of"),
        (lambda ends: ends[4] - 1, "record 4, at byte {3}: the file ends within it"),
        (lambda _: 3, "record 0, at byte 0: the file ends within it, after 3 of 12"),
    ],
)
@pytest.mark.parametrize("copy", [False, True])
def test_a_file_that_is_cut_off_is_named_with_the_record(
    workshop: Any, files: Callable[..., Any], left: Callable[[list[int]], int], told: str, copy: bool
) -> None:
    data = files(3, 6)["part-1"]
    ends = [each.begin + len(each.frame) for each in framed([data], where="")]
    workshop.write("records/part-1", data[: left(ends)])
    with pytest.raises(SourceError) as refused:
        workshop.prepare("tfrecord", {**PLAIN, "copy": copy}, shard_examples=1)
    assert f"records/part-1: {told.format(*ends)}" in str(refused.value)
    assert "write it again, or leave it out" in str(refused.value)
    assert workshop.files() == {}


@pytest.mark.parametrize(
    ("at", "told"), [(0, "its length"), (9, "its length"), (40, "its content"), (-1, "its content")]
)
def test_a_damaged_record_is_named(workshop: Any, files: Callable[..., Any], at: int, told: str) -> None:
    data = bytearray(files(3, 6)["part-1"])
    third = list(framed([bytes(data)], where=""))[2]
    data[third.begin + at + (len(third.frame) if at < 0 else 0)] ^= 1
    workshop.write("records/part-1", bytes(data))
    with pytest.raises(SourceError) as refused:
        workshop.prepare("tfrecord", PLAIN)
    assert f"part-1: record 2, at byte {third.begin}: is damaged: the checksum of {told}" in str(refused.value)


def test_a_foreign_file_is_named(workshop: Any, files: Callable[..., Any]) -> None:
    files(3)
    workshop.write("records/readme.txt", b"These are records of the year before last.")
    with pytest.raises(SourceError, match=r"readme\.txt: is no TFRecord file; take it out of data\.options\.path"):
        workshop.prepare("tfrecord", PLAIN)
    assert workshop.prepare("tfrecord", {**PLAIN, "path": "records/part-*"}).train_examples == 2


@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
def test_compressed_files_are_copied_or_refused(workshop: Any, kind: str) -> None:
    workshop.write("records/a", file_of([record(each) for each in range(20)], workshop.code, kind))
    with pytest.raises(SourceError, match=rf"is compressed \({kind.lower()}\).*data\.options\.copy: true"):
        workshop.prepare("tfrecord", PLAIN)
    ref = workshop.prepare("tfrecord", {**PLAIN, "copy": True}, validation_fraction=0)
    assert sorted(workshop.labels(ref)) == list(range(20))


def test_compressed_files_in_several_pieces_and_cut_off(
    workshop: Any, files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.prepare_data.sources.tfrecord_framing._MOST_AT_ONCE", 50)
    monkeypatch.setattr("tasks.prepare_data.sources.source_file._BLOCK_BYTES", 64)
    plain = files(20, write=False)["part-0"]
    copied = {**PLAIN, "copy": True}
    pieces = gzip.compress(plain[:333]) + gzip.compress(plain[333:])
    workshop.write("records/a", pieces)
    ref = workshop.prepare("tfrecord", copied, validation_fraction=0)
    assert sorted(workshop.labels(ref)) == list(range(20))
    for cut in (pieces[:-3], zlib.compress(plain)[:-1]):
        workshop.write("records/a", cut)
        with pytest.raises(SourceError, match="is compressed and cut off"):
            workshop.prepare("tfrecord", copied)
    workshop.write("records/a", gzip.compress(plain) + b"what is this?")
    with pytest.raises(SourceError, match="is compressed and damaged"):
        workshop.prepare("tfrecord", copied)


def spec(**changed: Any) -> dict[str, Any]:
    return {"features": {**SPEC, **changed}}


KINDS = "code (bytes_list of 1), image (bytes_list of 1), label (int64_list of 1), values (float_list of 2)"
OPTIONS: list[tuple[Mapping[str, Any], list[str]]] = [
    ({"x": "value"}, ["data.options.x: 'value'", "has no such feature", "did you mean values?"]),
    ({"y": {"out": "lable"}}, ["data.options.y.out: 'lable'", "did you mean label?"]),
    ({"y": None, "sample_weight": "label"}, ["data.options.sample_weight: 'label'", "set data.options.y too"]),
    ({"sample_weight": "w"}, ["data.options.sample_weight: 'w'", "has no such feature"]),
    ({"x": {}}, ["data.options.x: {}", "every array needs a name"]),
    ({"x": 3}, ["data.options.x: 3"]),
    ({"features": {}}, ["data.options.features: {}", "what the records hold"]),
    (spec(label={"shape": []}), ["data.options.features.label.dtype is missing"]),
    (spec(label={"dtype": "int64", "shpe": []}), ["data.options.features.label.shpe", "what the records hold"]),
    (spec(label={"dtype": "int65"}), ["features.label.dtype: 'int65'", "did you mean int64?"]),
    (spec(label={"dtype": "complex64"}), ["features.label.dtype: 'complex64'", "encoding values has no such dtype"]),
    (spec(image={**SPEC["image"], "dtype": "int32"}), ["features.image.dtype: 'int32'", "it knows: float32, uint8"]),
    (spec(image={**SPEC["image"], "shape": [4, 5]}), ["features.image.shape: [4, 5]", "[height, width, channels]"]),
    (spec(image={**SPEC["image"], "shape": [4, 5, 2]}), ["features.image.shape: [4, 5, 2]", "1 or 3 channels"]),
    (spec(label={"dtype": "int64", "shape": [0]}), ["features.label.shape: [0]", "at least 1"]),
    ({**spec(lab={"dtype": "int64"}), "y": "lab"}, ["features.lab: {", "record 0 at byte 0", f"'lab'; it has {KINDS}"]),
    (
        {**spec(values={"dtype": "int64", "shape": [2]})},
        ["features.values: {'dtype': 'int64'", "part-0, record 0", "'values' is float_list, not int64_list"],
    ),
    ({"y": "image", **spec(image={"dtype": "int64"})}, ["'image' is bytes_list, not int64_list", "encoding"]),
    ({"x": "label", **spec(label={**SPEC["image"]})}, ["'label' is int64_list, not bytes_list"]),
    (spec(values={"dtype": "float32", "shape": [3]}), ["'values' has 2 values, the shape [3] needs 3"]),
    (
        {"x": "code", **spec(code={"dtype": "int32", "shape": [3], "encoding": "raw"})},
        ["'code' has 6 bytes, int32 [3] needs 12; correct dtype or shape"],
    ),
    ({"pth": "records"}, ["data.options.pth", "did you mean path?", "copy"]),
]


@pytest.mark.parametrize(("changed", "told"), OPTIONS)
def test_options_are_refused(
    workshop: Any, files: Callable[..., Any], changed: Mapping[str, Any], told: list[str]
) -> None:
    files(2)
    with pytest.raises(RunFileError) as refused:
        workshop.prepare("tfrecord", {**PLAIN, **changed})
    assert [part for part in told if part not in str(refused.value)] == [], str(refused.value)
    assert workshop.files() == {}


def test_what_is_no_example_is_told_so(workshop: Any) -> None:
    workshop.write("records", file_of([b"\xff\xff"], workshop.code))
    with pytest.raises(RunFileError, match=r"data\.options\.path: 'records': .*it is no tf\.train\.Example"):
        workshop.prepare("tfrecord", PLAIN)


LATER: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "missing": ({"drop": "values"}, {}, ["it has no feature 'values'; it has code (bytes_list of 1)"]),
    "another kind": ({"values": [1, 2]}, {}, ["'values' is int64_list, not float_list"]),
    "too many": ({"label": [1, 2]}, {}, ["'label' has 2 values, the shape [] needs 1"]),
    "of another length": ({"code": [b"1234"]}, {}, ["'code' has 4 bytes, int16 [3] needs 6"]),
    "no image": ({"image": [b"GIF89a"]}, {}, ["'image' is GIF; write it again as JPEG or PNG"]),
    "cut image": ({"image": "cut"}, {}, ["'image' is PNG, and cut off or damaged"]),
    "NaN": ({"values": [0.0, float("nan")]}, {}, ["x/v holds nan at [1]", "data.allow_nan"]),
}


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("case", LATER)
def test_a_later_record_of_another_kind_is_named(workshop: Any, case: str, copy: bool) -> None:
    changed, data, told = LATER[case]
    if changed.get("image") == "cut":
        changed = {"image": [png(1, 90, 90)[:-40]]}
    made = [record(each) for each in range(5)]
    workshop.write("records", file_of([*made, record(5, **changed), record(6, **changed)], workshop.code))
    options = {**PLAIN, "x": {"v": "values", "c": "code", "i": "image"}, "copy": copy}
    with pytest.raises(SourceError) as refused:
        workshop.prepare("tfrecord", options, shard_examples=1, **data)
    place = f"records, record 5 at byte {sum(16 + len(each) for each in made)}: "
    assert [part for part in (place, *told) if part not in str(refused.value)] == [], str(refused.value)
    assert workshop.files() == {}


@pytest.mark.parametrize(
    ("dtype", "value"), [("uint8", 256), ("uint8", -1), ("int8", 200), ("bool", 2), ("uint64", -5), ("uint32", 2**32)]
)
def test_an_integer_that_does_not_fit_is_not_bent(workshop: Any, dtype: str, value: int) -> None:
    workshop.write("records", file_of([record(0), record(1), record(2, label=[value])], workshop.code))
    options = {**PLAIN, "features": {**SPEC, "label": {"dtype": dtype}}}
    with pytest.raises(SourceError, match=rf"record 2 at byte \d+: 'label' holds {value}, which is no {dtype}"):
        workshop.prepare("tfrecord", options)


def test_labels_are_looked_at(workshop: Any, files: Callable[..., Any]) -> None:
    files(10, 5)
    with pytest.raises(SourceError, match=r"part-1, record 2 at byte \d+: label y is 12, outside \[0, 12\)"):
        workshop.prepare("tfrecord", PLAIN, classes=12)


@pytest.mark.parametrize(("counts", "told"), [((0, 0), "no file there holds a record"), ((1,), "a single example")])
def test_too_few_records(workshop: Any, files: Callable[..., Any], counts: Sequence[int], told: str) -> None:
    files(*counts)
    with pytest.raises(SourceError, match=told):
        workshop.prepare("tfrecord", PLAIN)


def test_records_on_a_store(workshop: Any, files: Callable[..., Any]) -> None:
    storage = MemoryStorage("tfrecord-test")
    storage.delete("")
    for name, data in files(10, 1, 25).items():
        storage.write(f"data/{name}", data)
    near = workshop.prepare("tfrecord", PLAIN, shard_examples=4)
    for path in ("memory://tfrecord-test/data", "memory://tfrecord-test/*/part-?"):
        far = workshop.prepare("tfrecord", {**PLAIN, "path": path}, shard_examples=4)
        assert far.content_digest == near.content_digest
        assert [numbers(part) for part in read(workshop, far)] == [numbers(part) for part in read(workshop, near)]
        assert load_manifest(workshop.storage, far).train[0].path == "memory://tfrecord-test/data/part-0"
    storage.write("data/part-1", storage.read("data/part-1")[:-3])
    with pytest.raises(SourceError, match="memory://tfrecord-test/data/part-1: record 0, at byte 0: the file ends"):
        workshop.prepare("tfrecord", {**PLAIN, "path": "memory://tfrecord-test/data"})
