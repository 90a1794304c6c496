"""Reads of objects are verified, or return the checksum of what arrived; many objects are deleted in few requests."""

import gzip
import threading
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.errors import FileTooShort, StorageError, StoreRefused
from baton.tasks.foundation.storage.gcs import objects
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.storage.transfers import checksum_bytes
from tests.fakes.gcs.faults import FAULTS_OF_ANY_REQUEST
from tests.fakes.gcs.server import FakeGcs, FaultPlan

DATA = b"0123456789" * 10


LARGE = bytes(range(256)) * (9 << 12)  # 9 MiB: more than one part


@pytest.mark.parametrize(
    "fault",
    ["status", "reset-before-body", "reset-in-response", "stall", "truncate", "corrupt-download", "expired-token"],
)
def test_read_retries_until_verified(cloud: FakeGcs, storage: CloudStorage, fault: str) -> None:
    storage.write("x", b"content" * 1000)
    cloud.faults = FaultPlan.on("object.media", fault)
    assert storage.read("x") == b"content" * 1000
    assert len(cloud.fault_run.log) == 1


def test_silently_truncated_read_is_retried(cloud: FakeGcs, storage: CloudStorage, tmp_path: Path) -> None:
    storage.write("x", b"content" * 1000)
    cloud.faults = FaultPlan.on("object.media", "truncate-quietly")
    assert storage.read("x") == b"content" * 1000
    cloud.faults = FaultPlan.on("object.media", "truncate-quietly")
    assert storage.download("x", tmp_path / "here") == checksum_bytes(b"content" * 1000)


def test_download_returns_the_checksum_of_what_arrived(cloud: FakeGcs, storage: CloudStorage, tmp_path: Path) -> None:
    """The store has no checksums of ranges, so the caller verifies the whole file."""
    storage.write("x", LARGE)
    cloud.faults = FaultPlan.on("object.media", "corrupt-download")
    arrived = storage.download("x", tmp_path / "here")
    assert arrived == checksum_bytes((tmp_path / "here").read_bytes()) != checksum_bytes(LARGE)
    assert storage.stat("x") == checksum_bytes(LARGE)


def test_repeated_read_corruption_is_an_error(cloud: FakeGcs, storage: CloudStorage) -> None:
    storage.write("x", b"content")
    cloud.faults = FaultPlan.on("object.media", "corrupt-download", times=None)
    with pytest.raises(StorageError, match=r"x: .*the checksum of the received bytes differs"):
        storage.read("x")
    assert len(cloud.fault_run.log) == 4


def test_bytes_without_checksum_are_compared_with_metadata(cloud: FakeGcs) -> None:
    storage = CloudStorage("bucket", "", RetryPolicy(total_seconds=5, stall_seconds=60, first_wait_seconds=0.001))
    cloud.store.put("bucket", "x", DATA)
    wrong = "0123456780" * 10
    cloud.faults = FaultPlan.on("object.media", "instead", code=200, body=wrong, headers={"X-Goog-Generation": "1"})
    assert storage.read("x") == DATA
    assert cloud.counts["GET", "object.get"] == 1


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_compressed_objects_are_refused(cloud: FakeGcs, tmp_path: Path, encoding: str) -> None:
    """The checksum is of the compressed bytes, and the store sends them decompressed: they cannot be verified."""
    storage = CloudStorage("bucket", "", RetryPolicy(total_seconds=5, stall_seconds=60, first_wait_seconds=0.001))
    cloud.store.put("bucket", "data/x.csv", gzip.compress(DATA), contentEncoding=encoding)
    for act in (
        lambda: storage.stat("data/x.csv"),
        lambda: storage.read("data/x.csv"),
        lambda: storage.read_range("data/x.csv", 0, 5),
        lambda: storage.download("data/x.csv", tmp_path / "x"),
    ):
        with pytest.raises(StoreRefused, match=rf"x\.csv: stored with Content-Encoding: {encoding}.*--clear-content"):
            act()
    assert storage.exists("data/x.csv")
    storage.delete("data")
    cloud.store.put("bucket", "data/x.csv", DATA, contentEncoding="UTF-8")  # not a compression
    assert storage.read("data/x.csv") == DATA
    assert storage.stat("data/x.csv") == checksum_bytes(DATA)


def test_bytes_compressed_by_a_proxy_are_rejected(cloud: FakeGcs) -> None:
    storage = CloudStorage("bucket", "", RetryPolicy(total_seconds=0.05, stall_seconds=60, first_wait_seconds=0.01))
    cloud.store.put("bucket", "x", DATA)
    headers = {"Content-Encoding": "gzip", "X-Goog-Stored-Content-Encoding": "identity", "X-Goog-Generation": "1"}
    body = gzip.compress(b"").decode("latin-1")
    cloud.faults = FaultPlan.on("object.media", "instead", times=None, code=200, body=body, headers=headers)
    with pytest.raises(StorageError, match=r"a proxy compressed the bytes \(gzip\)"):
        storage.read("x")


@pytest.mark.parametrize(("begin", "size"), [(0, None), (0, 100), (7, None), (7, 60), (7, 93), (99, 1), (40, 0)])
def test_parts_give_the_same_as_one_read(
    storage: CloudStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: int, size: int | None
) -> None:
    monkeypatch.setattr("baton.tasks.foundation.storage.gcs.storage._PART_BYTES", 9)
    storage.write("x", DATA)
    expected = DATA[begin:] if size is None else DATA[begin : begin + size]
    assert storage.download("x", tmp_path / "here", begin=begin, size=size) == checksum_bytes(expected)
    assert (tmp_path / "here").read_bytes() == expected
    assert storage.checksum("x", begin=begin, size=size) == checksum_bytes(expected)
    if size is not None:
        assert storage.read_range("x", begin, size) == expected
    assert storage.read_range("x", 90, 1000) == DATA[90:]
    assert storage.read_range("x", 100, 5) == b""
    with pytest.raises(FileTooShort, match="x ends 5 bytes too early"):
        storage.download("x", tmp_path / "here", begin=95, size=10)


def test_parts_of_a_file_come_side_by_side(
    storage: CloudStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part's answer has the size of the file; the others then wait for each other in this test."""
    monkeypatch.setattr("baton.tasks.foundation.storage.gcs.storage._PART_BYTES", 20)
    storage.write("x", DATA)
    together, read_range = threading.Barrier(4, timeout=60), objects.read_range

    def read(*arguments: Any) -> tuple[bytes, int]:
        if arguments[2]:
            together.wait()
        return read_range(*arguments)

    monkeypatch.setattr(objects, "read_range", read)
    assert storage.download("x", tmp_path / "here") == checksum_bytes(DATA)


def test_an_object_replaced_between_parts_is_an_error(
    cloud: FakeGcs, storage: CloudStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.tasks.foundation.storage.gcs.storage._PART_BYTES", 20)
    storage.write("x", DATA)
    read_range = objects.read_range

    def read(*arguments: Any) -> tuple[bytes, int]:
        found = read_range(*arguments)
        cloud.store.put("bucket", "some/root/x", DATA[:-1])
        return found

    monkeypatch.setattr(objects, "read_range", read)
    with pytest.raises(StorageError, match="some/root/x: replaced by an object of another size while it was read"):
        storage.download("x", tmp_path / "here")


NAMES = [f"a/{number} ä/%2F?x&y.json" for number in range(5)]


@pytest.fixture
def filled(cloud: FakeGcs, storage: CloudStorage) -> CloudStorage:
    for name in (*NAMES, "ab"):
        cloud.store.put("bucket", f"some/root/{name}", b"x")
    storage.exists("connected")
    cloud.reset_counters()
    return storage


def kinds(cloud: FakeGcs) -> list[str]:
    return [one.kind for one in cloud.tally.sent]


def test_a_folder_is_one_listing_and_one_batch(cloud: FakeGcs, filled: CloudStorage) -> None:
    filled.delete("a")
    assert cloud.store.names("bucket") == ["some/root/ab"]
    assert kinds(cloud) == ["object.list", "batch"]


def test_listed_files_are_not_listed_again(cloud: FakeGcs, filled: CloudStorage) -> None:
    filled.delete("a", files=[*NAMES[:3], "a/deleted meanwhile"])
    assert sorted(filled.files("a")) == NAMES[3:]
    assert kinds(cloud) == ["batch", "object.list"]
    cloud.reset_counters()
    filled.delete("a", files=NAMES[3:4])
    assert sorted(filled.files("a")) == NAMES[4:]
    assert kinds(cloud) == ["object.delete", "object.list"]
    filled.delete("a", files=[])
    assert sorted(filled.files("a")) == NAMES[4:]


def test_more_than_a_hundred_take_several_batches(cloud: FakeGcs, storage: CloudStorage) -> None:
    for number in range(205):
        cloud.store.put("bucket", f"some/root/many/{number}", b"")
    storage.delete("many")
    assert cloud.store.names("bucket") == []
    assert sorted(kinds(cloud)) == ["batch"] * 3 + ["object.list"]


@pytest.mark.parametrize("fault", [*FAULTS_OF_ANY_REQUEST, "cut-response", "bad-status-line"])
def test_a_batch_that_fails_is_followed_by_single_deletes(cloud: FakeGcs, filled: CloudStorage, fault: str) -> None:
    cloud.faults = FaultPlan.on("batch", fault, fraction=0.4)
    filled.delete("a")
    assert cloud.store.names("bucket") == ["some/root/ab"]
    assert cloud.count("batch") == 1


@pytest.mark.parametrize("code", [400, 404, 405, 501])
def test_a_store_without_batches_deletes_one_by_one(cloud: FakeGcs, filled: CloudStorage, code: int) -> None:
    cloud.faults = FaultPlan.on("batch", "instead", code=code, body="{}", times=None)
    filled.delete("a")
    assert cloud.store.names("bucket") == ["some/root/ab"]


@pytest.mark.parametrize("body", ["", "nothing", "--x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n--x--"])
def test_an_answer_that_names_no_object_is_not_believed(cloud: FakeGcs, filled: CloudStorage, body: str) -> None:
    headers = {"Content-Type": "multipart/mixed; boundary=x"}
    cloud.faults = FaultPlan.on("batch", "instead", code=200, body=body, headers=headers)
    filled.delete("a")
    assert cloud.store.names("bucket") == ["some/root/ab"]


def test_one_held_object_is_reported_and_the_others_go(
    cloud: FakeGcs, filled: CloudStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.store.set_bucket("bucket", denied=("storage.objects.delete",))
    with pytest.raises(StorageError, match=r"some/root/a/0 ä"):
        filled.delete("a")
    cloud.store.set_bucket("bucket", denied=())
    delete = cloud.store.delete

    def held(bucket: str, name: str, *arguments: Any) -> Any:
        if name.endswith(NAMES[2]):
            cloud.store.set_bucket("bucket", denied=("storage.objects.delete",))
        try:
            return delete(bucket, name, *arguments)
        finally:
            cloud.store.set_bucket("bucket", denied=())

    monkeypatch.setattr(cloud.store, "delete", held)
    with pytest.raises(StorageError, match=r"some/root/a/2 ä"):
        filled.delete("a")
    assert sorted(filled.files("a")) == [NAMES[2]]


def test_best_effort_bounds_a_batch_too(cloud: FakeGcs) -> None:
    cloud.faults = FaultPlan.on("", "status", code=503, times=None)
    storage = CloudStorage("bucket", "some/root", RetryPolicy(first_wait_seconds=0.01)).with_deadline(0.2)
    with pytest.raises(StorageError, match="gave up after"):
        storage.delete("a", files=NAMES)
