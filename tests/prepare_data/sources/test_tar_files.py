"""The source `tar`: examples in tar files, indexed in place or copied."""

import json
import tarfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from baton.tasks.foundation.contracts.dataset import Feature
from baton.tasks.foundation.dataset.manifest import load_manifest, manifest_path
from baton.tasks.foundation.errors import BatonError, DamagedDataset, InvalidInput
from tests.fakes.gcs.server import FakeGcs, FaultPlan
from tests.support.tars import example, members_of, npy, tar, tar_of
from tests.support.tfrecords import numbers, png, read_epoch

OPTIONS = {
    "path": "shards/*.tar",
    "x": {"image": "jpg;png", "array": "npy", "text": "txt", "box": "json.box"},
    "y": "cls",
    "sample_weight": "json.weight",
    "size": [4, 5],
}


def test_examples_are_read_in_place(workshop: Any) -> None:
    workshop.write("shards/a.tar", tar(*range(10)))
    workshop.write("shards/b.tar", tar(*range(10, 15)))
    workshop.write("shards/.c.tar", b"hidden")
    ref = workshop.prepare("tar", OPTIONS, classes=15, shard_examples=4)
    # Only the manifest is written.
    assert list(workshop.files()) == [manifest_path(ref.folder)]
    train, validation = read_epoch(workshop, ref)
    assert sorted(numbers(train) + numbers(validation)) == list(range(15))
    assert ref.validation_examples == len(validation) > 0
    for x, y, weight in train + validation:
        (number,) = y
        np.testing.assert_array_equal(x["image"], np.full((1, 4, 5, 3), number))
        np.testing.assert_array_equal(x["array"], [[number, number / 2]])
        np.testing.assert_array_equal(x["box"], [[number, 0.5]])
        assert (x["text"].tolist(), weight.tolist()) == ([f"text {number}".encode()], [number / 4])
    assert [x["image"].dtype, x["array"].dtype, x["box"].dtype, y.dtype] == [np.uint8, np.float32, np.float32, np.int64]
    in_memory, _ = read_epoch(workshop, ref, in_memory=True)
    assert numbers(in_memory) == numbers(train)


def test_ranges_hold_whole_examples_of_each_file(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [workshop.write(f"shards/{name}.tar", tar(*some)) for name, some in (("a", range(7)), ("b", range(7, 8)))]
    for shard_examples, counts in ((3, [3, 3, 1, 1]), (100, [7, 1]), (None, [2, 2, 2, 1, 1])):
        # An example has 5 files, each with its header, and its image takes one block.
        monkeypatch.setattr("baton.tasks.prepare_data.sources.tar_files._RANGE_BYTES", 2 * 5 * 1024)
        ref = workshop.prepare("tar", OPTIONS, shard_examples=shard_examples, validation_fraction=0)
        shards = load_manifest(workshop.storage, ref).train
        assert [shard.records_held for shard in shards] == counts
        assert {shard.path for shard in shards} == {str(file) for file in files}
        for one, other in pairwise(shards):
            assert other.first == one.first + one.records_held
            assert other.begin == (one.begin + one.size if one.path == other.path else 0)
        for shard in shards:
            data = Path(shard.path).read_bytes()[shard.begin : shard.begin + shard.size]
            assert f"{google_crc32c.value(data):08x}" == shard.crc32c


def test_copy_has_the_same_examples_in_the_same_parts(workshop: Any) -> None:
    workshop.write("shards/a.tar", tar(*range(20)))
    there = workshop.prepare("tar", OPTIONS, validation_fraction=0.3)
    copied = workshop.prepare("tar", {**OPTIONS, "copy": True}, validation_fraction=0.3, shard_examples=4)
    assert any("train-00000" in name for name in workshop.files())
    parts = [[sorted(numbers(part)) for part in read_epoch(workshop, ref)] for ref in (there, copied)]
    assert parts[0] == parts[1]
    for x, y, weight in read_epoch(workshop, copied)[0]:
        (number,) = y
        np.testing.assert_array_equal(x["image"], np.full((1, 4, 5, 3), number))
        assert (x["text"].tolist(), weight.tolist()) == ([f"text {number}".encode()], [number / 4])


def test_changed_file_is_refused_by_name(workshop: Any) -> None:
    file = workshop.write("shards/a.tar", tar(*range(8)))
    ref = workshop.prepare("tar", OPTIONS, shard_examples=4)
    data = bytearray(file.read_bytes())
    data[data.index(b"text 3")] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedDataset, match=rf"{file}.*restore the original file"):
        read_epoch(workshop, ref)


def test_files_on_cloud_storage_survive_damage_in_transit(workshop: Any, cloud: FakeGcs) -> None:
    cloud.store.put("bucket", "shards/a.tar", tar(*range(8), suffixes=["cls", "json"]))
    options = {"path": "gs://bucket/shards/*.tar", "x": "json.box", "y": "cls"}

    def prepare() -> Any:
        workshop.storage.delete("")
        cloud.reset_counters()
        return workshop.prepare("tar", options, shard_examples=3)

    sound = prepare()
    requests = cloud.count("object.media")
    assert requests >= 3, "the first example, the index, the ranges"
    # A header in the first request, a label in one in between, and the end of the file in the last.
    for skip, fraction in ((0, 0.05), (requests // 2, 0.127), (requests - 1, 0.9)):
        damage = {"fault": "corrupt-download", "fraction": fraction}
        cloud.faults = FaultPlan.scripted([{"match": {"kind": "object.media"}, "skip": skip, "times": 1, **damage}])
        assert prepare().content_digest == sound.content_digest
        assert len(cloud.fault_run.log) == 1
    cloud.faults = FaultPlan.scripted([])
    train, validation = read_epoch(workshop, prepare())
    assert sorted(numbers(train) + numbers(validation)) == list(range(8))


def test_preparing_twice_reads_no_content(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.write("shards/a.tar", tar(1, 2, 3))
    first = workshop.prepare("tar", OPTIONS)
    monkeypatch.setattr("baton.tasks.prepare_data.sources.tar_files.planned_ranges", None)
    assert workshop.prepare("tar", OPTIONS) == first.model_copy(update={"already_prepared": True})


def test_features_follow_from_the_first_example(workshop: Any) -> None:
    document = {"i": 1, "f": 1.5, "b": True, "s": "a", "n": [[1, 2], [3, 4]], "t": ["a", "b"], "price": 3}
    files = {"meta.JSON": json.dumps(document).encode(), "a.npy": npy(np.zeros((2, 1), ">i2")), "cls": b"-1"}
    workshop.write("shards/a.tar", tar_of((f"1.{suffix}", data) for suffix, data in files.items()))
    names = {key: f"meta.json.{key}" for key in document}
    options = {
        "path": "shards/a.tar",
        "x": {**names, "a": "a.npy"},
        "y": "cls",
        "dtypes": {"meta.json.price": "float32"},
    }
    ref = workshop.prepare("tar", options, validation_fraction=0)
    array = {"encoding": "array"}
    assert load_manifest(workshop.storage, ref).features == (
        Feature(name="x/a", dtype="int16", shape=(2, 1), key="a.npy", **array),
        Feature(name="x/b", dtype="bool", shape=(), key="meta.json.b", **array),
        Feature(name="x/f", dtype="float32", shape=(), key="meta.json.f", **array),
        Feature(name="x/i", dtype="int64", shape=(), key="meta.json.i", **array),
        Feature(name="x/n", dtype="int64", shape=(2, 2), key="meta.json.n", **array),
        Feature(name="x/price", dtype="float32", shape=(), key="meta.json.price", **array),
        Feature(name="x/s", dtype="string", shape=(), key="meta.json.s", encoding="text"),
        Feature(name="x/t", dtype="string", shape=(2,), key="meta.json.t", encoding="text"),
        Feature(name="y", dtype="int64", shape=(), key="cls", **array),
    )


REFUSED_OPTIONS: list[tuple[Mapping[str, Any], str]] = [
    ({"x": "jpeg"}, "data.options.x: 'jpeg': .*a.tar: example 'd/0001' at byte 0 has no such feature; .*png"),
    ({"y": {"out": "class"}}, r"data.options.y.out: 'class': is not read; name the suffix of a file, of these: jpg, "),
    ({"y": "pth"}, "data.options.y: 'pth': is not read; .*your own data.py:load"),
    ({"x": "png;txt"}, "data.options.x: 'png;txt': has files of different kinds"),
    ({"size": None}, r"data.options.size is missing: data.options.x: png is an image; set its \[height, width\]"),
    ({"size": [4]}, r"data.options.size: \[4\]"),
    ({"y": "json"}, "data.options.y: 'json': .*json is an object, which is no array; .*such as json.a"),
    (
        {"y": "json.a.c"},
        "data.options.y: 'json.a.c': .*a.tar: example 'd/0001' .*: has no json.a.c, only keys b",
    ),
    (
        {"y": "json.mixed"},
        r"data.options.y: 'json.mixed': .*a.tar: example 'd/0001' .*: json.mixed is a list of",
    ),
    ({"y": None, "sample_weight": "cls"}, "data.options.sample_weight: 'cls': weights need labels"),
    ({"dtypes": {"json.w": "float32"}}, "data.options.dtypes: 'json.w': .*, but none"),
    ({"y": "json.weight", "dtypes": {"json.weight": "float"}}, "data.options.dtypes.json.weight: 'float' is no dtype"),
    ({"y": "json.weight", "dtypes": {"json.weight": "int8"}}, "json.weight is a number.* not int8"),
    ({"path": "shards/*.tgz"}, "data.options.path: .*no files"),
    ({"label": "cls"}, "data.options.label: 'cls': the source tar does not have this option"),
]


@pytest.mark.parametrize(("changed", "text"), REFUSED_OPTIONS)
def test_invalid_tar_options_are_refused(workshop: Any, changed: Mapping[str, Any], text: str) -> None:
    document = {"a": {"b": 1}, "mixed": [1, "a"], "weight": 0.25}
    workshop.write("shards/a.tar", tar(1, 2, json=json.dumps(document).encode()))
    with pytest.raises(InvalidInput, match=text):
        workshop.prepare("tar", {"path": "shards", "x": "png", "y": "cls", "size": [4, 5], **changed})
    assert workshop.files() == {}


def with_second(**files: bytes) -> bytes:
    """Return a tar file whose second example has other contents."""
    made = {"d/0001": example(1), "d/0002": {**example(2), **files}}
    return members_of(made)


def without(*suffixes: str) -> bytes:
    made = {"d/0001": example(1), "d/0002": {key: data for key, data in example(2).items() if key not in suffixes}}
    return members_of(made)


def malformed(name: str) -> bytes:
    sound = tar(1, 2)
    return {
        "empty": lambda: b"",
        "gzip": lambda: b"\x1f\x8b" + sound,
        "text": lambda: b"a,b\n1,2\n" * 100,
        "no example": lambda: tar_of([("README", b"hello")]),
        "cut off": lambda: sound[: sound.index(b"text 2") + 3],
        "two in one": lambda: sound + sound,
        "link": lambda: sound[:-10240] + tar_of([("d/0003.png", b"")], type=tarfile.SYMTYPE, linkname="0002.png"),
        "file is missing": lambda: without("cls"),
        "key is missing": lambda: with_second(json=b'{"weight": 1}'),
        "image is damaged": lambda: with_second(png=example(2)["png"][:40]),
        "image is GIF": lambda: with_second(png=b"GIF89a"),
        "other dtype": lambda: with_second(npy=npy(np.zeros(2))),
        "pickle": lambda: with_second(npy=npy(np.asarray([{}, {}], object))),
        "label is text": lambda: with_second(cls=b"cat"),
        "label is no class": lambda: with_second(cls=b"10"),
        "NaN": lambda: with_second(npy=npy(np.asarray([0, np.nan], np.float32))),
    }[name]()


MALFORMED = {
    "empty": "none of these files has an example",
    "gzip": "is compressed .gzip.*decompress it once: gunzip",
    "text": "is not a tar file; exclude it from data.options.path",
    "no example": "none of these files has an example",
    "cut off": "at byte 7168: 'd/0002.txt': the file ends inside of it, after 3 of 6 bytes",
    "two in one": "files follow the end mark",
    "link": "'d/0003.png' is a symbolic link, which has no content here; write the file itself: tar --dereference",
    "file is missing": "example 'd/0002' at byte 5120: has no cls, only png, txt, npy, json; add the file",
    "key is missing": "example 'd/0002' at byte 5120: has no json.box, only keys weight",
    "image is damaged": "a.tar, row 1: 'jpg;png' is a PNG that is truncated or damaged",
    "image is GIF": "a.tar, row 1: 'jpg;png' is GIF; save it as JPEG or PNG",
    "other dtype": r"example 'd/0002' at byte 5120: npy is float64\[2\], not float32\[2\] as in the first example",
    "pickle": "its npy has dtype object; .*pickled objects are not read",
    "label is text": "its class is b'cat', which is no integer",
    "label is no class": r"a.tar, row 1: label y is 10, outside of \[0, 10\)",
    "NaN": r"a.tar, row 1: x/array contains nan at \[1\]",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_tar_files_are_refused(workshop: Any, name: str) -> None:
    file = workshop.write("shards/a.tar", malformed(name))
    with pytest.raises(InvalidInput, match=MALFORMED[name]) as refused:
        workshop.prepare("tar", OPTIONS, classes=10)
    assert str(file) in str(refused.value) or name in {"empty", "no example"}
    assert workshop.files() == {}


@pytest.mark.parametrize("names", [("2024.01.jpg", "2024.01.cls"), ("a.png", "a.cls", "b.v2.png", "b.cls")])
def test_dots_in_names_are_explained(workshop: Any, names: tuple[str, ...]) -> None:
    workshop.write("shards/a.tar", tar_of([(name, b"1" if name.endswith("cls") else png(1)) for name in names]))
    with pytest.raises(BatonError, match="a suffix begins at the first dot of a file's name, so write no other dots"):
        workshop.prepare("tar", {"path": "shards", "x": "jpg;png", "y": "cls", "size": 4})


def test_names_without_more_dots_are_read(workshop: Any) -> None:
    """What the message above says helps."""
    workshop.write("shards/a.tar", tar_of([("2024_01.png", png(1)), ("2024_01.cls", b"1")]))
    options = {"path": "shards", "x": "jpg;png", "y": "cls", "size": 4}
    assert workshop.prepare("tar", options, validation_fraction=0).train_examples == 1
