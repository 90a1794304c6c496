"""Ranges that stay in place are read, checked and described, one range of all files at a time."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.dataset import Feature, RangeLayout
from baton.tasks.foundation.errors import RunFileError, SourceChanged, SourceError
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.prepare_data.example_checks import Checker
from baton.tasks.prepare_data.sources.column_ranges import checked_ranges
from baton.tasks.prepare_data.sources.source import Range
from baton.tasks.prepare_data.sources.source_files import SourceFile, find_files

FEATURES = (
    Feature(name="x", dtype="float32", shape=(), key="x", encoding="array"),
    Feature(name="y", dtype="int64", shape=(), key="y", encoding="array"),
)


def write(file: Path, x: list[float], y: list[int]) -> None:
    parquet.write_table(pa.table({"x": pa.array(x, pa.float32()), "y": y}), file, row_group_size=4)


def planned(file: SourceFile) -> Iterator[Range]:
    """Plan a range for each row group, as a source does from the footer."""
    data = file.read()
    foot = 8 + int.from_bytes(data[-8:-4], "little")
    found = parquet.read_metadata(pa.BufferReader(data))
    for number in range(found.num_row_groups):
        group = found.row_group(number)
        columns = [group.column(index) for index in range(group.num_columns)]
        begin = min(
            min(each.dictionary_page_offset or each.data_page_offset, each.data_page_offset) for each in columns
        )
        layout = RangeLayout(form="parquet", head_begin=len(data) - foot, head_size=foot, first_part=number)
        size = sum(each.total_compressed_size for each in columns)
        yield Range(path=file.uri, begin=begin, size=size, crc32c="", records=group.num_rows, layout=layout)


def checked(files: list[SourceFile], **data: Any) -> tuple[list[Range], Checker]:
    checker = Checker(DataSpec(source="table", **data))
    return list(checked_ranges(files, (each for file in files for each in planned(file)), FEATURES, checker)), checker


@pytest.fixture
def files(tmp_path: Path) -> list[SourceFile]:
    write(tmp_path / "a.parquet", [0.5, 1, 2, 3, 4, 5], [7, 1, 2, 3, 4, 5])
    write(tmp_path / "b.parquet", [6, 7], [-1, 9])
    return find_files("*.parquet", tmp_path)


def test_ranges_have_the_checksums_of_their_bytes(files: list[SourceFile]) -> None:
    found, _ = checked(files)
    assert [each.records for each in found] == [4, 2, 2]
    for each in found:
        data, layout = Path(each.path).read_bytes(), each.layout
        assert layout is not None
        body, head = (
            data[at : at + size] for at, size in ((each.begin, each.size), (layout.head_begin, layout.head_size))
        )
        assert (each.crc32c, layout.head_crc32c) == tuple(f"{google_crc32c.value(part):08x}" for part in (body, head))


def test_ranges_of_a_store_are_those_of_local_files(files: list[SourceFile], request: pytest.FixtureRequest) -> None:
    store = MemoryStorage(f"column-ranges/{request.node.name}")
    for file in files:
        store.write(file.name, file.read())
    remote = [SourceFile(storage=store, path=file.name, relative=file.name) for file in files]
    local, there = checked(files)[0], checked(remote)[0]
    assert [dataclasses.replace(each, path="") for each in there] == [
        dataclasses.replace(each, path="") for each in local
    ]
    assert {each.path for each in there} == {file.uri for file in remote}


def test_extreme_values_name_the_row_of_the_file(files: list[SourceFile]) -> None:
    _, checker = checked(files)
    found = [(each.value, each.where) for each in checker.extremes]
    a, b = (file.uri for file in files)
    assert found == [(-1, f"{b}, row 0"), (1, f"{a}, row 1"), (7, f"{a}, row 0"), (9, f"{b}, row 1")]


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        ([0, 1, 2, 3, 4, np.nan], [0] * 6, "row 5: x contains nan at []"),
        ([0.0] * 6, [0, 1, 0, 1, 0, 2], "row 5: label y is 2, outside of [0, 2)"),
    ],
)
def test_invalid_value_names_its_row(x: list[float], y: list[int], text: str, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", x, y)
    with pytest.raises(SourceError, match=re.escape(f"{tmp_path}/a.parquet, {text}")):
        checked(find_files("a.parquet", tmp_path), classes=2)


def test_file_that_is_cut_off_meanwhile_is_refused(files: list[SourceFile]) -> None:
    ranges = list(planned(files[0]))
    Path(files[0].uri).write_bytes(files[0].read()[:20])
    with pytest.raises(SourceChanged, match="changed while it was being read"):
        list(checked_ranges(files, ranges, FEATURES, Checker(DataSpec(source="table"))))


def test_windows_larger_than_memory_are_refused(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(workshop.code / "a.parquet", [float(n) for n in range(40)], list(range(40)))
    options = {"path": "a.parquet", "x": "x", "y": "y"}
    # A range of 4 examples takes 4 * (4 + 8) bytes; two windows are in memory.
    monkeypatch.setattr("baton.tasks.prepare_data.stage.available_bytes", lambda: 2 * 3 * 48)
    for window_shards in (1, 3):
        assert workshop.prepare("table", options, window_shards=window_shards, shard_examples=4).train_examples
    with pytest.raises(
        RunFileError, match=r"data\.window_shards: 4: a window .* set it to at most 3, or set data\.opt"
    ):
        workshop.prepare("table", options, window_shards=4, shard_examples=4, version=2)
    monkeypatch.setattr("baton.tasks.prepare_data.stage.available_bytes", lambda: 2 * 40)
    with pytest.raises(RunFileError, match=r"write the files with smaller row groups"):
        workshop.prepare("table", options, window_shards=4, shard_examples=4, version=3)
