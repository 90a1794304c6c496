"""Invalid input is refused with name, value or record, and a remedy; nothing is written."""

import errno
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.errors import BatonError, RunFileError, SourceChanged, SourceError, StorageError
from baton.tasks.prepare_data import shard_writers

CSV = {"path": "t.csv", "y": "y", "stack": True}
TYPED = {**CSV, "types": {"a": "float64", "y": "int64"}}
NPZ = {"path": "t.npz", "y": "y"}
TEXT = {"path": "t", "length": 4}
LOAD = "data.py:load"


def code(*lines: str) -> dict[str, str]:
    return {"data.py": "import numpy as np\ndef load():\n" + "".join(f"    {line}\n" for line in lines)}


def each(example: str, bad: str) -> dict[str, str]:
    """Return code that yields three valid examples, then an invalid one."""
    return code("for i in range(3):", f"    yield {example}", f"yield {bad}")


OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("digit", {}, {}, ["data.source", "'digit'", "did you mean digits?", "data.py:load"]),
    ("digits", {"size": 3}, {}, ["data.options.size", "3", "available: none"]),
    ("text", {"path": "t", "lenght": 4}, {}, ["data.options.lenght", "4", "did you mean length?"]),
    ("text", {"path": "t"}, {}, ["data.options.length is missing", "bytes per example"]),
    ("text", {"path": "t", "length": "4"}, {}, ["data.options.length", "'4'", "an integer of at least 1"]),
    ("text", {"path": "t", "length": 0}, {}, ["data.options.length", "0", "at least 1"]),
    ("table", {**CSV, "delimiter": "::"}, {}, ["data.options.delimiter", "'::'", "one character"]),
    ("table", {**CSV, "y": "kidn"}, {"t.csv": "kind,a\n1,2\n"}, ["data.options.y", "'kidn'", "mean kind?"]),
    ("table", {**CSV, "x": ["b"]}, {"t.csv": "y,a\n1,2\n"}, ["data.options.x", "'b'", "available: a, y"]),
    ("table", {**CSV, "x": ["y"]}, {"t.csv": "y,a\n1,2\n"}, ["data.options.y", "'y' is in x too", "leave it out"]),
    ("table", CSV, {"t.csv": "y\n1\n"}, ["data.options.x", "names no column", "the files have y"]),
    ("table", CSV, {"t.csv": "y,a\n0,1\n1,?\n"}, ["data.options.x: 'a' is string", "in CSV, types: {a: float64}"]),
    ("npz", {**NPZ, "y": "label"}, {"t.npz": {"x": [1], "labels": [1]}}, ["data.options.y", "'label'", "mean labels?"]),
    ("npz", {"path": "t.npz", "sample_weight": "w"}, {}, ["data.options.sample_weight", "'w'", "set data.options.y"]),
    (LOAD, {"m": 1}, code("yield 1"), ["data.options.m", "1", "has no such parameter", "available: none"]),
    (LOAD, {}, {"data.py": "def load(n):\n    yield n\n"}, ["data.options", "missing", "'n'"]),
]

SOURCES: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    # missing or empty
    ("text", TEXT, {"other": ""}, ["data.options.path", "'t'", "contains: other", "correct the path"]),
    ("text", {**TEXT, "suffix": ".py"}, {"t/a.md": "x"}, ["data.options.path", "no files ending in '.py'"]),
    ("text", TEXT, {"t": "1234"}, ["data.options.length: 4", "4 bytes", "needs 5", "smaller length"]),
    ("table", CSV, {"t.csv": ""}, ["t.csv", "is empty", "header"]),
    ("table", CSV, {"t.csv": "y,a\n"}, ["data.source: table", "has no examples"]),
    ("npz", NPZ, {}, ["data.options.path", "t.npz", "name a .npz file"]),
    ("npz", NPZ, {"t.npz": {"x": np.zeros((0, 2)), "y": np.zeros(0)}}, ["x has shape (0, 2)", "no example"]),
    ("npz", NPZ, {"t.npz": {"x": np.float32(1), "y": np.zeros(1)}}, ["x has shape ()", "no example"]),
    (LOAD, {}, code("yield from ()"), ["data.py:load", "has no examples"]),
    (LOAD, {}, {}, ["data.source", "data.py does not exist"]),
    ("data.py:laod", {}, code("yield 1"), ["data.source", "no function laod", "it has: load"]),
    # not a generator
    (LOAD, {}, code("pass"), ["data.py:load", "returned None", "yield x, (x, y)"]),
    (LOAD, {}, code("return 7"), ["returned a int", "make it a generator function"]),
    (LOAD, {}, code("return {'x': 1}"), ["returned arrays", "x/x int '1'", "arrays of the same length"]),
    # raising
    (LOAD, {}, each("1.0", "1 / 0"), ["ZeroDivisionError", "data.py, line 5", "example 3"]),
    (LOAD, {}, code("raise OSError('gone')"), ["OSError: gone", "data.py, line 3"]),
    (LOAD, {}, {"data.py": "def load(:\n"}, ["data.source", "SyntaxError", "data.py, line 1"]),
    # mixed examples
    (
        LOAD,
        {},
        each("np.zeros(2)", "np.zeros(3)"),
        ["example 3", "x has shape (3,)", "example 0", "(2,)", "the same names"],
    ),
    (LOAD, {}, each("(1.0, 1)", "(1.0, 1.0)"), ["example 3", "y has dtype float32", "int64", "the same names"]),
    (LOAD, {}, each("(1.0, 1)", "1.0"), ["example 3", "has x, but the first", "has x, y"]),
    (LOAD, {}, each("{'a': 1}", "{'b': 1}"), ["example 3", "has x/b", "has x/a"]),
    (
        LOAD,
        {},
        each("np.zeros((8, 2))", "np.zeros((3, 2))"),
        ["example 3", "(3, 2)", "the same names", "if these are batches"],
    ),
    (
        LOAD,
        {},
        each("(np.zeros((8, 2)), [1] * 8)", "(np.zeros((3, 2)), [1] * 3)"),
        ["example 3", "the same names", "if these are batches"],
    ),
    # unusable examples
    (LOAD, {}, each("1.0", "'one'"), ["example 3", "x has dtype string", "has float32"]),
    (LOAD, {}, each("(1.0, 1)", "(1.0, None)"), ["example 3", "y is None", "remove it"]),
    (LOAD, {}, each("[1, 2]", "[[1], [1, 2]]"), ["example 3", "x is ragged", "a single shape"]),
    (LOAD, {}, each("1.0", "(1, 2, 3, 4)"), ["example 3", "a tuple of 4", "yield x"]),
    (LOAD, {}, each("1.0", "np.array(None)"), ["example 3", "x has dtype object"]),
    # NaN and infinity
    (LOAD, {}, each("np.zeros(2)", "np.array([0, np.nan])"), ["example 3", "x contains nan at [1]", "data.allow_nan"]),
    (LOAD, {}, each("1.0", "1e300"), ["example 3", "x contains inf", "data.allow_nan"]),
    ("table", CSV, {"t.csv": "y,a\n0,1\n1,inf\n"}, ["t.csv, row 3", "x contains inf at [0]", "data.allow_nan"]),
    ("table", CSV, {"t.csv": "y,a\n0,1\n1,1e300\n"}, ["t.csv, row 3", "x contains inf"]),
    ("npz", NPZ, {"t.npz": {"x": np.array([1, np.nan]), "y": [0, 1]}}, ["t.npz, example 1", "x contains nan"]),
    # tables
    (
        "table",
        CSV,
        {"t.csv": "y,a\n0,1\n1\n"},
        ["t.csv, row 3", "has 1 cells, but the header has 2", "correct the row"],
    ),
    ("table", TYPED, {"t.csv": "y,a\n0,1\n1,x\n"}, ["t.csv, row 3", "'a' is 'x'", "data.options.types"]),
    ("table", CSV, {"t.csv": "y,a\n0,1\n1,\n"}, ["t.csv, row 3", "'a' is null", "data.options.fill"]),
    ("table", TYPED, {"t.csv": "y,a\n0,1\ncat,1\n"}, ["t.csv, row 3", "'y' is 'cat'", "correct it"]),
    ("table", CSV, {"t.csv": "0,1\n1,2\n"}, ["t.csv, row 1", "'0' is a number", "first row with column names"]),
    ("table", CSV, {"t.csv": "y,a,a\n1,2,3\n"}, ["t.csv, row 1", "'a' occurs twice", "rename one"]),
    ("table", CSV, {"t.csv": b"y,a\n1,2\n1,\xff\n"}, ["t.csv", "UTF-8"]),
    ("table", TYPED, {"t.csv": 'y,a\n1,"2\n'}, ["t.csv, row 2", "'a' is '2", "correct it"]),
    # archives
    ("npz", NPZ, {"t.npz": b"no zip"}, ["t.npz", "not a valid .npz file", "numpy.savez"]),
    ("npz", NPZ, {"t.npz": {"x": [1, 2], "y": [1]}}, ["t.npz", "x 2, y 1", "as many labels as examples"]),
    ("npz", NPZ, {"t.npz": {"x": np.array([1, None]), "y": [1, 2]}}, ["t.npz", "x has dtype object", "float32"]),
    # too few to split
    (LOAD, {}, code("yield 1.0"), ["data.validation_fraction: 0.1", "single example", "set it to 0"]),
]


def refused(workshop: Any, source: str, options: dict[str, Any], files: dict[str, Any], **data: Any) -> BatonError:
    for name, content in files.items():
        workshop.write(name, content)
    with pytest.raises(BatonError) as fault:
        # One example per shard, so that files exist when the invalid example comes.
        workshop.prepare(source, options, shard_examples=1, **data)
    # Finished shards stay if the input is not at fault.
    assert isinstance(fault.value, StorageError) or workshop.files() == {}
    return fault.value


@pytest.mark.parametrize(("source", "options", "files", "expected"), OPTIONS)
def test_invalid_options_are_refused(
    workshop: Any, source: str, options: dict[str, Any], files: dict[str, Any], expected: list[str]
) -> None:
    fault = refused(workshop, source, options, files)
    assert type(fault) is RunFileError
    assert [part for part in expected if part not in str(fault)] == [], str(fault)


@pytest.mark.filterwarnings("error")  # the refusal alone is printed
@pytest.mark.parametrize(("source", "options", "files", "expected"), SOURCES)
def test_invalid_sources_are_refused(
    workshop: Any, source: str, options: dict[str, Any], files: dict[str, Any], expected: list[str]
) -> None:
    fault = refused(workshop, source, options, files)
    assert type(fault) is SourceError
    assert fault.exit_code == 2
    assert [part for part in expected if part not in str(fault)] == [], str(fault)


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ("(1.0, 3)", ["example 3", "label y is 3, outside of [0, 3)", "data.classes"]),
        ("(1.0, -1)", ["example 3", "label y is -1"]),
        ("(1.0, [0, 7])", ["the same names"]),
    ],
)
def test_labels_out_of_range_are_refused(workshop: Any, example: str, expected: list[str]) -> None:
    fault = refused(workshop, LOAD, {}, each("(1.0, i)", example), classes=3)
    assert [part for part in expected if part not in str(fault)] == [], str(fault)


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ("(1.0, 1.0)", ["example 0", "y has dtype float32", "data.classes: 3", "convert it"]),
        ("1.0", ["example 0", "data.classes: 3 needs a single label y", "yield (x, y)"]),
        ("(1.0, {'a': 1})", ["example 0", "has x, y/a"]),
    ],
)
def test_labels_that_are_not_classes_are_refused(workshop: Any, example: str, expected: list[str]) -> None:
    fault = refused(workshop, LOAD, {}, each(example, example), classes=3)
    assert [part for part in expected if part not in str(fault)] == [], str(fault)


def test_damaged_archive_is_refused(workshop: Any) -> None:
    file = workshop.write("t.npz", {"x": np.zeros(1000), "y": np.arange(1000)})
    with zipfile.ZipFile(file) as archive:
        offset = archive.getinfo("x.npy").header_offset + 1000
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    fault = refused(workshop, "npz", NPZ, {"t.npz": bytes(data)})
    assert type(fault) is SourceError
    assert "not a valid .npz file" in str(fault)


def test_source_changed_while_reading_is_refused(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = workshop.write("t.csv", "y,a\n0,1\n1,2\n")
    workshop.emit = lambda _: file.write_text("y,a\n0,1\n1,2\n2,3\n")
    monkeypatch.setattr("baton.tasks.prepare_data.stage._REPORT_EVERY_EXAMPLES", 1)
    fault = refused(workshop, "table", CSV, {})
    assert type(fault) is SourceChanged
    assert "changed while it was being read; run again" in str(fault)


def test_source_with_more_examples_than_counted_is_refused(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.tasks.prepare_data.sources.digits._EXAMPLES", 1000)
    fault = refused(workshop, "digits", {}, {})
    assert type(fault) is SourceError
    assert "has 1000 examples but gave more" in str(fault)


def test_source_with_fewer_examples_than_counted_is_refused(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.tasks.prepare_data.sources.digits._EXAMPLES", 2000)
    fault = refused(workshop, "digits", {}, {})
    assert type(fault) is SourceError
    assert "has 2000 examples but gave 1797" in str(fault)


def test_files_without_read_permission_are_refused(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.write("t", "0123456789")
    opened = Path.open

    def denied(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "t":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    fault = refused(workshop, "text", TEXT, {})
    assert "cannot be read: Permission denied" in str(fault)


def test_too_little_disk_space_is_refused_before_writing(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shard_writers.shutil.disk_usage(workshop.code)
    monkeypatch.setattr(shard_writers.shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    monkeypatch.setattr("baton.tasks.prepare_data.shard_writers.ShardUploads.write", None)
    fault = refused(workshop, "digits", {}, {})
    assert type(fault) is StorageError
    assert "needs 0.5 MiB of disk space, but 0.1 MiB are free; free some" in str(fault)


def test_disk_that_fills_up_is_reported(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    copied = []

    def copy(source: Path, target: Path) -> None:
        copied.append(target)
        if len(copied) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(shutil, "copyfile", copy)
    fault = refused(workshop, LOAD, {}, code("for i in range(9):", "    yield 1.0"))
    assert type(fault) is StorageError
    assert "no space left on the disk; free some" in str(fault)


def test_tensorflow_errors_on_a_full_disk_are_storage_errors(tmp_path: Path) -> None:
    import tensorflow as tf

    with pytest.raises(StorageError, match="free some space"), shard_writers.disk_errors(tmp_path):
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")


@pytest.mark.parametrize("body", ["    sys.exit(0)", "    yield 1.0, 0\n    sys.exit(0)"])
def test_data_function_that_exits_is_an_error(workshop: Any, body: str) -> None:
    """An exit with code 0 would look like success."""
    files = {"data.py": f"import sys\n\n\ndef load():\n{body}\n"}
    assert "SystemExit: 0" in str(refused(workshop, "data.py:load", {}, files))
