"""Bits that flip in transit from gs://: the dataset is the same as without damage, or refused."""

import gzip
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.errors import DamagedInTransit, SourceError, StorageError
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.prepare_data.sources import source_files, verified_reads
from baton.tasks.prepare_data.sources.source_files import find_files
from tests.fakes.gcs.server import FakeGcs, FaultPlan

CSV = "".join(["a,b,y\n", *(f"{number},{number * 7 % 10},{number % 3}\n" for number in range(40))]).encode()
# Small requests, so that small files arrive in several parts.
REQUEST_BYTES = 64


@pytest.fixture(autouse=True)
def _small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_reads, "_REQUEST_BYTES", REQUEST_BYTES)
    monkeypatch.setattr(verified_reads, "_SMALL_BYTES", 0)
    monkeypatch.setattr(source_files, "_BLOCK_BYTES", REQUEST_BYTES)
    monkeypatch.setenv("BATON_STORAGE_PATIENCE_SECONDS", "20")


@pytest.fixture
def _one_request_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in READ_IN_PART:
        monkeypatch.setattr(verified_reads, "_WORKERS", 1)


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


def write_table(folder: Path, suffix: str) -> bytes:
    table = pa.table({"x": np.arange(20, dtype=np.float32), "y": np.arange(20) % 3})
    file = folder / f"made.{suffix}"
    if suffix == "parquet":  # without what makes a footer longer
        parquet.write_table(
            table, file, row_group_size=12, compression="none", use_dictionary=False, store_schema=False
        )
    else:
        with ipc.new_stream(str(file), table.schema) as writer:
            writer.write_table(table, max_chunksize=12)
    return file.read_bytes()


TABLE = {"x": "x", "y": "y"}
RECORDS = {"features": {"n": {"dtype": "int64"}}, "x": "n", "y": "n"}
SOURCES: dict[str, tuple[str, Callable[[Path], bytes], dict[str, Any]]] = {
    "CSV": ("table", lambda _: CSV, {"y": "y", "stack": True}),
    "text": ("text", lambda _: CSV, {"length": 5}),
    "text, its beginning": ("text", lambda _: CSV, {"length": 5, "max_bytes": 70}),
    "text, most of it": ("text", lambda _: CSV, {"length": 5, "max_bytes": 300}),
    "npz": ("npz", lambda folder: write_npz(folder, np.savez), {"y": "y"}),
    "npz, packed": ("npz", lambda folder: write_npz(folder, np.savez_compressed), {"y": "y"}),
    "Parquet": ("table", lambda folder: write_table(folder, "parquet"), TABLE),
    "Parquet, copied": ("table", lambda folder: write_table(folder, "parquet"), {**TABLE, "copy": True}),
    "Arrow": ("table", lambda folder: write_table(folder, "arrow"), TABLE),
    "tfrecord": ("tfrecord", write_records, RECORDS),
    "tfrecord, copied": ("tfrecord", lambda folder: gzip.compress(write_records(folder)), {**RECORDS, "copy": True}),
}
# Reading stops before the end of these. How many requests have been made ahead by then would depend on the threads.
READ_IN_PART = {"Parquet", "Arrow", "text, its beginning", "text, most of it"}


class Case:
    """A source on gs://, and its dataset without damage."""

    def __init__(self, workshop: Any, cloud: FakeGcs, name: str) -> None:
        self.workshop, self.cloud = workshop, cloud
        self.source, write, options = SOURCES[name]
        data = write(workshop.code)
        self.file = "data/file.csv" if name == "CSV" else "data/file"
        cloud.store.put("bucket", self.file, data)
        self.options = {**options, "path": f"gs://bucket/{self.file}"}
        self.sound = self.made()
        self.requests = cloud.count("object.media")
        self.before_the_rows = self.requests - math.ceil(len(data) / REQUEST_BYTES)

    @property
    def damaged(self) -> range:
        """The requests whose responses are damaged in turn: every other one of many."""
        return range(0, self.requests, 2 if self.requests > 6 else 1)

    def made(self) -> str:
        """Prepare the dataset, and return its digest."""
        self.workshop.storage.delete("")
        cloud, self.workshop.events = self.cloud, []
        cloud.reset_counters()
        ref = self.workshop.prepare(self.source, self.options, classes=3 if self.source in {"npz", "table"} else None)
        return str(load_manifest(self.workshop.storage, ref).content_digest)

    def flipping(self, *, skip: int, bit: int, times: int | None) -> None:
        fault = {"fault": "corrupt-download", "fraction": (bit + 0.5) / (REQUEST_BYTES * 8)}
        self.cloud.faults = FaultPlan.scripted(
            [{"match": {"kind": "object.media"}, "skip": skip, "times": times, **fault}]
        )


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.usefixtures("_one_request_at_a_time")
def test_one_flipped_bit_does_not_change_the_dataset(workshop: Any, cloud: FakeGcs, name: str) -> None:
    case = Case(workshop, cloud, name)
    again = 0
    # Damages the responses in turn, at another bit; the odd stride reaches all bits, also the lowest ones of digits.
    for skip in case.damaged:
        case.flipping(skip=skip, bit=(skip * 61 + 8 * 7) % (REQUEST_BYTES * 8 - 200), times=1)
        assert case.made() == case.sound, skip
        assert len(cloud.fault_run.log) == 1
        notes = [event.text for event in workshop.events if isinstance(event, Note)]
        again += any("damaged in transit" in text and "Reading the source again" in text for text in notes)
    assert again >= math.ceil(len(case.damaged) / 2)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.usefixtures("_one_request_at_a_time")
def test_repeated_transit_damage_gives_no_dataset(workshop: Any, cloud: FakeGcs, name: str) -> None:
    case = Case(workshop, cloud, name)
    for skip in case.damaged:
        case.flipping(skip=skip, bit=(skip * 61 + 8 * 7) % (REQUEST_BYTES * 8 - 200), times=None)
        with pytest.raises(SourceError, match="its bytes were damaged in transit"):
            case.made()
        assert workshop.files() == {}, "files are left"


def test_flipped_digit_is_found_although_it_is_valid(workshop: Any, cloud: FakeGcs) -> None:
    """Flips the lowest bit of bytes all over the rows in turn: 4 becomes 5, and labels stay valid classes."""
    case = Case(workshop, cloud, "CSV")
    for place in range(0, len(CSV), 18):
        request, byte = divmod(place, REQUEST_BYTES)
        case.flipping(skip=case.before_the_rows + request, bit=8 * byte, times=1)
        assert case.made() == case.sound, place
        assert len(cloud.fault_run.log) == 1


def test_refused_example_is_read_again(workshop: Any, cloud: FakeGcs) -> None:
    """A label out of range may be transit damage; if the file has it, it is reported at once."""
    case = Case(workshop, cloud, "CSV")
    label = CSV.index(b"1,7,1\n") + 4
    case.flipping(skip=case.before_the_rows, bit=8 * label + 3, times=1)  # 1 becomes 9
    assert case.made() == case.sound
    cloud.faults = None
    cloud.store.put("bucket", case.file, CSV.replace(b"1,7,1\n", b"1,7,9\n"))
    with pytest.raises(SourceError, match="9") as fault:
        case.made()
    assert not isinstance(fault.value, DamagedInTransit)


def test_small_files_are_read_whole_and_verified(cloud: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
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
        pytest.raises(StorageError, match="the checksum of the received bytes differs from the store's, 4 times"),
        file.open(),
    ):
        pass


def test_file_changed_since_its_fingerprint_is_refused(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset's name derives from the earlier content."""
    file = workshop.write("t.csv", CSV)
    from baton.tasks.prepare_data import stage

    opened = stage.open_source

    def changing(*arguments: Any, **settings: Any) -> Any:
        source = opened(*arguments, **settings)
        file.write_bytes(CSV + b"1,1,1\n")
        return source

    monkeypatch.setattr(stage, "open_source", changing)
    with pytest.raises(SourceError, match="changed while it was being read"):
        workshop.prepare("table", {"path": "t.csv", "y": "y"})
    assert workshop.files() == {}


def test_sources_are_read_from_cloud_storage(cloud: FakeGcs) -> None:
    (file,) = _put(cloud)
    assert isinstance(file.storage, CloudStorage)
    assert file.storage._bucket.policy == RetryPolicy(total_seconds=20)


def _put(cloud: FakeGcs) -> Any:
    cloud.store.put("bucket", "data/file", b"x")
    return find_files("gs://bucket/data/file", Path())
