"""Bits that flip on the way from gs://: the same dataset as from sound bytes, or none, and never another."""

import gzip
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.foundation.dataset.manifest import load_manifest
from tasks.foundation.errors import DamagedInTransit, SourceError, StorageError
from tasks.foundation.storage.gcs.retrying import RetryPolicy
from tasks.foundation.storage.gcs.storage import CloudStorage
from tasks.foundation.telemetry.events import Note
from tasks.prepare_data.sources import source_file, verified_reads
from tasks.prepare_data.sources.files import find_files
from tests.fakes.gcs.fake_gcs import FakeGcs, FaultPlan

CSV = "".join(["a,b,y\n", *(f"{number},{number * 7 % 10},{number % 3}\n" for number in range(40))]).encode()
# Small requests, so that small files arrive in many parts.
REQUEST_BYTES = 64


@pytest.fixture(autouse=True)
def _small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_reads, "_REQUEST_BYTES", REQUEST_BYTES)
    monkeypatch.setattr(verified_reads, "_SMALL_BYTES", 0)
    monkeypatch.setattr(source_file, "_BLOCK_BYTES", REQUEST_BYTES)
    monkeypatch.setenv("BATON_STORAGE_PATIENCE_SECONDS", "20")


def write_npz(folder: Path, save: Callable[..., None]) -> bytes:
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    save(folder / "made.npz", x=x, y=np.arange(20) % 3)
    return (folder / "made.npz").read_bytes()


def write_records(folder: Path) -> bytes:
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(folder / "made.tfrecord")) as writer:
        for number in range(10):
            values = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
            writer.write(tf.train.Example(features=tf.train.Features(feature={"n": values})).SerializeToString())
    return (folder / "made.tfrecord").read_bytes()


RECORDS = {"features": {"n": {"dtype": "int64"}}, "x": "n", "y": "n"}
SOURCES: dict[str, tuple[str, Callable[[Path], bytes], dict[str, Any]]] = {
    "csv": ("csv", lambda _: CSV, {"label": "y"}),
    "text": ("text", lambda _: CSV, {"length": 5}),
    "text, its beginning": ("text", lambda _: CSV, {"length": 5, "max_bytes": 70}),
    "text, most of it": ("text", lambda _: CSV, {"length": 5, "max_bytes": 300}),
    "npz": ("npz", lambda folder: write_npz(folder, np.savez), {"y": "y"}),
    "npz, packed": ("npz", lambda folder: write_npz(folder, np.savez_compressed), {"y": "y"}),
    "tfrecord": ("tfrecord", write_records, RECORDS),
    "tfrecord, copied": ("tfrecord", lambda folder: gzip.compress(write_records(folder)), {**RECORDS, "copy": True}),
}


class Case:
    """A source on gs://, and what is made of it when nothing goes wrong."""

    def __init__(self, workshop: Any, cloud: FakeGcs, name: str) -> None:
        self.workshop, self.cloud = workshop, cloud
        self.source, write, options = SOURCES[name]
        data = write(workshop.code)
        cloud.store.put("bucket", "data/file", data)
        self.options = {**options, "path": "gs://bucket/data/file"}
        self.sound = self.made()
        self.requests = cloud.count("object.media")
        self.before_the_rows = self.requests - math.ceil(len(data) / REQUEST_BYTES)

    def made(self) -> str:
        """Digest of a dataset that is made now."""
        self.workshop.storage.delete("")
        cloud, self.workshop.events = self.cloud, []
        cloud.reset_counters()
        ref = self.workshop.prepare(self.source, self.options, classes=3 if self.source in {"csv", "npz"} else None)
        return str(load_manifest(self.workshop.storage, ref).content_digest)

    def flipping(self, *, skip: int, bit: int, times: int | None) -> None:
        fault = {"fault": "corrupt-download", "fraction": (bit + 0.5) / (REQUEST_BYTES * 8)}
        self.cloud.faults = FaultPlan.scripted(
            [{"match": {"kind": "object.media"}, "skip": skip, "times": times, **fault}]
        )


@pytest.mark.parametrize("name", SOURCES)
def test_one_flipped_bit_changes_nothing(workshop: Any, cloud: FakeGcs, name: str) -> None:
    case = Case(workshop, cloud, name)
    again = 0
    # Every answer in turn, each with another bit; an odd step meets the digits' lowest bits as well as all others.
    for skip in range(case.requests):
        case.flipping(skip=skip, bit=(skip * 61 + 8 * 7) % (REQUEST_BYTES * 8 - 200), times=1)
        assert case.made() == case.sound, skip
        assert len(cloud.fault_run.log) == 1
        notes = [event.text for event in workshop.events if isinstance(event, Note)]
        again += any("damaged on the way here" in text and "once more" in text for text in notes)
    assert again >= math.ceil(case.requests / 2)


@pytest.mark.parametrize("name", SOURCES)
def test_a_way_that_damages_bytes_each_time_gives_no_dataset(workshop: Any, cloud: FakeGcs, name: str) -> None:
    case = Case(workshop, cloud, name)
    told = 0
    for skip in range(case.requests):
        case.flipping(skip=skip, bit=(skip * 61 + 8 * 7) % (REQUEST_BYTES * 8 - 200), times=None)
        with pytest.raises(SourceError) as fault:
            case.made()
        told += "its bytes are damaged on the way here" in str(fault.value)
        assert workshop.files() == {}, "nothing is left under the dataset's name"
    assert told == case.requests


def test_a_digit_that_flips_is_found_though_it_is_a_digit_still(workshop: Any, cloud: FakeGcs) -> None:
    """The lowest bit of every byte of the rows in turn: 4 for 5, and labels that are classes all the same."""
    case = Case(workshop, cloud, "csv")
    for place in range(0, len(CSV), 9):
        request, byte = divmod(place, REQUEST_BYTES)
        case.flipping(skip=case.before_the_rows + request, bit=8 * byte, times=1)
        assert case.made() == case.sound, place
        assert len(cloud.fault_run.log) == 1


def test_an_example_that_is_refused_is_looked_at_again(workshop: Any, cloud: FakeGcs) -> None:
    """A label beyond the classes may be the wire's; where it is the file's, that is said at once."""
    case = Case(workshop, cloud, "csv")
    label = CSV.index(b"1,7,1\n") + 4
    case.flipping(skip=case.before_the_rows, bit=8 * label + 3, times=1)  # 1 becomes 9
    assert case.made() == case.sound
    cloud.faults = None
    cloud.store.put("bucket", "data/file", CSV.replace(b"1,7,1\n", b"1,7,9\n"))
    with pytest.raises(SourceError, match="9") as fault:
        case.made()
    assert not isinstance(fault.value, DamagedInTransit)


def test_small_files_are_read_whole_and_compared(cloud: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_reads, "_REQUEST_BYTES", 8 << 20)
    monkeypatch.setattr(verified_reads, "_SMALL_BYTES", 256 << 10)
    cloud.store.put("bucket", "data/file", CSV)
    (file,) = find_files("gs://bucket/data/file", Path())
    cloud.faults = FaultPlan.scripted([{"match": {"kind": "object.media"}, "fault": "corrupt-download", "times": 1}])
    with file.open() as opened:
        assert opened.read(5) == CSV[:5]
    cloud.faults = FaultPlan.scripted([{"match": {"kind": "object.media"}, "fault": "corrupt-download", "times": 1}])
    with file.reading() as blocks:
        assert list(blocks) == [CSV]
    assert cloud.count("object.media") == 4
    cloud.faults = FaultPlan.scripted([{"match": {"kind": "object.media"}, "fault": "corrupt-download", "times": None}])
    with (
        pytest.raises(StorageError, match="what arrived has another checksum than the store says, 4 times"),
        file.open(),
    ):
        pass


def test_a_file_that_changed_since_it_was_looked_at(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name comes from what it held then."""
    file = workshop.write("t.csv", CSV)
    from tasks.prepare_data import stage

    opened = stage.open_source

    def changing(*arguments: Any) -> Any:
        source = opened(*arguments)
        file.write_bytes(CSV + b"1,1,1\n")
        return source

    monkeypatch.setattr(stage, "open_source", changing)
    with pytest.raises(SourceError, match="changed while it was being read"):
        workshop.prepare("csv", {"path": "t.csv", "label": "y"})
    assert workshop.files() == {}


def test_cloud_storage_is_what_is_tested(cloud: FakeGcs) -> None:
    (file,) = _put(cloud)
    assert isinstance(file.storage, CloudStorage)
    assert file.storage._bucket.patience == RetryPolicy(total_seconds=20)


def _put(cloud: FakeGcs) -> Any:
    cloud.store.put("bucket", "data/file", b"x")
    return find_files("gs://bucket/data/file", Path())
