"""The source `table`: Parquet and Arrow files in place, copies, CSV, sequences; and what is refused."""

import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, ipc, parquet

from baton.tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef
from baton.tasks.foundation.dataset.columns import read_columns
from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.errors import BatonError, RunFileError, SourceError

ROWS = 40
Write = Callable[[pa.Table, Path], None]


def people(rows: int = ROWS) -> pa.Table:
    index = np.arange(rows)
    cities = pa.DictionaryArray.from_arrays(pa.array(index % 2, pa.int8()), ["Rom", "Bern", "unused"])
    return pa.table(
        {
            "age": index.astype(np.float64),
            "height": index.astype(np.int32) * 2,
            "city": cities,
            "name": [f"n{number}" for number in index],
            "point": pa.FixedSizeListArray.from_arrays(np.arange(rows * 2, dtype=np.float32), 2),
            "words": [list(range(number % 3 + 1)) for number in index],
            "inner": [{"deep": int(number)} for number in index],
            "kind": index % 3,
            "weight": np.ones(rows, np.int32),
        }
    )


def stream(table: pa.Table, file: Path) -> None:
    with ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


WRITERS: dict[str, Write] = {
    ".parquet": lambda table, file: parquet.write_table(table, file, row_group_size=7),
    ".feather": lambda table, file: feather.write_feather(table, str(file), chunksize=7),
    ".arrow": stream,
}


def write(workshop: Any, name: str, table: pa.Table) -> Path:
    file: Path = workshop.code / name
    file.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[file.suffix](table, file)
    return file


def values_in_place(workshop: Any, ref: DatasetRef) -> tuple[DatasetManifest, dict[str, Any]]:
    """Read all ranges of the training part as training does."""
    manifest = load_manifest(workshop.storage, ref)
    found: dict[str, list[Any]] = {feature.name: [] for feature in manifest.features}
    for shard in manifest.train:
        assert shard.layout is not None
        data = Path(shard.path).read_bytes()
        body = memoryview(data)[shard.begin : shard.begin + shard.size]
        head = memoryview(data)[shard.layout.head_begin : shard.layout.head_begin + shard.layout.head_size]
        for name, values in read_columns(body, head, shard, manifest.features).items():
            found[name] += list(values)
    return manifest, {name: np.array(values) for name, values in found.items()}


ALL = {"path": "t", "x": ["age", "city", "name", "point", "inner.deep"], "y": "kind", "weight": "weight"}


@pytest.mark.parametrize("suffix", WRITERS)
def test_files_stay_in_place_and_give_all_columns(workshop: Any, suffix: str) -> None:
    write(workshop, f"t/0{suffix}", people().slice(0, 25))
    write(workshop, f"t/1{suffix}", people().slice(25))
    ref = workshop.prepare("table", ALL, validation_fraction=0, shard_examples=10)
    manifest, found = values_in_place(workshop, ref)
    assert [(each.name, each.dtype, each.shape) for each in manifest.features] == [
        ("x/age", "float32", ()),
        ("x/city", "int64", ()),
        ("x/name", "string", ()),
        ("x/point", "float32", (2,)),
        ("x/inner.deep", "int64", ()),
        ("y", "int64", ()),
        ("sample_weight", "float32", ()),
    ]
    assert manifest.features[1].vocabulary == ("Rom", "Bern", "unused")
    index = np.arange(ROWS)
    np.testing.assert_array_equal(found["x/age"], index)
    np.testing.assert_array_equal(found["x/city"], index % 2)
    assert found["x/name"].tolist() == [f"n{number}".encode() for number in index]
    np.testing.assert_array_equal(found["x/point"], np.arange(ROWS * 2).reshape(-1, 2))
    np.testing.assert_array_equal(found["x/inner.deep"], index)
    np.testing.assert_array_equal(found["y"], index % 3)
    # Groups of 7 rows, joined up to 10 examples; of 25 rows the last group has 4, of 15 rows 1.
    assert [shard.examples for shard in manifest.train] == [7, 7, 7, 4, 7, 8]
    assert all(shard.path.startswith(str(workshop.code)) for shard in manifest.train)


def test_a_changed_file_is_another_dataset(workshop: Any) -> None:
    options = {"path": "t.parquet", "x": ["age"], "y": "kind"}
    write(workshop, "t.parquet", people())
    first = workshop.prepare("table", options)
    assert workshop.prepare("table", options).already_prepared
    write(workshop, "t.parquet", people(ROWS + 1))
    assert workshop.prepare("table", options).content_digest != first.content_digest


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_copy_has_the_examples_that_stay_in_place(workshop: Any, suffix: str) -> None:
    write(workshop, f"t{suffix}", people())
    options = {**ALL, "path": f"t{suffix}"}
    _, there = values_in_place(workshop, workshop.prepare("table", options, validation_fraction=0))
    copied = workshop.examples(workshop.prepare("table", {**options, "copy": True}, validation_fraction=0))
    copied.sort(key=lambda example: example["x/age"])
    for name, values in there.items():
        np.testing.assert_array_equal(np.array([example[name] for example in copied]), values, name)


def test_stacked_columns_are_one_array(workshop: Any) -> None:
    write(workshop, "t.parquet", people())
    options = {"path": "t.parquet", "x": ["age", "height"], "y": "kind", "stack": True}
    manifest, found = values_in_place(workshop, workshop.prepare("table", options, validation_fraction=0))
    assert (manifest.features[0].dtype, manifest.features[0].shape) == ("float32", (2,))
    np.testing.assert_array_equal(found["x"][:, 1], np.arange(ROWS) * 2)


def test_lists_of_any_length_are_padded_or_packed(workshop: Any) -> None:
    write(workshop, "t.parquet", people())
    options = {"path": "t.parquet", "x": "words", "y": "kind"}
    padded = workshop.examples(workshop.prepare("table", options, validation_fraction=0, pad={"x": {"length": 3}}))
    assert min(example["x"].tolist() for example in padded) == [0, 0, 0]
    assert max(example["x"].tolist() for example in padded) == [0, 1, 2]
    ref = workshop.prepare("table", {"path": "t.parquet", "x": "words"}, validation_fraction=0, pack={"length": 8})
    assert sum((example["x/segment_ids"] > 0).sum() for example in workshop.examples(ref)) == 79


def test_lists_with_a_known_length_stay_in_place(workshop: Any) -> None:
    write(workshop, "t.parquet", pa.table({"e": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]}))
    options = {"path": "t.parquet", "x": "e", "y": "y", "shapes": {"e": [2]}}
    _, found = values_in_place(workshop, workshop.prepare("table", options, validation_fraction=0))
    assert found["x"].tolist() == [[1, 2], [3, 4]]


def test_names_of_folders_are_columns(workshop: Any) -> None:
    for year, land in ((2025, "CH"), (2026, "IT")):
        write(workshop, f"t/year={year}/land={land}/a.parquet", people(5))
    options = {"path": "t", "x": ["age", "year", "land"], "y": "kind"}
    manifest, found = values_in_place(workshop, workshop.prepare("table", options, validation_fraction=0))
    assert [each.dtype for each in manifest.features] == ["float32", "int64", "string", "int64"]
    assert found["x/year"].tolist() == [2025] * 5 + [2026] * 5
    assert found["x/land"].tolist() == [b"CH"] * 5 + [b"IT"] * 5


@pytest.mark.parametrize("copy", [False, True])
def test_a_column_in_folder_and_file_is_compared(workshop: Any, copy: bool) -> None:
    for flag in (False, True):
        table = pa.table({"a": [1, 2], "flag": [flag, flag], "y": [0, 1]})
        write(workshop, f"t/flag={str(flag).lower()}/0.parquet", table)
    options = {"path": "t", "x": ["a", "flag"], "y": "y"}
    _, found = values_in_place(workshop, workshop.prepare("table", options, validation_fraction=0))
    assert (found["x/flag"].dtype, found["x/flag"].tolist()) == (np.bool_, [False, False, True, True])
    write(workshop, "t/flag=true/1.parquet", pa.table({"a": [1, 2], "flag": [True, False], "y": [0, 1]}))
    fault = refused_again(workshop, {**options, "copy": copy})
    assert "flag=true/1.parquet, row 1: the column 'flag' has False, but the folder says 'true'" in str(fault)


def test_null_folders_are_filled_or_refused(workshop: Any) -> None:
    null = "__HIVE_DEFAULT_PARTITION__"
    for land, year in ((null, 2), ("IT", null)):
        write(workshop, f"t/land={land}/year={year}/0.parquet", people(1))
    options = {"path": "t", "x": ["age", "land", "year"], "y": "kind"}
    fault = refused(workshop, options)
    assert f"land=IT/year={null}/0.parquet: its folder says that 'year' is null; set data.options.fill" in str(fault)
    options |= {"fill": {"year": 0, "land": "none"}}
    _, found = values_in_place(workshop, workshop.prepare("table", options, validation_fraction=0))
    assert found["x/year"].tolist() == [0, 2]
    assert found["x/land"].tolist() == [b"IT", b"none"]
    fault = refused_again(workshop, {**options, "vocabulary": {"land": ["none", "CH"]}})
    assert "its folder says 'IT' for 'land', which is not in its vocabulary; set data.options.vocabulary" in str(fault)
    write(workshop, "t/0.parquet", people(1))
    assert "t/0.parquet: its folders do not say 'land'" in str(refused_again(workshop, options))


def test_nulls_of_any_column_are_filled(workshop: Any) -> None:
    codes = pa.DictionaryArray.from_arrays([0, 1, None, 2], ["u", None, "v"])
    filled: dict[str, tuple[pa.Array, Any, list[Any]]] = {
        "truth": (pa.array([True, None, False, None]), False, [True, False, False, False]),
        "one": (pa.array([True, None, False, None]), 1, [True, True, False, True]),
        "codes": (codes, "v", [0, 1, 1, 1]),
        "views": (pa.array(["a", None, "c", None], pa.string_view()), "d", [b"a", b"d", b"c", b"d"]),
        "pairs": (
            pa.array([[1, 2], None, [3, None], None], pa.list_(pa.int8(), 2)),
            7,
            [[1, 2], [7, 7], [3, 7], [7, 7]],
        ),
        "lists": (pa.array([[1.0], None, [2.0], None]), 5, [[1], [5], [2], [5]]),
        "texts": (pa.nulls(4), "t", [b"t"] * 4),
        "numbers": (pa.nulls(4), 1.5, [1.5] * 4),
        "half": (pa.array([1, None, 2, None], pa.float16()), 1, [1, 1, 2, 1]),
    }
    table = pa.table({name: column for name, (column, *_) in filled.items()} | {"y": [0, 1, 2, 3]})
    options = {"x": list(filled), "y": "y", "fill": {name: fill for name, (_, fill, _) in filled.items()}}
    options |= {"shapes": {"lists": [1]}, "vocabulary": {"codes": ["u", "v"]}}
    for name in ("t.arrow", "t.parquet"):
        if name == "t.parquet":  # which has neither null dictionaries nor lists in them
            table = table.set_column(2, "codes", codes.dictionary_decode().dictionary_encode())
        write(workshop, name, table)
        _, found = values_in_place(
            workshop, workshop.prepare("table", {**options, "path": name}, validation_fraction=0)
        )
        for column, (_, _, expected) in filled.items():
            assert found[f"x/{column}"].tolist() == expected, (name, column)


def test_a_tensor_has_all_its_dimensions(workshop: Any) -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.int32).reshape(2, 2, 3))
    for name in ("t.parquet", "t.arrow"):
        write(workshop, name, pa.table({"a": tensors, "y": [0, 1]}))
        _, found = values_in_place(
            workshop, workshop.prepare("table", {"path": name, "x": "a", "y": "y"}, validation_fraction=0)
        )
        np.testing.assert_array_equal(found["x"], np.arange(12).reshape(2, 2, 3))


def test_row_groups_without_rows_are_passed_over(workshop: Any) -> None:
    table = people(2)
    with parquet.ParquetWriter(workshop.code / "t.parquet", table.schema) as writer:
        for rows in (table, table.slice(0, 0), table.slice(0, 0), table):
            writer.write_table(rows)
    options = {"path": "t.parquet", "x": ["age", "city"], "y": "kind"}
    _, found = values_in_place(workshop, workshop.prepare("table", options, validation_fraction=0))
    assert found["x/age"].tolist() == [0, 1, 0, 1]


def test_nulls_are_filled_as_the_run_file_says(workshop: Any) -> None:
    table = pa.table({"a": [1, None, 3], "t": ["x", None, "z"], "y": [0, 1, None]})
    write(workshop, "t.parquet", table)
    options = {"path": "t.parquet", "x": ["a", "t"], "y": "y", "fill": {"a": -1, "t": "none", "y": 7}}
    _, found = values_in_place(workshop, workshop.prepare("table", options, validation_fraction=0))
    assert found["x/a"].tolist() == [1, -1, 3]
    assert found["x/t"].tolist() == [b"x", b"none", b"z"]
    assert found["y"].tolist() == [0, 1, 7]


def test_text_labels_become_classes_with_names(workshop: Any) -> None:
    write(workshop, "t.parquet", pa.table({"a": [1, 2, 3], "y": ["cat", "dog", "cat"]}))
    options = {"path": "t.parquet", "x": "a", "y": "y", "vocabulary": {"y": ["dog", "cat"]}}
    manifest, found = values_in_place(workshop, workshop.prepare("table", options, validation_fraction=0, classes=2))
    assert found["y"].tolist() == [1, 0, 1]
    assert manifest.class_names == ("dog", "cat")


@pytest.mark.parametrize("copy", [False, True])
def test_sets_with_other_vocabularies_are_refused(workshop: Any, copy: bool) -> None:
    """The same number would mean a cat in the training examples, and a dog in the validation set."""
    write(workshop, "t.parquet", pa.table({"a": [1, 2], "y": pa.array(["cat", "dog"]).dictionary_encode()}))
    write(workshop, "v.parquet", pa.table({"a": [1, 2], "y": pa.array(["dog", "cat"]).dictionary_encode()}))
    options = {"x": "a", "y": "y", "copy": copy}
    own = {"source": "table", "options": {**options, "path": "v.parquet"}}
    fault = refused(workshop, {**options, "path": "t.parquet"}, validation=own, validation_fraction=0)
    assert "data.validation: dog, cat" in str(fault)
    assert "training: cat, dog" in str(fault)
    own["options"]["vocabulary"] = {"y": ["cat", "dog"]}
    workshop.prepare("table", {**options, "path": "t.parquet"}, validation=own, validation_fraction=0)


def test_images_in_a_column_are_decoded(workshop: Any) -> None:
    import tensorflow as tf

    files = [tf.io.encode_png(np.full((4, 6, 3), value, np.uint8)).numpy() for value in (0, 200)]
    write(workshop, "t.parquet", pa.table({"image": [{"bytes": file} for file in files], "y": [0, 1]}))
    options = {"path": "t.parquet", "x": "image.bytes", "y": "y", "size": [4, 6], "copy": True}
    for example in workshop.examples(workshop.prepare("table", options, validation_fraction=0)):
        np.testing.assert_array_equal(example["x"], np.full((4, 6, 3), 200 * example["y"], np.uint8))
    _, found = values_in_place(workshop, workshop.prepare("table", {**options, "copy": False}, validation_fraction=0))
    assert found["x"].tolist() == files


def test_csv_columns_have_the_types_of_their_cells(workshop: Any) -> None:
    workshop.write("t.csv", "n,f,t,y\n1,2.5,a,0\n2,,b,1\n")
    ref = workshop.prepare("table", {"path": "t.csv", "y": "y", "fill": {"f": -1}}, validation_fraction=0)
    assert [each.dtype for each in load_manifest(workshop.storage, ref).features] == [
        "int64", "float32", "string", "int64",
    ]  # fmt: skip
    rows = sorted((int(each["x/n"]), float(each["x/f"]), each["x/t"]) for each in workshop.examples(ref))
    assert rows == [(1, 2.5, b"a"), (2, -1, b"b")]
    ref = workshop.prepare(
        "table", {"path": "t.csv", "x": ["n", "f"], "y": "y", "stack": True, "types": {"n": "float32"}, "fill": 0}
    )
    assert load_manifest(workshop.storage, ref).features[0].shape == (2,)


def refused_again(workshop: Any, options: dict[str, Any]) -> BatonError:
    """Refuse options in a store that has datasets."""
    with pytest.raises(BatonError) as fault:
        workshop.prepare("table", options)
    assert fault.value.exit_code == 2
    return fault.value


def refused(workshop: Any, options: dict[str, Any], **data: Any) -> BatonError:
    with pytest.raises(BatonError) as fault:
        workshop.prepare("table", options, **data)
    assert workshop.files() == {}
    assert fault.value.exit_code == 2
    return fault.value


Y = {"path": "t.parquet", "y": "kind"}
SCHEMAS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"x": "agee"}, {}, ["data.options.x", "no column 'agee'", "did you mean age?"]),
    ({"x": "age", "y": "age"}, {}, ["data.options.y", "'age' is in x too"]),
    ({"x": ["age", "name"], "stack": True}, {}, ["data.options.x", "'name' is string", "only single numbers"]),
    ({"x": "words"}, {}, ["'words' is list<", "data.pad: {words: n}", "data.options.shapes"]),
    ({"x": "when"}, {"when": pa.array([0], pa.timestamp("ms"))}, ["'when' is timestamp[ms]", "astype(\"int64\")"]),
    ({"x": "price"}, {"price": pa.array([1], pa.decimal128(9, 2))}, ["'price' is decimal128(9, 2)", "float64"]),
    ({"x": "raw"}, {"raw": pa.array([b"1"])}, ["'raw' is binary", "data.options.size"]),
    ({"x": "inner"}, {}, ["'inner' is struct<", "as inner.deep"]),
    ({"x": "age", "weight": "name"}, {}, ["data.options.weight: 'name' is string"]),
    ({"x": "age", "fill": {"age": "no"}}, {}, ["data.options.fill.age: 'no'", "float32"]),
    ({"x": "city", "fill": {"city": "Rome"}}, {}, ["data.options.fill.city", "did you mean Rom?"]),
    ({"x": "age", "vocabulary": {"age": ["a"]}}, {}, ["data.options.vocabulary.age", "only text"]),
    ({"x": "age", "delimiter": ";"}, {}, ["data.options.delimiter", "is for CSV"]),
    ({"x": "nest", "shapes": {"nest": [2]}}, {"nest": [[[1, 2]]]}, ["'nest' is list<", "shapes: {nest: [n, m]}"]),
    ({"x": "void"}, {"void": pa.array([[]], pa.list_(pa.int8(), 0))}, ["'void' is fixed_size_list<", "leave it out"]),
    ({"x": "twice"}, {"twice": [1], "twice ": [2]}, ["parquet: the column 'twice' occurs twice", "rename one"]),
    ({"x": "hole"}, {"hole": pa.array([None], pa.int64())}, ["parquet, row 0", "'hole' is null", "data.options.fill"]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "columns", "expected"), SCHEMAS)
def test_columns_without_an_array_are_refused_before_reading(
    workshop: Any,
    options: dict[str, Any],
    columns: dict[str, Any],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.tasks.prepare_data.sources.column_ranges._read", None)
    table = people(1)
    for name, values in columns.items():
        table = table.append_column(name.strip(), pa.array(values) if isinstance(values, list) else values)
    write(workshop, "t.parquet", table)
    fault = refused(workshop, {**Y, **options})
    assert [part for part in expected if part not in str(fault)] == [], str(fault)


def damaged_parquet(workshop: Any) -> bytes:
    return write(workshop, "t.parquet", people()).read_bytes()


FILES: dict[str, tuple[Callable[[Any], None], dict[str, Any], list[str]]] = {
    "no Parquet": (lambda w: w.write("t.parquet", b"no table at all"), {}, ["t.parquet", "cannot be read as Parquet"]),
    "no footer": (
        lambda w: w.write("t.parquet", damaged_parquet(w)[:-20]), {}, ["cannot be read as Parquet", "file again"],
    ),
    "no Arrow": (
        lambda w: w.write("t.arrow", b"no table at all"), {"path": "t.arrow"}, ["t.arrow: cannot be read as Arrow"],
    ),
    "half of an Arrow stream": (
        lambda w: w.write("t.arrow", write(w, "t.arrow", people()).read_bytes()[:4000]),
        {"path": "t.arrow"},
        ["t.arrow: ends within the message at byte", "write the file again"],
    ),
    "Feather 1": (
        lambda w: feather.write_feather(people().select(["age", "kind"]), str(w.code / "t.feather"), version=1),
        {"path": "t.feather"},
        ["Feather version 1", "write_feather"],
    ),
    "other types": (
        lambda w: [write(w, "p/0.parquet", people()), write(w, "p/1.parquet", people().cast(
            people().schema.set(0, pa.field("age", pa.int32()))))],
        {"path": "p"},
        ["p/1.parquet: the column 'age' is int32, but double"],
    ),
    "missing column": (
        lambda w: [write(w, "p/0.parquet", people()), write(w, "p/1.parquet", people().drop_columns("age"))],
        {"path": "p"},
        ["p/1.parquet: has no column 'age'"],
    ),
    "several formats": (
        lambda w: [write(w, "p/0.parquet", people()), write(w, "p/1.arrow", people())],
        {"path": "p"},
        ["several formats", "parquet (0.parquet)", "arrow (1.arrow)"],
    ),
    "no rows": (lambda w: write(w, "t.parquet", people(0)), {}, ["t.parquet: no file has a row"]),
    "another word than the vocabulary's": (
        lambda w: write(w, "t.parquet", people()),
        {"x": "name", "vocabulary": {"name": ["n0", "n1"]}},
        ["t.parquet, row 2", "'name' has 'n2'", "not in its vocabulary"],
    ),
    "NaN": (
        lambda w: write(w, "t.parquet", pa.table({"age": [1.0, float("nan")], "kind": [0, 1]})),
        {},
        ["t.parquet, row 1", "x contains nan", "data.allow_nan"],
    ),
    "no table": (lambda w: [w.write("p/a.txt", "a"), w.write("p/b.txt", "b")], {"path": "p"}, ["no files ending in"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_tables_are_refused(workshop: Any, case: str) -> None:
    prepare, options, expected = FILES[case]
    prepare(workshop)
    fault = refused(workshop, {**Y, "x": "age", **options})
    assert isinstance(fault, SourceError | RunFileError)
    assert [part for part in expected if part not in str(fault)] == [], str(fault)


def test_a_dictionary_that_changes_within_a_stream_is_refused(workshop: Any) -> None:
    batches = [
        pa.record_batch({"age": [1.0], "kind": [0], "c": pa.array([text]).dictionary_encode()}) for text in ("a", "b")
    ]
    with ipc.new_stream(str(workshop.code / "t.arrow"), batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    fault = refused(workshop, {"path": "t.arrow", "x": "c", "y": "kind"})
    assert "another dictionary after its first rows" in str(fault)
    assert "data.options.copy: true" in str(fault)
    options = {"path": "t.arrow", "x": "c", "y": "kind", "copy": True, "vocabulary": {"c": ["a", "b"]}}
    copied = workshop.examples(workshop.prepare("table", options, validation_fraction=0))
    assert sorted(int(example["x"]) for example in copied) == [0, 1]


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
def test_dictionaries_that_grow_are_refused_with_the_remedy(workshop: Any, suffix: str) -> None:
    for at, texts in enumerate((["a", "b"], ["b", "c"])):
        write(workshop, f"t/{at}{suffix}", pa.table({"a": pa.array(texts).dictionary_encode(), "y": [0, 1]}))
    options = {"path": "t", "x": "a", "y": "y"}
    fault = refused(workshop, options)
    assert "'a' has 'c', not in its vocabulary; set data.options.vocabulary: {a: [all texts]}" in str(fault)
    options |= {"vocabulary": {"a": ["a", "b", "c"]}}
    _, found = values_in_place(workshop, workshop.prepare("table", options, validation_fraction=0))
    assert found["x"].tolist() == [0, 1, 1, 2]


def test_damaged_footers_and_messages_are_baton_errors(workshop: Any) -> None:
    """A damaged message or footer ends in an error of Baton, not of another library, and not in a crash."""
    for name in ("t.parquet", "t.arrow", "t.feather"):
        good = write(workshop, name, people(20)).read_bytes()
        ends = range(len(good) - 1500, len(good), 97)
        for place in {"t.parquet": ends, "t.arrow": range(0, 1500, 97)}.get(name, [*range(1100, 1900, 41), *ends]):
            data = bytearray(good)
            data[place] ^= 0xFF
            workshop.write(name, bytes(data))
            with suppress(BatonError):
                workshop.prepare("table", {"path": name, "x": ["age", "city", "name"], "y": "kind"})


def test_pyarrow_is_not_imported_for_other_sources() -> None:
    code = "import sys, baton.tasks.prepare_data.sources.registry; print('pyarrow' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]


def as_polars(data: bytes) -> bytes:
    """An Arrow file whose schema, at its beginning, has no size in front, as `write_ipc` of polars writes it."""
    size = int.from_bytes(data[12:16], "little")
    return data[:8] + data[16 : 16 + size] + bytes(8) + data[16 + size :]


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("form", ["polars", "legacy file", "legacy stream"])
def test_arrow_of_other_writers_is_read(workshop: Any, form: str, copy: bool) -> None:
    table = people().select(["age", "name", "point", "kind"])
    file, new = workshop.code / "t.arrow", ipc.new_stream if form == "legacy stream" else ipc.new_file
    with new(str(file), table.schema, options=ipc.IpcWriteOptions(use_legacy_format=form != "polars")) as writer:
        writer.write_table(table, max_chunksize=7)
    if form == "polars":
        file.write_bytes(as_polars(file.read_bytes()))
    options = {"path": "t.arrow", "x": ["age", "name", "point"], "y": "kind", "copy": copy}
    ref = workshop.prepare("table", options, validation_fraction=0, **({} if copy else {"shard_examples": 10}))
    if copy:
        rows = sorted(workshop.examples(ref), key=lambda row: row["x/age"])
        found = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    else:
        _, found = values_in_place(workshop, ref)
    np.testing.assert_array_equal(found["x/age"], np.arange(ROWS))
    np.testing.assert_array_equal(found["x/point"], np.arange(2 * ROWS).reshape(ROWS, 2))
    assert found["x/name"].tolist() == [f"n{number}".encode() for number in range(ROWS)]


def bomb_of_zeros(file: Path) -> None:
    zeros = pa.table({"a": np.zeros(40_000_000, np.int32), "y": np.zeros(40_000_000, np.int8)})
    parquet.write_table(zeros, file, row_group_size=40_000_000, compression="zstd")


def bomb_of_texts(file: Path) -> None:
    texts = pa.DictionaryArray.from_arrays(np.zeros(3000, np.int32), ["t" * 1_000_000])
    parquet.write_table(pa.table({"a": texts, "y": np.arange(3000)}), file, compression="zstd", store_schema=False)


def bomb_of_buffers(file: Path) -> None:
    zeros = pa.table({"a": np.zeros(20_000_000), "y": np.zeros(20_000_000)})
    with ipc.new_file(str(file), zeros.schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(zeros)


def bomb_of_nulls(file: Path) -> None:
    nulls = pa.table({"a": pa.nulls(1 << 30), "y": pa.nulls(1 << 30)})
    with ipc.new_file(str(file), nulls.schema) as writer:
        writer.write_table(nulls, max_chunksize=1 << 30)


def bomb_of_lists(file: Path, rows: int = 3000, text_bytes: int = 1_000_000) -> None:
    texts = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), ["t" * text_bytes])
    lists = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32), texts)
    parquet.write_table(pa.table({"a": lists, "y": np.arange(rows)}), file, compression="zstd", store_schema=False)


def bomb_of_lists_of_long_texts(file: Path) -> None:
    bomb_of_lists(file, 30, 6_000_000)


def bomb_of_compressed_texts(file: Path) -> None:
    texts = [f"{number}{'t' * 1_000_000}" for number in range(200)]
    parquet.write_table(pa.table({"a": texts, "y": np.arange(200)}), file, compression="zstd", use_dictionary=False)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(
    "bomb",
    [
        *(bomb_of_zeros, bomb_of_lists, bomb_of_lists_of_long_texts, bomb_of_compressed_texts),
        *(bomb_of_buffers, bomb_of_nulls),
    ],
)
def test_few_bytes_do_not_become_gigabytes(workshop: Any, bomb: Callable[[Path], None], copy: bool) -> None:
    name = "t.arrow" if bomb in {bomb_of_buffers, bomb_of_nulls} else "t.parquet"
    bomb(workshop.code / name)
    before = pa.total_allocated_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    of_lists = bomb in {bomb_of_lists, bomb_of_lists_of_long_texts}
    options = {"shapes": {"a": [1]}} if of_lists else {} if bomb is bomb_of_compressed_texts else {"fill": 0}
    fault = refused(workshop, {"path": name, "x": "a", "y": "y", "copy": copy, **options})
    assert "bytes in memory, and" in str(fault)
    assert "set data.options.decoded_bytes to " in str(fault)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1] < 200 << 10  # KiB


def test_one_text_in_all_rows_is_held_once(workshop: Any) -> None:
    bomb_of_texts(workshop.code / "t.parquet")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ref = workshop.prepare("table", {"path": "t.parquet", "x": "a", "y": "y"}, validation_fraction=0)
    assert [each.dtype for each in load_manifest(workshop.storage, ref).features] == ["string", "int64"]
    assert ref.train_examples == 3000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


def test_the_bound_of_memory_can_be_raised(workshop: Any) -> None:
    write(workshop, "t.parquet", people())
    options = {"path": "t.parquet", "x": "age", "y": "kind"}
    assert "data.options.decoded_bytes to 112 or more" in str(refused(workshop, {**options, "decoded_bytes": 100}))
    workshop.prepare("table", {**options, "decoded_bytes": 112})
