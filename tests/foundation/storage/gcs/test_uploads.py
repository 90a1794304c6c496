"""Uploads: one request from memory; sessions that continue after a break, and whose secret URL is never shown."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from baton.tasks.foundation.errors import StorageError, StoreRefused
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.responses import without_queries
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.storage.transfers import checksum_bytes
from tests.fakes.gcs.faults import FAULTS_OF_ANY_REQUEST
from tests.fakes.gcs.server import FakeGcs, FaultPlan

LARGE = bytes(range(256)) * (9 << 12)  # 9 MiB: more than one part


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(("upload.initiate", fault) for fault in FAULTS_OF_ANY_REQUEST if fault not in {"corrupt-upload", "unread"}),
        *(("upload.chunk", fault) for fault in [*FAULTS_OF_ANY_REQUEST, "short-chunk"]),
    ],
)
def test_upload_resumes_after_each_fault(
    cloud: FakeGcs, storage: CloudStorage, tmp_path: Path, kind: str, fault: str
) -> None:
    (tmp_path / "large").write_bytes(LARGE)
    cloud.faults = FaultPlan.on(kind, fault, fraction=0.7)
    assert storage.upload(tmp_path / "large", "ckpt.data") == checksum_bytes(LARGE)
    assert cloud.store.bytes("bucket", "some/root/ckpt.data") == LARGE
    assert len(cloud.fault_run.log) == 1
    if (kind, fault) == ("upload.chunk", "reset-in-body"):
        assert cloud.tally.bytes_in < 1.5 * len(LARGE), "it was sent from the beginning again"


def test_upload_completes_when_store_keeps_part_of_each_chunk(
    cloud: FakeGcs, storage: CloudStorage, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(LARGE)
    cloud.faults = FaultPlan.on("upload.chunk", "short-chunk", times=9, fraction=0.2)
    assert storage.upload(tmp_path / "large", "ckpt.data") == checksum_bytes(LARGE)
    assert cloud.store.bytes("bucket", "some/root/ckpt.data") == LARGE
    assert len(cloud.fault_run.log) == 9
    assert cloud.count("upload.initiate") == 1


def test_deleted_source_file_is_reported(
    cloud: FakeGcs, storage: CloudStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "large"
    file.write_bytes(LARGE)
    monkeypatch.setattr(
        "baton.tasks.foundation.storage.gcs.uploads.checksum_file", lambda _: (file.unlink(), checksum_bytes(LARGE))[1]
    )
    with pytest.raises(StorageError, match=r"large: cannot read the rest of the file \(No such file"):
        storage.upload(file, "ckpt.data")
    assert cloud.count("upload.chunk") <= 1


def test_upload_starts_over_when_its_session_is_lost(cloud: FakeGcs, storage: CloudStorage, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(LARGE)
    cloud.faults = FaultPlan.scripted(
        [
            {"match": {"kind": "upload.chunk"}, "fault": "reset-in-body", "times": 1},
            {"match": {"kind": "upload.query"}, "fault": "status", "code": 410, "times": 1},
        ]
    )
    storage.upload(tmp_path / "large", "ckpt.data")
    assert cloud.store.bytes("bucket", "some/root/ckpt.data") == LARGE
    assert cloud.count("upload.initiate") == 2


def test_upload_url_never_appears_in_messages(cloud: FakeGcs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Anyone who knows the URL can write to the object."""
    (tmp_path / "large").write_bytes(bytes(9 << 20))
    storage = CloudStorage("bucket", "", RetryPolicy(total_seconds=5, stall_seconds=2, first_wait_seconds=0.01))
    cloud.faults = FaultPlan.scripted(
        [
            {"match": {"kind": "upload.chunk"}, "fault": "reset-in-body", "times": 1},
            {"match": {"kind": "upload.chunk"}, "fault": "unread", "times": 1},
            {"match": {"kind": "upload.chunk"}, "fault": "status", "code": 403, "times": 1},
        ]
    )
    with pytest.raises(StoreRefused) as error:
        storage.upload(tmp_path / "large", "x")
    assert len(caplog.messages) == 2
    assert "upload_id" not in caplog.text + str(error.value)
    assert without_queries("no: http://host/upload/b?upload_id=SECRET&a=1 (400)") == "no: http://host/upload/b (400)"


BUFFERS = [memoryview(LARGE)[begin : begin + (3 << 20)] for begin in range(0, len(LARGE), 3 << 20)]


def test_buffers_are_sent_in_one_request(cloud: FakeGcs, storage: CloudStorage) -> None:
    storage.exists("connected")
    cloud.reset_counters()
    assert storage.write_buffers("ckpt.data", BUFFERS) == checksum_bytes(LARGE)
    assert cloud.store.bytes("bucket", "some/root/ckpt.data") == LARGE
    assert [one.kind for one in cloud.tally.sent] == ["object.insert"]


def test_buffers_are_not_copied(storage: CloudStorage) -> None:
    size = 48 << 20
    buffer = memoryview(bytearray(size))
    storage.exists("connected")
    tracemalloc.start()
    try:
        storage.write_buffers("large", [buffer[: size // 3], buffer[size // 3 :]])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The fake keeps the object in this process, so its copy is not counted.
    assert peak < size + (16 << 20)


def test_a_small_file_is_sent_again_whole(cloud: FakeGcs, patient: CloudStorage, tmp_path: Path) -> None:
    """A session cannot name a range of no bytes."""
    (tmp_path / "empty").touch()
    cloud.faults = FaultPlan.on("object.insert", "reset-in-body")
    assert patient.upload(tmp_path / "empty", "empty") == checksum_bytes(b"")
    assert [one.kind for one in cloud.tally.sent] == ["object.insert"] * 2


@pytest.mark.parametrize("fault", [fault for fault in FAULTS_OF_ANY_REQUEST if fault != "duplicate"])
def test_a_broken_request_continues_as_a_session(cloud: FakeGcs, patient: CloudStorage, fault: str) -> None:
    cloud.faults = FaultPlan.on("object.insert", fault, fraction=0.7)
    assert patient.write_buffers("ckpt.data", BUFFERS) == checksum_bytes(LARGE)
    assert cloud.store.bytes("bucket", "some/root/ckpt.data") == LARGE
    assert [one.kind for one in cloud.tally.sent] == ["object.insert", "upload.initiate", "upload.chunk"]


def test_a_session_of_buffers_continues_within_a_buffer(cloud: FakeGcs, storage: CloudStorage) -> None:
    cloud.faults = FaultPlan.scripted(
        [
            {"match": {"kind": "object.insert"}, "fault": "reset-in-body"},
            {"match": {"kind": "upload.chunk"}, "fault": "short-chunk", "times": 5, "fraction": 0.3},
        ]
    )
    assert storage.write_buffers("ckpt.data", BUFFERS) == checksum_bytes(LARGE)
    assert cloud.store.bytes("bucket", "some/root/ckpt.data") == LARGE


def test_too_many_buffers_go_up_as_a_session(
    cloud: FakeGcs, storage: CloudStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.tasks.foundation.storage.gcs.storage._ONE_REQUEST_BYTES", len(LARGE) - 1)
    assert storage.write_buffers("ckpt.data", BUFFERS) == checksum_bytes(LARGE)
    assert cloud.store.bytes("bucket", "some/root/ckpt.data") == LARGE
    assert [one.kind for one in cloud.tally.sent] == ["upload.initiate", "upload.chunk"]


def test_other_bytes_in_the_store_are_an_error(
    cloud: FakeGcs, storage: CloudStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checksum in the request, the store keeps what arrives; its answer then says so."""
    monkeypatch.setattr("baton.tasks.foundation.storage.gcs.uploads._base64_of", lambda _: None)
    cloud.faults = FaultPlan.on("", "corrupt-upload", times=None)
    with pytest.raises(StorageError, match=r"sent \d+ bytes with crc32c \w+, the store has.*4 times"):
        storage.write_buffers("ckpt.data", BUFFERS)


def test_buffers_for_a_missing_bucket_are_refused(cloud: FakeGcs) -> None:  # noqa: ARG001 - its address is in use
    with pytest.raises(StoreRefused, match="gs://other/x: "):
        CloudStorage("other", "").write_buffers("x", BUFFERS)


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # importing it fails
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
CloudStorage("bucket", "light").create("log/00000000.json", b"{}")"""


@pytest.mark.usefixtures("storage")
def test_small_files_are_written_without_numpy(cloud: FakeGcs) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert cloud.store.bytes("bucket", "light/log/00000000.json") == b"{}"
