"""The readers of columns: what Parquet row groups hold becomes the arrays of features."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from baton.tasks.foundation.contracts.dataset import Feature, RangeLayout, ShardRecord
from baton.tasks.foundation.dataset.columns import read_columns
from baton.tasks.foundation.errors import DamagedDataset

ROWS = 10


def read(folder: Path, column: Any, feature: Feature, partition: dict[str, str] | None = None) -> Any:
    """Write a column, and read the second of its row groups: rows 5 to 9."""
    table = column if isinstance(column, pa.Table) else pa.table({"c": column})
    file = folder / "rows.parquet"
    parquet.write_table(table, file, row_group_size=5)
    data, found = file.read_bytes(), parquet.read_metadata(file)
    group = found.row_group(1)
    chunks = [group.column(index) for index in range(group.num_columns)]
    begin = min(
        chunk.data_page_offset if chunk.dictionary_page_offset is None else chunk.dictionary_page_offset
        for chunk in chunks
    )
    size = sum(chunk.total_compressed_size for chunk in chunks)
    layout = RangeLayout(form="parquet", first_part=1, partition=partition or {})
    record = ShardRecord(
        path="/data/rows.parquet", examples=5, size=size, crc32c="00000000", begin=begin, first=5, layout=layout
    )
    head = data[-8 - int.from_bytes(data[-8:-4], "little") :]
    return read_columns(memoryview(data)[begin : begin + size], memoryview(head), record, [feature])[feature.name]


def feature(dtype: str, shape: Sequence[int] = (), encoding: Any = "array", **more: Any) -> Feature:
    return Feature(name="x", dtype=dtype, shape=tuple(shape), key=more.pop("key", "c"), encoding=encoding, **more)


NUMBERS = list(range(ROWS))
LISTS = pa.array([[n, n + 0.5] for n in NUMBERS], pa.list_(pa.float32(), 2))
READ = {
    "numbers": (pa.array(NUMBERS, pa.int16()), feature("int16"), np.arange(5, 10, dtype=np.int16)),
    "wider": (pa.array(NUMBERS, pa.int16()), feature("int64"), np.arange(5, 10)),
    "booleans": (pa.array([n % 3 == 0 for n in NUMBERS]), feature("bool"), np.arange(5, 10) % 3 == 0),
    "halves": (pa.array(np.arange(10, dtype=np.float16)), feature("float16"), np.arange(5, 10, dtype=np.float16)),
    "fixed lists": (LISTS, feature("float32", [2]), np.array([[n, n + 0.5] for n in range(5, 10)], np.float32)),
    "lists of one length": (
        pa.array([[[n], [n]] for n in NUMBERS]),
        feature("int64", [2, 1]),
        np.array([[[n], [n]] for n in range(5, 10)]),
    ),
    "texts": (
        pa.array([f"é{n}\0" for n in NUMBERS]),
        feature("string", encoding="text"),
        np.array([f"é{n}\0".encode() for n in range(5, 10)], object),
    ),
    "coded texts": (
        pa.array(["ab"[n % 2] for n in NUMBERS]),
        feature("int32", vocabulary=("b", "z", "a")),
        np.array([0, 2, 0, 2, 0], np.int32),
    ),
    "dictionary": (
        pa.array(["ab"[n % 2] for n in NUMBERS]).dictionary_encode(),
        feature("int64", vocabulary=("a", "b")),
        np.array([1, 0, 1, 0, 1]),
    ),
    "filled numbers": (
        pa.array([None if n == 6 else n for n in NUMBERS], pa.float32()),
        feature("float32", fill=-1.0),
        np.array([5, -1, 7, 8, 9], np.float32),
    ),
    "filled texts": (
        pa.array([None if n == 6 else "t" for n in NUMBERS]),
        feature("string", encoding="text", fill=""),
        np.array([b"t", b"", b"t", b"t", b"t"], object),
    ),
    "filled codes": (
        pa.array([None if n == 6 else "t" for n in NUMBERS]),
        feature("int64", vocabulary=("t", "none"), fill="none"),
        np.array([0, 1, 0, 0, 0]),
    ),
    "files": (
        pa.table({"image": pa.array([{"bytes": b"\xff%d" % n, "path": "p"} for n in NUMBERS])}),
        feature("uint8", [8, 8, 3], encoding="image", key="image.bytes"),
        np.array([b"\xff%d" % n for n in range(5, 10)], object),
    ),
    "stacked": (
        pa.table({"b": pa.array(NUMBERS, pa.float32()), "a": pa.array(NUMBERS, pa.float32())}),
        feature("float32", [2], stacked=("a", "b")),
        np.array([[n, n] for n in range(5, 10)], np.float32),
    ),
    "stacked lists": (
        pa.table({"a": LISTS, "b": LISTS}),
        feature("float32", [2, 2], stacked=("a", "b")),
        np.array([[[n, n], [n + 0.5, n + 0.5]] for n in range(5, 10)], np.float32),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_column_is_read_as_its_feature(name: str, tmp_path: Path) -> None:
    column, wanted, values = READ[name]
    found = read(tmp_path, column, wanted)
    assert (found.dtype, found.tolist()) == (values.dtype, values.tolist())


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        (feature("int64", key="year"), 2026),
        (feature("string", encoding="text", key="year"), b"2026"),
        (feature("int64", vocabulary=("2025", "2026"), key="year"), 1),
    ],
)
def test_column_of_a_folder_has_one_value(wanted: Feature, value: object, tmp_path: Path) -> None:
    assert read(tmp_path, pa.array(NUMBERS), wanted, {"year": "2026"}).tolist() == [value] * 5


REFUSED = {
    "null": (pa.array([None if n == 6 else n for n in NUMBERS]), feature("int64"), "row 6: column 'c' is null"),
    "null in a list": (
        pa.array([[n, None if n == 7 else n] for n in NUMBERS], pa.list_(pa.int64(), 2)),
        feature("int64", [2]),
        "row 7: column 'c' is null",
    ),
    "no list": (
        pa.array([None if n == 8 else [n] for n in NUMBERS], pa.list_(pa.int64(), 1)),
        feature("int64", [1]),
        "row 8: column 'c' is null",
    ),
    "length": (
        pa.array([[n] * (1 + (n == 9)) for n in NUMBERS]),
        feature("int64", [1]),
        "row 9: column 'c' has a list",
    ),
    "unknown text": (pa.array(["a"] * 9 + ["b"]), feature("int64", vocabulary=("a",)), "row 9: column 'c' has 'b'"),
    "missing": (pa.array(NUMBERS), feature("int64", key="d"), "row 5: has no column 'd'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_value_that_its_feature_cannot_be_names_the_row(name: str, tmp_path: Path) -> None:
    column, wanted, text = REFUSED[name]
    with pytest.raises(DamagedDataset, match=f"^/data/rows.parquet, {text}"):
        read(tmp_path, column, wanted)
