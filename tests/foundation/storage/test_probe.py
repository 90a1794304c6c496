"""What is found out about a store before anything is waited for: settings, roles, and whether files can be made."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.errors import StorageError, StoreRefused
from tasks.foundation.storage.checksum import checksum_bytes
from tasks.foundation.storage.gcs.bucket_settings import hurts
from tasks.foundation.storage.gcs.retrying import RetryPolicy
from tasks.foundation.storage.gcs.storage import CloudStorage
from tasks.foundation.storage.local import LocalStorage
from tests.fakes.gcs.fake_gcs import FakeGcs, FaultPlan

QUICK = RetryPolicy(total_seconds=5, stall_seconds=60, first_wait_seconds=0.01)
DELETE = {"type": "Delete"}


def rule(**condition: Any) -> dict[str, Any]:
    return {"action": DELETE, "condition": condition}


def lifecycle(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"lifecycle": {"rule": list(rules)}}


OLD_VERSIONS_ONLY = rule(isLive=False, daysSinceNoncurrentTime=1)


@pytest.mark.parametrize(
    ("settings", "refused", "noted"),
    [
        ({}, [], []),
        ({"versioning": {"enabled": False}, "softDeletePolicy": {"retentionDurationSeconds": "0"}}, [], []),
        ({"retentionPolicy": {"retentionPeriod": "60"}}, ["60 seconds (retention", "--clear-retention-period"], []),
        ({"defaultEventBasedHold": True}, ["a hold on every new object", "--no-default-event-based-hold"], []),
        ({"versioning": {"enabled": True}}, [], ["keeps old versions", "--lifecycle-file=deploy/storage"]),
        ({"versioning": {"enabled": True}, **lifecycle(OLD_VERSIONS_ONLY)}, [], []),
        ({"softDeletePolicy": {"retentionDurationSeconds": "604800"}}, [], ["for 7 days", "--clear-soft-delete"]),
        ({"billing": {"requesterPays": True}}, [], ["requester pays", "--no-requester-pays"]),
        ({"objectRetention": {"mode": "Enabled"}}, [], []),
        (lifecycle(rule(age=30)), [], ["deletes objects that runs need (age 30)", "matchesPrefix"]),
        (lifecycle(rule()), [], ["runs need (always)"]),
        (lifecycle(rule(age=30, isLive=True)), [], ["age 30, isLive True"]),
        (lifecycle(rule(createdBefore="2026-01-01")), [], ["createdBefore 2026-01-01"]),
        (lifecycle(rule(age=30, matchesPrefix=["team/runs/digits/log"])), [], ["age 30"]),
        (lifecycle(rule(age=30, matchesPrefix=["tea"])), [], ["age 30"]),
        (lifecycle(rule(age=30, matchesPrefix=["team/runs2", "tmp/"])), [], []),
        (lifecycle(rule(age=30, matchesSuffix=[".tmp"])), [], []),
        (lifecycle(rule(age=30, matchesSuffix=[".json", ".tmp"])), [], ["age 30"]),
        (lifecycle(rule(age=30, isLive=False)), [], []),
        (lifecycle(rule(numNewerVersions=3)), [], []),
        (lifecycle(rule(daysSinceCustomTime=3)), [], []),
        (lifecycle({"action": {"type": "SetStorageClass"}, "condition": {"age": 1}}), [], []),
        ({"lifecycle": None, "billing": "x", "softDeletePolicy": []}, [], []),
    ],
)
def test_what_hurts_is_said_with_the_command_that_mends_it(
    settings: dict[str, Any], refused: list[str], noted: list[str]
) -> None:
    found = hurts(settings, bucket="gs://b", prefix="team/runs")
    assert len(found.refusals) == bool(refused)
    assert len(found.notes) == bool(noted)
    for texts, words in ((found.refusals, refused), (found.notes, noted)):
        for text in texts:
            assert "gs://b" in text
            for word in words:
                assert word in text


def test_the_bucket_is_asked_for_all_of_them(cloud: FakeGcs) -> None:
    storage = CloudStorage("bucket", "runs", QUICK)
    cloud.store.set_bucket(
        "bucket", versioning=True, soft_delete_seconds=86400, lifecycle=[rule(age=3)], object_retention=True
    )
    notes = storage.probe()
    for words in ("keeps old versions", "for 1 days (soft delete)", "a lifecycle rule of gs://bucket deletes"):
        assert sum(words in note for note in notes) == 1
    assert len(notes) == 3
    cloud.store.set_bucket("bucket", default_event_based_hold=True)
    with pytest.raises(StoreRefused, match=r"gs://bucket puts a hold .*--no-default-event-based-hold"):
        storage.probe()
    assert cloud.store.names("bucket") == []
    # Who may not see the settings meets the hold.
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get"})
    with pytest.raises(StoreRefused, match=r"objects of gs://bucket are under a hold.*\.probe-\w+ is left behind"):
        storage.probe()


@pytest.mark.parametrize("permission", ["create", "get", "list", "delete"])
def test_each_of_the_four_permissions_is_found_missing(cloud: FakeGcs, permission: str) -> None:
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get", f"storage.objects.{permission}"})
    with pytest.raises(StoreRefused, match=rf"storage\.objects\.{permission} is missing"):
        CloudStorage("bucket", "runs", QUICK).probe()


def test_the_size_of_an_empty_object_may_be_left_out(cloud: FakeGcs, tmp_path: Path) -> None:
    cloud.store.set_bucket("bucket", leaves_out_zeros=True)
    storage = CloudStorage("bucket", "runs", QUICK)
    assert storage.probe() == []
    (tmp_path / "empty").touch()
    storage.create("a", b"")
    storage.write("b", b"")
    storage.upload(tmp_path / "empty", "c")
    storage.copy("c", "d")
    for path in "abcd":
        assert storage.exists(path)
        assert storage.read(path) == b""
        assert storage.stat(path) == checksum_bytes(b"") == storage.download(path, tmp_path / "got")


def test_commands_that_begin_together_have_objects_of_their_own(cloud: FakeGcs) -> None:
    slow = {"match": {"path": r"/\.probe"}, "fault": "slow", "times": None, "delay_seconds": 0.05}
    cloud.faults = FaultPlan.scripted([slow])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: CloudStorage("bucket", "runs", QUICK).probe(), range(4)))
    assert found == [[]] * 4
    made = [entry["path"] for entry in cloud.fault_run.log if entry["kind"] == "object.insert"]
    assert len(set(made)) == 4 == len(made)
    assert cloud.store.names("bucket") == []


def test_what_a_killed_command_left_is_cleaned_up_and_what_another_uses_stays(cloud: FakeGcs) -> None:
    now = time.time()
    for age, name in ((7200, "runs/.probe"), (7200, "runs/.probe-dead"), (1, "runs/.probe-alive"), (7200, "runs/x")):
        cloud.store.clock = lambda age=age: now - age
        cloud.store.put("bucket", name, b"")
    cloud.store.clock = time.time
    CloudStorage("bucket", "runs", QUICK).probe()
    assert cloud.store.names("bucket") == ["runs/.probe-alive", "runs/x"]


# A folder of this machine; a disk that is really read-only is in tests/end_to_end/test_read_only_storage.py.


def test_a_folder_bears_what_a_commit_does_and_is_left_as_it_was(tmp_path: Path) -> None:
    there, missing = LocalStorage(tmp_path), LocalStorage(tmp_path / "not" / "there")
    assert there.probe() == [] == missing.probe()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, r"is on a file system without hard links .*use a local disk, NFS or gs://"),
        (13, r"you may not make files here"),
        (30, r"mounted read-only; make it writable .*--set storage=FOLDER"),
    ],
)
def test_a_folder_that_does_not_bear_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreRefused, match=rf"^{tmp_path}.*{said}") as fault:
        LocalStorage(tmp_path).probe()
    assert fault.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="no space left on the disk; free some and run again") as fault:
        LocalStorage(tmp_path).probe()
    assert not isinstance(fault.value, StoreRefused)
