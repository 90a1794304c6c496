"""Many objects are deleted in few requests; what a batch does not delete is deleted one by one."""

from typing import Any

import pytest

from tasks.foundation.errors import StorageError
from tasks.foundation.storage.gcs.retrying import RetryPolicy
from tasks.foundation.storage.gcs.storage import CloudStorage
from tests.fakes.gcs.faults import FAULTS_OF_ANY_REQUEST
from tests.fakes.gcs.server import FakeGcs, FaultPlan

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
