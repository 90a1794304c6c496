"""Damaged, truncated, compressed and other files given to the source `tfrecord`."""

import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from baton.tasks.foundation.errors import SourceError
from baton.tasks.prepare_data.sources.tfrecord_files import read_records
from tests.support.tfrecords import PLAIN, file_of, record


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (lambda ends: ends[3] + 5, "record 4, at byte {3}: the file ends inside it, after 5 of 12 bytes of its length"),
        (lambda ends: ends[3] + 12, "record 4, at byte {3}: the file ends inside it, after 0 of"),
        (lambda ends: ends[4] - 1, "record 4, at byte {3}: the file ends inside it"),
        (lambda _: 3, "record 0, at byte 0: the file ends inside it, after 3 of 12"),
    ],
)
@pytest.mark.parametrize("copy", [False, True])
def test_truncated_file_is_named_with_the_record(
    workshop: Any, files: Callable[..., Any], left: Callable[[list[int]], int], expected: str, copy: bool
) -> None:
    data = files(3, 6)["part-1"]
    ends = [each.begin + len(each.frame) for each in read_records([data], where="")]
    workshop.write("records/part-1", data[: left(ends)])
    with pytest.raises(SourceError) as refused:
        workshop.prepare("tfrecord", {**PLAIN, "copy": copy}, shard_examples=1)
    assert f"records/part-1: {expected.format(*ends)}" in str(refused.value)
    assert "rewrite the file, or exclude it" in str(refused.value)
    assert workshop.files() == {}


@pytest.mark.parametrize(
    ("at", "expected"), [(0, "its length"), (9, "its length"), (40, "its content"), (-1, "its content")]
)
def test_damaged_record_is_named(workshop: Any, files: Callable[..., Any], at: int, expected: str) -> None:
    data = bytearray(files(3, 6)["part-1"])
    third = list(read_records([bytes(data)], where=""))[2]
    data[third.begin + at + (len(third.frame) if at < 0 else 0)] ^= 1
    workshop.write("records/part-1", bytes(data))
    with pytest.raises(SourceError) as refused:
        workshop.prepare("tfrecord", PLAIN)
    assert f"part-1: record 2, at byte {third.begin}: is damaged: the checksum of {expected}" in str(refused.value)


def test_file_of_another_kind_is_named(workshop: Any, files: Callable[..., Any]) -> None:
    files(3)
    workshop.write("records/readme.txt", b"These are records of the year before last.")
    with pytest.raises(SourceError, match=r"readme\.txt: is not a TFRecord file; exclude it from data\.options\.path"):
        workshop.prepare("tfrecord", PLAIN)
    assert workshop.prepare("tfrecord", {**PLAIN, "path": "records/part-*"}).train_examples == 2


@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
def test_compressed_files_are_copied_or_refused(workshop: Any, kind: str) -> None:
    workshop.write("records/a", file_of([record(each) for each in range(20)], workshop.code, kind))
    with pytest.raises(SourceError, match=rf"is compressed \({kind.lower()}\).*data\.options\.copy: true"):
        workshop.prepare("tfrecord", PLAIN)
    ref = workshop.prepare("tfrecord", {**PLAIN, "copy": True}, validation_fraction=0)
    assert sorted(workshop.labels(ref)) == list(range(20))


def test_compressed_files_of_several_streams_and_truncated_ones(
    workshop: Any, files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.tasks.prepare_data.sources.tfrecord_files._MAX_BLOCK_BYTES", 50)
    monkeypatch.setattr("baton.tasks.prepare_data.sources.source_files._BLOCK_BYTES", 64)
    plain = files(20, write=False)["part-0"]
    copied = {**PLAIN, "copy": True}
    pieces = gzip.compress(plain[:333]) + gzip.compress(plain[333:])
    workshop.write("records/a", pieces)
    ref = workshop.prepare("tfrecord", copied, validation_fraction=0)
    assert sorted(workshop.labels(ref)) == list(range(20))
    for cut in (pieces[:-3], zlib.compress(plain)[:-1]):
        workshop.write("records/a", cut)
        with pytest.raises(SourceError, match="is compressed and truncated"):
            workshop.prepare("tfrecord", copied)
    workshop.write("records/a", gzip.compress(plain) + b"what is this?")
    with pytest.raises(SourceError, match="is compressed and damaged"):
        workshop.prepare("tfrecord", copied)
