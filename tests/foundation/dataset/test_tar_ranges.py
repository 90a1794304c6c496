"""Tar files as WebDataset writes them: headers, keys, and the values of an example."""

import io
import tarfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.dataset import Feature, RangeLayout, ShardRecord
from baton.tasks.foundation.dataset.tar_ranges import TarExample, TarFault, examples, members, read_tar
from baton.tasks.foundation.errors import DamagedDataset
from tests.support.tars import example, npy, tar, tar_of
from tests.support.tfrecords import png

FEATURES = (
    Feature(name="x/image", dtype="uint8", shape=(4, 5, 3), key="jpg;png", encoding="image"),
    Feature(name="x/array", dtype="float32", shape=(2,), key="npy", encoding="array"),
    Feature(name="x/text", dtype="string", shape=(), key="txt", encoding="text"),
    Feature(name="x/name", dtype="string", shape=(), key="json.name", encoding="text"),
    Feature(name="x/box", dtype="float32", shape=(2,), key="json.box", encoding="array"),
    Feature(name="y/class", dtype="int64", shape=(), key="cls", encoding="array"),
    Feature(name="y/b", dtype="int16", shape=(), key="json.a.b", encoding="array"),
)


def index(data: bytes) -> list[TarExample]:
    """Return the examples of a file as an index sees them, without their contents."""
    stream = io.BytesIO(data)
    files = members(lambda size: memoryview(stream.read(size)), skip=lambda size: len(stream.read(size)))
    return list(examples(files))


def found(data: bytes) -> dict[str, list[str]]:
    return {each.key: list(each.files) for each in index(data)}


def read(data: bytes, features: Sequence[Feature] = FEATURES, count: int = 1) -> dict[str, Any]:
    record = ShardRecord(
        path="/d/a.tar", examples=count, size=len(data), crc32c="0" * 8, layout=RangeLayout(form="tar")
    )
    return read_tar(memoryview(data), memoryview(b""), record, features)


def test_values_of_all_kinds() -> None:
    values = read(tar(1, 2, 7), count=3)
    assert values["x/image"].tolist() == [png(1), png(2), png(7)]
    np.testing.assert_array_equal(values["x/array"], [[1, 0.5], [2, 1], [7, 3.5]])
    assert values["x/text"].tolist() == [b"text 1", b"text 2", b"text 7"]
    assert values["x/name"].tolist() == [b"n1", b"n2", b"n7"]
    np.testing.assert_array_equal(values["x/box"], [[1, 0.5], [2, 0.5], [7, 0.5]])
    assert values["y/class"].tolist() == values["y/b"].tolist() == [1, 2, 7]
    assert {name: values[name].dtype.name for name in ("x/array", "x/box", "y/class", "y/b")} == {
        "x/array": "float32",
        "x/box": "float32",
        "y/class": "int64",
        "y/b": "int16",
    }


def test_arrays_of_either_order_and_byte_order_are_equal() -> None:
    array = np.arange(6, dtype=np.float64).reshape(2, 3)
    stored = [array, np.asfortranarray(array), array.astype(">f8")]
    data = tar_of((f"{index}.npy", npy(each)) for index, each in enumerate(stored))
    values = read(data, [Feature(name="x", dtype="float64", shape=(2, 3), key="npy", encoding="array")], count=3)
    np.testing.assert_array_equal(values["x"], [array] * 3)


LONG = f"{'long/' * 60}{'n' * 120}"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_headers_of_every_format(form: int) -> None:
    names = ["plain", f"{'p' * 90}/{'q' * 90}"]
    if form != tarfile.USTAR_FORMAT:
        names += [LONG, "späße"]
    data = tar_of(((f"{name}.{suffix}", b"1") for name in names for suffix in ("cls", "TXT")), form)
    assert found(data) == {name: ["cls", "txt"] for name in names}


def test_keys_end_at_the_first_dot_and_others_are_skipped() -> None:
    names = ["./", "./README", "./.hidden.cls", "./a.b/1.left.png", "./a.b/1.cls", "LICENSE", "./a.b/2.cls", "./a.b/"]
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as opened:
        for name in names:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.mtime = 1.5  # pax writes a header for it
            opened.addfile(info)
    assert found(made.getvalue()) == {"./a.b/1": ["left.png", "cls"], "./a.b/2": ["cls"]}


def test_range_of_some_examples_is_read_alone() -> None:
    data = tar(1, 2, 3, 4)
    part = data[index(data)[1].begin : index(data)[2].end]
    assert read(part, count=2)["y/class"].tolist() == [2, 3]
    with pytest.raises(DamagedDataset, match=r"/d/a.tar: 2 examples at byte 0, but 3 are listed"):
        read(part, count=3)


def changed(data: bytes, at: int, new: bytes) -> bytes:
    """Return the tar file with other bytes in its first header, and the checksum that fits."""
    header = bytearray(data[:512])
    header[at : at + len(new)] = new
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header) + data[512:]


PLAIN = tar_of([("d/0001.cls", b"1")])
PAX = tar_of([(f"{LONG}.cls", b"1")], tarfile.PAX_FORMAT)

MALFORMED = {
    "empty": (b"", "at byte 0: the file ends without its end mark"),
    "text": (b"some text", "is not a tar file"),
    "noise": (bytes(range(256)) * 8, "is not a tar file"),
    "gzip": (b"\x1f\x8b" + bytes(600), r"is compressed \(gzip\).*gunzip"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(600), r"is compressed \(zstd\).*unzstd"),
    "cut off in a header": (PLAIN[:1024] + PLAIN[:100], "at byte 1024: the file ends inside of a header"),
    "cut off in a file": (
        tar_of([("a.txt", bytes(900))])[:600],
        r"at byte 0: 'a.txt': the file ends inside of it, after 88 of \d+ bytes",
    ),
    "cut off between files": (PLAIN[:1024], "at byte 1024: the file ends without its end mark"),
    "cut off after a pax header": (PAX[:1024], "at byte 1024: the file ends without its end mark"),
    "flipped bit": (PLAIN[:1024] + b"E" + PLAIN[1:], "at byte 1024: the checksum of a header does not match"),
    "concatenated by cat": (PLAIN + PLAIN, "at byte 1024: files follow the end mark.*tar --concatenate"),
    "symbolic link": (changed(PLAIN, 156, b"2"), "at byte 0: 'd/0001.cls' is a symbolic link.*tar --dereference"),
    "hard link": (changed(PLAIN, 156, b"1"), "is a hard link.*--hard-dereference"),
    "sparse file": (changed(PLAIN, 156, b"S"), "is a sparse file.*without --sparse"),
    "sparse file of pax": (
        tar_of([("a.cls", b"1")], tarfile.PAX_FORMAT, pax_headers={"GNU.sparse.major": "1"}),
        "at byte 1024: 'a.cls' is a sparse file",
    ),
    "device": (changed(PLAIN, 156, b"3"), "is of type b'3'.*put only files into the tar"),
    "negative size": (changed(PLAIN, 124, b"-0000000001\0"), "the size in a header is b'-0000000001"),
    "size of ones": (changed(PLAIN, 124, b"\xff" * 12), "the size in a header is"),
    "huge size": (changed(PLAIN, 124, b"\x80" + bytes(6) + b"\xff" * 5), r"has \d+ bytes, more than 536870912"),
    "huge pax header": (changed(PAX, 124, b"77777777777\0"), "a header of 8589934591 bytes is too long"),
    "many pax headers": (PAX[:1024] * 2000, r"at byte 1048\d+: a header of 104\d+ bytes is too long"),
    "damaged pax header": (PAX[:512] + b"x" + PAX[513:], "a pax header is damaged"),
    "endless pax header": (PAX[:512] + b"0" + PAX[513:], "a pax header is damaged"),
    "pax size": (
        tar_of([("a.cls", b"1")], tarfile.PAX_FORMAT, pax_headers={"size": "1e3"}),
        "the size in a header is '1e3'",
    ),
    "two files of one suffix": (
        tar_of([("a.cls", b"1"), ("a.CLS", b"2")]),
        "example 'a' at byte 0: has two files cls; give each example a key of its own",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_tar_is_refused_by_place(name: str) -> None:
    data, text = MALFORMED[name]
    with pytest.raises(TarFault, match=text):
        found(data)


CONTENTS: dict[str, tuple[dict[str, bytes], str]] = {
    "no class": ({"cls": b"cat"}, r"its class is b'cat', which is no integer"),
    "class of 65 bits": ({"cls": b"9223372036854775808"}, r"its class is b'9223372036854775808'"),
    "no JSON": ({"json": b"{"}, r"its json is not JSON"),
    "deep JSON": ({"json": b"[" * 100_000}, r"its json is not JSON"),
    "JSON of many lists": ({"json": b"[" + b"[]," * 300_000 + b"0]"}, r"its json is not JSON .*200000 lists"),
    "no key": ({"json": b'{"a": {"c": 1}}'}, r"has no json.name, only keys a; add it"),
    "key of a number": ({"json": b'{"name": "n", "box": [1, 2], "a": 3}'}, r"has no json.a.b, only an integer \(3\)"),
    "null": ({"json": b'{"name": null}'}, r"json.name is null; write a value"),
    "ragged": ({"json": b'{"name": "n", "box": [[1], [1, 2]]}'}, r"json.box is a ragged list, not float32\[2\]"),
    "other length": ({"json": b'{"name": "n", "box": [1, 2, 3]}'}, r"json.box is a list of shape \[3\]"),
    "fraction": (
        {"json": b'{"name": "n", "box": [1, 2], "a": {"b": 1.5}}'},
        r"json.a.b is a number \(1.5\), not int16\[\].*set data.options.dtypes: \{json.a.b: float32\}",
    ),
    "too large": ({"json": b'{"name": "n", "box": [1, 2], "a": {"b": 40000}}'}, r"json.a.b is an integer \(40000\)"),
    "text that is no UTF-8": ({"txt": b"\xff"}, "its text is not UTF-8"),
    "pickled array": ({"npy": npy(np.asarray([{}], object))}, "npy has dtype object.*pickled objects are not read"),
    "other shape": ({"npy": npy(np.zeros(3, np.float32))}, r"npy is float32\[3\], not float32\[2\]"),
    "other dtype": ({"npy": npy(np.zeros(2))}, r"npy is float64\[2\], not float32\[2\]"),
    "no array": ({"npy": b"\x93NUMPY\x01"}, "its npy is damaged"),
    "array that is cut off": ({"npy": npy(np.zeros(2, np.float32))[:-1]}, "its npy has 135 bytes, which do not fit"),
    "array with half a header": ({"npy": npy(np.zeros(2, np.float32)).replace(b"}", b" ")}, "its npy is damaged"),
    "array of negative shape": (
        {"npy": npy(np.zeros((2, 1), np.float32)).replace(b"(2, 1)", b"(-2,-1)")},
        "its npy has 137 bytes, which do not fit",
    ),
    "huge array": (
        {"npy": npy(np.zeros(2, np.float32)).replace(b"(2,), }     ", b"(9**99,), }")},
        "its npy",
    ),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_malformed_content_is_refused_by_example(name: str) -> None:
    files, text = CONTENTS[name]
    data = tar_of([(f"k/1.{suffix}", content) for suffix, content in {**example(1), **files}.items()])
    with pytest.raises(DamagedDataset, match=f"^/d/a.tar: example 'k/1' at byte 0: .*{text}"):
        read(data)


def test_example_without_a_file_is_named_with_those_that_it_has() -> None:
    with pytest.raises(
        DamagedDataset, match=r"example 'd/0002' at byte 2048: has no npy, only cls; .*follow each other"
    ):
        read(tar(1, suffixes=["cls", "npy"])[:2048] + tar(2, suffixes=["cls"]), FEATURES[1:2], count=2)
