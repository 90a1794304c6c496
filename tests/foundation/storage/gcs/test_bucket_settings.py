"""A bucket is checked early: harmful settings, missing permissions, and whether objects can be created."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.errors import StoreRefused
from tasks.foundation.storage.gcs.refusals import check_settings
from tasks.foundation.storage.gcs.retrying import RetryPolicy
from tasks.foundation.storage.gcs.storage import CloudStorage
from tasks.foundation.storage.transfers import checksum_bytes
from tests.fakes.gcs.server import FakeGcs, FaultPlan

QUICK = RetryPolicy(total_seconds=5, stall_seconds=60, first_wait_seconds=0.01)
DELETE = {"type": "Delete"}


def rule(**condition: Any) -> dict[str, Any]:
    return {"action": DELETE, "condition": condition}


def lifecycle(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"lifecycle": {"rule": list(rules)}}


OLD_VERSIONS_ONLY = rule(isLive=False, daysSinceNoncurrentTime=1)


@pytest.mark.parametrize(
    ("settings", "errors", "warnings"),
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
def test_harmful_settings_name_the_command_that_changes_them(
    settings: dict[str, Any], errors: list[str], warnings: list[str]
) -> None:
    found = check_settings(settings, bucket="gs://b", prefix="team/runs")
    assert len(found.errors) == bool(errors)
    assert len(found.warnings) == bool(warnings)
    for texts, words in ((found.errors, errors), (found.warnings, warnings)):
        for text in texts:
            assert "gs://b" in text
            for word in words:
                assert word in text


def test_probe_reports_all_harmful_settings(cloud: FakeGcs) -> None:
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
    # Without permission to read the settings, the probe runs into the hold.
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get"})
    with pytest.raises(StoreRefused, match=r"objects of gs://bucket are under a hold.*\.probe-\w+ is left behind"):
        storage.probe()


@pytest.mark.parametrize("permission", ["create", "get", "list", "delete"])
def test_probe_finds_each_missing_permission(cloud: FakeGcs, permission: str) -> None:
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get", f"storage.objects.{permission}"})
    with pytest.raises(StoreRefused, match=rf"storage\.objects\.{permission} is missing"):
        CloudStorage("bucket", "runs", QUICK).probe()


def test_empty_object_may_have_no_size(cloud: FakeGcs, tmp_path: Path) -> None:
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


def test_concurrent_probes_use_their_own_objects(cloud: FakeGcs) -> None:
    slow = {"match": {"path": r"/\.probe"}, "fault": "slow", "times": None, "delay_seconds": 0.05}
    cloud.faults = FaultPlan.scripted([slow])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: CloudStorage("bucket", "runs", QUICK).probe(), range(4)))
    assert found == [[]] * 4
    made = [entry["path"] for entry in cloud.fault_run.log if entry["kind"] == "object.insert"]
    assert len(set(made)) == 4 == len(made)
    assert cloud.store.names("bucket") == []


def test_expired_probes_are_deleted_and_recent_ones_kept(cloud: FakeGcs) -> None:
    now = time.time()
    for age, name in ((7200, "runs/.probe"), (7200, "runs/.probe-dead"), (1, "runs/.probe-alive"), (7200, "runs/x")):
        cloud.store.clock = lambda age=age: now - age
        cloud.store.put("bucket", name, b"")
    cloud.store.clock = time.time
    CloudStorage("bucket", "runs", QUICK).probe()
    assert cloud.store.names("bucket") == ["runs/.probe-alive", "runs/x"]


def test_retention_policy_is_refused_before_writing(cloud: FakeGcs) -> None:
    cloud.store.set_bucket("bucket", retention_seconds=86400)
    storage = CloudStorage("bucket", "runs", QUICK)
    with pytest.raises(StoreRefused, match=r"keeps every object for 86400 seconds .*--clear-retention-period"):
        storage.probe()
    assert cloud.store.names("bucket") == []


def test_probe_finds_missing_permissions_without_settings(cloud: FakeGcs) -> None:
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get"})
    storage = CloudStorage("bucket", "runs", QUICK)
    assert storage.probe() == []
    assert cloud.store.names("bucket") == []
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get", "storage.objects.delete"})
    with pytest.raises(StoreRefused, match=r"no permission to delete.*\.probe-\w+ is left behind"):
        storage.probe()
    cloud.store.set_bucket("bucket", denied={"storage.buckets.get", "storage.objects.create"})
    with pytest.raises(StoreRefused, match=r"no permission to create objects"):
        storage.probe()


def test_object_versioning_is_a_warning(cloud: FakeGcs) -> None:
    cloud.store.set_bucket("bucket", versioning=True)
    [note] = CloudStorage("bucket", "runs", QUICK).probe()
    assert "keeps old versions" in note
    assert "deploy/google-cloud.md" in note
