"""CSV has one type a column in all files; the forms of Arrow that other writers have; damage and dialects."""

import ast
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, ipc, parquet

from baton.tasks.foundation.contracts.dataset import DatasetManifest
from baton.tasks.foundation.dataset.columns import read_columns
from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.errors import BatonError
from baton.tasks.prepare_data.look import look
from tests.support import forked

COUNT = itertools.count()
# Flips bits of a footer, and reads each time what planning and `baton init` read of it.
FLIPS = """
import sys
from pathlib import Path
from baton.tasks.foundation.errors import SourceError
from baton.tasks.prepare_data.sources.source_files import find_files
from baton.tasks.prepare_data.sources.table_files import footer_counts, planned_ranges

columns = {"a": False, "s": False}
path, data, found = Path(sys.argv[1]), Path(sys.argv[1]).read_bytes(), {"refused": 0, "read": 0}
for at in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data) - 4):
    for flip in (1, 4, 32):
        path.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
        (file,) = find_files(str(path), Path())
        for read in (
            lambda: planned_ranges(file, "parquet", columns, partition={}, most_records=None, most_bytes=None),
            lambda: footer_counts([file]),
        ):
            try:
                read()
                found["read"] += 1
            except SourceError:
                found["refused"] += 1
print(found)
"""
EXAMPLES = int(os.environ.get("BATON_TEST_TABLES", "40"))


def values(workshop: Any, files: dict[str, str | bytes], **options: Any) -> dict[str, Any]:
    """The examples of CSV files in the order of x/n, by feature; all have a column n."""
    for name, text in files.items():
        workshop.write(f"t/{name}", text)
    ref = workshop.prepare("table", {"path": "t", "y": "y", **options}, validation_fraction=0)
    rows = sorted(workshop.examples(ref), key=lambda row: row["x/n"])
    return {
        each.name: np.array([row[each.name] for row in rows]) for each in load_manifest(workshop.storage, ref).features
    }


def refused(workshop: Any, files: dict[str, str | bytes], **options: Any) -> str:
    with pytest.raises(BatonError) as fault:
        values(workshop, files, **options)
    assert fault.value.exit_code == 2
    return str(fault.value)


LARGE = "n,a,y\n1,16777217,16777217\n2,3,16777219\n"


@pytest.mark.parametrize("first", ["n,a,y\n", "n,a,y\n0,,0\n", LARGE])
def test_csv_types_come_from_all_files(workshop: Any, first: str) -> None:
    found = values(workshop, {"0.csv": first, "1.csv": LARGE}, fill={"a": 7})
    assert {name: each.dtype for name, each in found.items()} == dict.fromkeys(("x/n", "x/a", "y"), np.int64)
    assert {16777217, 16777219} < {*found["y"].tolist(), 3}
    assert 16777217 in found["x/a"]


def test_the_order_of_csv_files_changes_no_value(workshop: Any) -> None:
    cells = ["n,a,b,c,y\n1,1,0,x,1\n", "n,a,b,c,y\n2,2.5,true,3,0\n", "n,a,b,c,y\n3,,false,,0\n"]
    first = values(workshop, {f"{at}.csv": text for at, text in enumerate(cells)}, fill={"a": 0})
    second = values(workshop, {f"{at}.csv": text for at, text in enumerate(cells[::-1])}, fill={"a": 0})
    assert {name: (each.dtype, each.tolist()) for name, each in first.items()} == {
        name: (each.dtype, each.tolist()) for name, each in second.items()
    }
    assert first["x/a"].tolist() == [1, 2.5, 0]
    assert (first["x/b"].dtype, first["x/b"].tolist()) == (np.bool_, [False, True, False])
    assert first["x/c"].tolist() == [b"x", b"3", b""]


def test_integers_of_csv_keep_their_value_or_are_refused(workshop: Any) -> None:
    found = values(workshop, {"0.csv": f"n,a,y\n1,{2**63},0\n2,{2**64 - 1},1\n"})
    assert (found["x/a"].dtype, found["x/a"].tolist()) == (np.uint64, [2**63, 2**64 - 1])
    fault = refused(workshop, {"0.csv": f"n,a,y\n1,{2**63},0\n2,-1,1\n"})
    assert f"0.csv, row 2: 'a' is {2**63}, too large for integers" in fault
    fault = refused(workshop, {"0.csv": f"n,a,y\n1,5,0\n2,{2**64},1\n"})
    assert f"row 3: 'a' is {2**64}" in fault
    cells = {"0.csv": "n,a,y\n1,0.5,0\n", "1.csv": "n,a,y\n2,16777217,1\n"}
    fault = refused(workshop, cells)
    assert "1.csv, row 2: 'a' is 16777217, which float32 cannot hold" in fault
    assert "data.options.types: {a: float32}" in fault
    assert values(workshop, cells, types={"a": "float32"})["x/a"].tolist() == [0.5, 16777216]
    assert values(workshop, cells, types={"a": "text"})["x/a"].tolist() == [b"0.5", b"16777217"]


DIALECTS: list[tuple[bytes, dict[str, Any], list[str]]] = [
    (b"n\xe9,n,y\n1,2,3\n", {}, ["t.csv, row 1", "column 1 is b'n\\xe9'", "UTF-8"]),
    ("n,y\n1,2\n".encode("utf-16"), {}, ["t.csv: is UTF-16", "save it as UTF-8"]),
    (b"n;y\n1;2\n", {}, ["'n;y' is one name", 'data.options.delimiter: ";"']),
    (b"n;a;y\n1;1,5;2\n", {"delimiter": ";"}, ["row 2: 'a' is 1,5", 'data.options.decimal: ","']),
    (b"n,y\n1,\xe9\n", {}, ["t.csv, row 2", "'y' is", "UTF-8"]),
    (b"n,y", {}, ["t.csv: is empty"]),
]


@pytest.mark.parametrize(("text", "options", "expected"), DIALECTS)
def test_dialects_of_csv_are_refused_with_the_remedy(
    workshop: Any, text: bytes, options: dict[str, Any], expected: list[str]
) -> None:
    fault = refused(workshop, {"t.csv": text}, **options)
    assert [part for part in expected if part not in fault] == [], fault


def test_remedies_for_dialects_of_csv_work(workshop: Any) -> None:
    found = values(workshop, {"t.csv": "n;a;y\r1;1,5;2\r2;-3;4\r"}, delimiter=";", decimal=",")
    assert found["x/a"].tolist() == [1.5, -3]
    assert found["y"].tolist() == [2, 4]


def test_options_of_later_revisions_keep_the_names_of_datasets(workshop: Any) -> None:
    workshop.write("t.csv", "n,y\n1,2\n")
    ref = workshop.prepare("table", {"path": "t.csv", "x": "n", "y": "y"}, validation_fraction=0)
    again = workshop.prepare("table", {"path": "t.csv", "x": "n", "y": "y", "decimal": "."}, validation_fraction=0)
    assert (again.folder, ref.folder) == ("datasets/10529de6548dd8866f19b713",) * 2


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_column_of_nulls_has_the_type_of_other_files(
    workshop: Any, suffix: str, copied: bool, order: tuple[int, int]
) -> None:
    write = {"parquet": write_parquet, "arrow": write_arrow}[suffix]
    kept = pa.table({
        "n": [0, 1], "a": [16777217, None], "t": ["x", "y"], "y": pa.array(["b", "a"]).dictionary_encode()
    })  # fmt: skip
    nulls = pa.table({"n": [2, 3], "a": pa.nulls(2), "t": pa.nulls(2), "y": pa.nulls(2)})
    (workshop.code / "t").mkdir()
    for at, table in zip(order, (kept, nulls), strict=True):
        write(table, workshop.code / f"t/{at}.{suffix}", 2)
    given = {"path": "t", "y": "y", "fill": {"a": 7, "t": "none", "y": "a"}, "copy": copied}
    ref = workshop.prepare("table", given, validation_fraction=0)
    rows = workshop.examples(ref) if copied else in_place(load_manifest(workshop.storage, ref))
    found = {name: [row[name] for row in sorted(rows, key=lambda row: row["x/n"])] for name in ("x/a", "x/t", "y")}
    assert found == {"x/a": [16777217, 7, 7, 7], "x/t": [b"x", b"y", b"none", b"none"], "y": [0, 1, 1, 1]}


def test_csv_of_several_blocks_has_one_type(workshop: Any) -> None:
    """The rows of a block end within a row; an integer after the first block is too long for int64."""
    wide = "w" * 90_000
    rows = [f"{row},{2**63 if row == 99 else row},{wide},{row % 2}" for row in range(100)]
    workshop.write("t.csv", "\n".join(["n,a,wide,y", *rows, ""]))
    assert (workshop.code / "t.csv").stat().st_size > 2 * (4 << 20)
    options = {"path": "t.csv", "x": ["n", "a"], "y": "y"}
    ref = workshop.prepare("table", options, validation_fraction=0)
    assert {int(row["x/a"]) for row in workshop.examples(ref)} == {*range(99), 2**63}
    assert look(str(workshop.code / "t.csv"), "y").examples == 100


def test_files_are_found_by_any_case_and_not_left_out(workshop: Any) -> None:
    found = values(workshop, {"0.csv": "n,y\n1,2\n", "1.CSV": "n,y\n3,4\n"})
    assert found["y"].tolist() == [2, 4]
    assert "2.csv.gz: is compressed" in refused(workshop, {"2.csv.gz": b"\x1f\x8b"})


def of(kind: pa.DataType, values: st.SearchStrategy[Any]) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    return kind, values


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=4)
BYTES = st.binary(max_size=3)
SMALL = st.integers(0, 100)
HALVES = st.integers(-100, 100).map(lambda number: number / 2)
READ = [
    of(pa.bool_(), st.booleans()),
    *(of(kind, st.integers(0, 127)) for kind in (pa.int8(), pa.uint8(), pa.int16(), pa.uint32())),
    of(pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    of(pa.uint64(), st.integers(0, 2**64 - 1)),
    *(of(kind, HALVES) for kind in (pa.float16(), pa.float32(), pa.float64())),
    *(of(kind, WORDS) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    of(pa.list_(pa.int16(), 2), st.lists(SMALL, min_size=2, max_size=2)),
    of(pa.list_(pa.list_(pa.float32(), 1), 2), st.lists(st.tuples(HALVES), min_size=2, max_size=2)),
    of(pa.fixed_shape_tensor(pa.int32(), (1, 2)), st.lists(SMALL, min_size=2, max_size=2)),
    of(pa.list_(pa.string(), 1), st.tuples(WORDS)),
]
OTHERS = [
    of(pa.null(), st.none()),
    *(of(kind, BYTES) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())),
    of(pa.binary(2), st.binary(min_size=2, max_size=2)),
    of(pa.dictionary(pa.int8(), pa.string()), WORDS),
    of(pa.dictionary(pa.int32(), pa.large_string()), WORDS),
    of(pa.dictionary(pa.int16(), pa.int64()), SMALL),
    *(
        of(kind, SMALL)
        for kind in (pa.date32(), pa.date64(), pa.timestamp("us"), pa.timestamp("s", "UTC"), pa.time32("s"))
    ),
    *(of(kind, SMALL) for kind in (pa.time64("ns"), pa.duration("ms"), pa.decimal128(9, 2), pa.decimal256(40, 1))),
    of(pa.month_day_nano_interval(), st.just((1, 2, 3))),
    of(pa.list_(pa.int64()), st.lists(SMALL, max_size=3)),
    of(pa.large_list(pa.string()), st.lists(WORDS, max_size=3)),
    of(pa.list_(pa.list_(pa.int8())), st.lists(st.lists(SMALL, max_size=2), max_size=2)),
    of(pa.list_(pa.int8(), 0), st.just([])),
    of(pa.list_view(pa.int8()), st.lists(SMALL, max_size=2)),
    of(pa.struct({"in": pa.int8()}), st.fixed_dictionaries({"in": SMALL})),
    of(pa.struct({}), st.just({})),
    of(pa.map_(pa.string(), pa.int8()), st.lists(st.tuples(WORDS, SMALL), max_size=2, unique_by=lambda pair: pair[0])),
    of(pa.list_(pa.bool_()), st.lists(st.booleans(), min_size=1, max_size=1)),
]


@st.composite
def columns(draw: st.DrawFn, kinds: list[tuple[pa.DataType, st.SearchStrategy[Any]]]) -> tuple[pa.Array, bool]:
    """A column of up to 12 values, and whether it has nulls."""
    kind, some = draw(st.sampled_from(kinds))
    has_nulls = draw(st.booleans())
    values = draw(st.lists(st.one_of(st.none(), some) if has_nulls else some, min_size=1, max_size=12))
    storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    array = pa.array(values, pa.int64() if pa.types.is_duration(kind) else storage)
    found = pa.ExtensionArray.from_storage(kind, array) if storage != kind else array.cast(kind)
    return found, any(value is None for value in values)


CUTS = st.lists(st.integers(0, 12), max_size=2).map(sorted)
FILLS = st.sampled_from([None, 0, 3, False, "x", 1.5])


def write_parquet(table: pa.Table, file: Path, rows: int) -> None:
    with parquet.ParquetWriter(file, table.schema) as writer:
        for begin in range(0, len(table) + 1, rows):  # the last row group may be empty
            writer.write_table(table.slice(begin, rows))


def write_arrow(table: pa.Table, file: Path, rows: int) -> None:
    new, packed = (ipc.new_stream, None) if rows % 2 else (ipc.new_file, "zstd")
    with new(str(file), table.schema, options=ipc.IpcWriteOptions(compression=packed)) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_csv(table: pa.Table, file: Path, rows: int) -> None:
    csv.write_csv(table, file, csv.WriteOptions(batch_size=rows))


WRITERS = {"parquet": write_parquet, "arrow": write_arrow, "csv": write_csv}


def in_place(manifest: DatasetManifest) -> list[dict[str, Any]]:
    """The examples of ranges, as training reads them."""
    rows = []
    for shard in manifest.train:
        assert shard.layout is not None
        data = memoryview(Path(shard.path).read_bytes())
        head = data[shard.layout.head_begin : shard.layout.head_begin + shard.layout.head_size]
        found = read_columns(data[shard.begin : shard.begin + shard.size], head, shard, manifest.features)
        rows += [{name: values[row] for name, values in found.items()} for row in range(shard.records_held)]
    return rows


def outcome(work: Callable[[], Any]) -> Any:
    """What a call returns, or the sentence that refuses it."""
    try:
        return work()
    except BatonError as fault:
        return str(fault) if fault.exit_code == 2 and "\n" not in str(fault) else pytest.fail(str(fault))


def as_arrays(column: Any, dtype: Any, fill: Any, shape: tuple[int, ...]) -> list[Any]:
    """The values of a column as pyarrow gives them, filled and flat."""

    def flat(value: Any, shape: tuple[int, ...]) -> Iterator[Any]:
        if isinstance(value, list | tuple):
            for each in value:
                yield from flat(each, shape[1:])
        elif value is None:
            yield from (each for _ in range(math.prod(shape)) for each in flat(fill, ()))
        else:
            yield value.encode() if isinstance(value, str) else np.dtype(dtype).type(value).tolist()

    return list(flat(column.to_pylist(), (len(column), *shape)))


@pytest.mark.parametrize("form", ["parquet", "arrow", "csv"])
@given(
    drawn=columns([*READ, *OTHERS]),
    cuts=CUTS,
    rows=st.integers(1, 4),
    fill=FILLS,
    size=st.sampled_from([None, [2], [1, 1]]),
)
@settings(max_examples=EXAMPLES)
def test_tables_are_read_as_pyarrow_reads_them(  # noqa: PLR0917 - hypothesis draws them
    workshop: Any,
    form: str,
    drawn: tuple[pa.Array, bool],
    cuts: list[int],
    rows: int,
    fill: Any,
    size: list[int] | None,
) -> None:
    column, has_nulls = drawn
    table = pa.table({"a": column, "n": np.arange(len(column)), "y": np.zeros(len(column), np.int64)})
    name = f"t{next(COUNT)}"
    (workshop.code / name).mkdir()
    try:
        for at, (begin, end) in enumerate(zip([0, *cuts], [*cuts, 99], strict=True)):
            WRITERS[form](table.slice(begin, end - begin), workshop.code / name / f"{at}.{form}", rows)
    except (pa.ArrowException, ArithmeticError, TypeError):
        return  # no such file exists
    if form == "csv":
        csv.write_csv(table, workshop.code / "whole.csv")
        taken = csv.ConvertOptions(null_values=[""], strings_can_be_null=False)
        column = csv.read_csv(workshop.code / "whole.csv", convert_options=taken)["a"]
    options = {"path": name, "x": ["a", "n"], "y": "y"}
    options |= ({"fill": {"a": fill}} if fill is not None else {}) | ({"shapes": {"a": size}} if size else {})
    for copy in (True, False):
        ref = outcome(lambda copy=copy: workshop.prepare("table", {**options, "copy": copy}, validation_fraction=0))
        if isinstance(ref, str):
            # What all sources can hold is read.
            assert (
                form == "csv" or size or fill is not None or has_nulls or column.type not in [kind for kind, _ in READ]
            ), ref
            continue
        manifest = load_manifest(workshop.storage, ref)
        examples = workshop.examples(ref) if copy or form == "csv" else in_place(manifest)
        feature = manifest.features[0]
        found = [
            row["x/a"].tolist() if isinstance(row["x/a"], np.ndarray) else row["x/a"]
            for row in sorted(examples, key=lambda row: int(row["x/n"]))
        ]
        expected = as_arrays(column, "S" if feature.dtype == "string" else feature.dtype, fill, feature.shape)
        if feature.vocabulary:
            expected = [feature.vocabulary.index(text.decode()) for text in expected]
        assert np.reshape(np.array(found, object), -1).tolist() == expected
    outcome(lambda: look(str(workshop.code / name), "y"))


def test_no_bit_of_a_footer_ends_the_process(tmp_path: Path) -> None:
    """Where pyarrow reads chunks and their statistics for Python, it does not catch what C++ throws."""
    table = pa.table({"a": [1.0, 2.0], "s": pa.array([["x"], None], pa.list_(pa.string()))})
    parquet.write_table(table, tmp_path / "t.parquet", store_schema=False)
    command = [sys.executable, "-c", FLIPS, str(tmp_path / "t.parquet")]
    done = forked.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    found = ast.literal_eval(done.stdout)
    assert min(found.values()) > 500
