"""Settings of buckets, tokens, and the counters that tests read."""

import pytest

from tests.fakes.gcs.objects import CALLER
from tests.fakes.gcs.raw import Raw
from tests.fakes.gcs.server import FakeGcs, FaultPlan, fake_gcs_process


def test_retention_refuses_deletes_and_overwrites_until_it_ends() -> None:
    now = [1_700_000_000.0]
    with FakeGcs(clock=lambda: now[0]) as server, Raw(server.url) as raw:
        server.store.set_bucket("bucket", retention_seconds=60)
        raw.insert("n", b"data")
        for refused in (raw.insert("n", b"new"), raw.delete("n")):
            assert refused.status == 403
            assert refused.message == (
                "Object 'bucket/n' is subject to bucket's retention policy or object retention and cannot be deleted "
                "or overwritten until 2023-11-14T22:14:20.000Z"
            )
        assert raw.insert("n", b"new", ifGenerationMatch=0).status == 412
        now[0] += 61
        assert raw.delete("n").status == 204


@pytest.mark.parametrize("permission", ["create", "get", "list", "delete"])
def test_denied_permission_refuses_its_operation_only(raw: Raw, server: FakeGcs, permission: str) -> None:
    server.store.put("bucket", "n", b"data")
    full = f"storage.objects.{permission}"
    server.store.set_bucket("bucket", denied=[full])
    requests = {
        "create": lambda: raw.insert("new", b""),
        "get": lambda: raw.media("n"),
        "list": raw.list,
        "delete": lambda: raw.delete("n"),
    }
    for name, request in requests.items():
        response = request()
        assert (response.status == 403) == (name == permission), name
        if name == permission and name != "list":
            assert response.message == (
                f"{CALLER} does not have {full} access to the Google Cloud Storage object. "
                f"Permission '{full}' denied on resource (or it may not exist)."
            )


def test_overwrite_needs_the_permission_to_delete(raw: Raw, server: FakeGcs) -> None:
    server.store.put("bucket", "n", b"old")
    server.store.set_bucket("bucket", denied=["storage.objects.delete"])
    assert "storage.objects.delete" in raw.insert("n", b"new").message
    assert raw.insert("m", b"new").status == 200
    session = raw.initiate("later")
    server.store.put("bucket", "later2", b"")
    assert raw.chunk(session, "0-3/4", b"data").status == 200
    assert server.store.bytes("bucket", "n") == b"old"


def test_missing_object_is_hidden_without_list_permission(raw: Raw, server: FakeGcs) -> None:
    server.store.set_bucket("bucket", denied=["storage.objects.list"])
    assert raw.get("none").status == 403


def test_requester_pays_bucket_needs_a_project(raw: Raw, server: FakeGcs) -> None:
    server.store.set_bucket("bucket", requester_pays=True)
    refused = raw.insert("n", b"")
    assert (refused.status, refused.json()["error"]["errors"][0]["reason"]) == (400, "required")
    assert refused.message == "Bucket is a requester pays bucket but no user project provided."
    assert raw.insert("n", b"", userProject="mine").status == 200


def test_old_generation_is_gone(raw: Raw) -> None:
    first = raw.insert("n", b"one").json()["generation"]
    raw.insert("n", b"two")
    assert raw.media("n", generation=first).status == 404
    assert raw.delete("n", generation=first).status == 404


def test_only_issued_tokens_are_accepted() -> None:
    with FakeGcs(require_token=True) as server, Raw(server.url) as raw:
        refused = raw.list()
        assert (refused.status, refused.message) == (401, "Invalid Credentials")
        issued = raw.request("POST", "/_fake/token", b"grant_type=jwt&assertion=x").json()
        assert (issued["expires_in"], issued["token_type"]) == (3600, "Bearer")
        bearer = {"Authorization": f"Bearer {issued['access_token']}"}
        assert raw.request("GET", "/storage/v1/b/bucket/o", headers=bearer).status == 200
        server.control.refuse = True
        response = raw.request("POST", "/_fake/token")
        assert (response.status, response.json()["error"]) == (400, "invalid_grant")
        assert server.count("token") == 2


def test_requests_are_counted(raw: Raw, server: FakeGcs) -> None:
    raw.insert("n", b"data")
    raw.media("n")
    raw.media("n", {"Range": "bytes=0-1"})
    raw.media("none")
    assert server.counts == {("POST", "object.insert"): 1, ("GET", "object.media"): 3}
    assert server.tally.media == {("bucket", "n"): 2}
    assert server.tally.statuses == {200: 2, 206: 1, 404: 1}
    assert server.tally.bytes_in == 4
    server.reset_counters()
    assert server.counts == {}


def test_separate_process_can_be_controlled() -> None:
    with fake_gcs_process(("bucket",)) as server, Raw(server.url) as raw:
        assert raw.insert("n", b"data").status == 200
        server.set_faults(FaultPlan.scripted([{"fault": "status", "code": 429, "match": {"kind": "object.media"}}]))
        assert [raw.media("n").status for _ in range(2)] == [429, 200]
        state = server.state()
        assert state["counts"] == {"POST object.insert": 1, "GET object.media": 2}
        assert state["media"] == {"bucket/n": 1}
        assert state["objects"]["bucket"]["n"]["size"] == 4
        assert [entry["fault"] for entry in state["faults"]] == ["status"]
        server.reset_counters()
        assert server.count("object") == 0
        assert raw.request("POST", "/_fake/faults", {"rates": {"nonsense": 1}}).status == 400
