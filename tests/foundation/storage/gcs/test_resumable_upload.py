"""Resumable uploads continue where they broke off, and their secret URL never appears in messages."""

from pathlib import Path

import pytest

from tasks.foundation.errors import StorageError, StoreRefused
from tasks.foundation.storage.checksum import checksum_bytes
from tasks.foundation.storage.gcs.responses import without_queries
from tasks.foundation.storage.gcs.retrying import RetryPolicy
from tasks.foundation.storage.gcs.storage import CloudStorage
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
        "tasks.foundation.storage.gcs.storage.checksum_file", lambda _: (file.unlink(), checksum_bytes(LARGE))[1]
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
