"""Responses of a proxy, a login page or a cache in the store's place are retried, and never believed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from baton.tasks.foundation.errors import FileAlreadyThere, FileMissing, StorageError, StoreRefused
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.storage.transfers import checksum_bytes
from tests.fakes.gcs.server import FakeGcs, FaultPlan

PAGE = "<!DOCTYPE html><html><head><title>Sign in</title></head><body>to the network</body></html>"


FOREIGN = {"kind": "storage#object", "name": "foreign", "generation": "7", "crc32c": "AAAAAA==", "size": "0"}


DATA = b"0123456789" * 10


LARGE = bytes(range(256)) * 8  # two parts, since this test makes parts small


PART_BYTES = 1 << 10


OTHER_OBJECTS = {"runs": b"1", "runs-of-others/log/0": b"2", "other/x": b"3"}


def reason(word: str) -> dict[str, Any]:
    body = {"error": {"code": 403, "message": "Slow down.", "errors": [{"reason": word}]}}
    return {"fault": "instead", "code": 403, "body": json.dumps(body)}


def instead(code: int, body: object = "", **headers: str) -> dict[str, Any]:
    return {
        "fault": "instead",
        "code": code,
        "body": body if isinstance(body, str) else json.dumps(body),
        "headers": {key.replace("_", "-"): value for key, value in headers.items()},
    }


RESPONSES: dict[str, dict[str, Any]] = {
    "a page with 200": instead(200, PAGE, Content_Type="text/html"),
    "a page with 200 after it took effect": {**instead(200, PAGE), "takes_effect": True},
    **{f"a page with {code}": instead(code, PAGE) for code in (400, 403, 404, 410, 412, 416, 502)},
    "nothing with 404": instead(404),
    "cut JSON with 404": instead(404, '{"error": {"code": 4'),
    "nothing with 200": instead(200),
    "nothing with 201 after it took effect": {**instead(201), "takes_effect": True},
    "null": instead(200, "null"),
    "a list": instead(200, [1]),
    "an empty object": instead(200, {}),
    "cut JSON with 200": instead(200, '{"kind": "storage#objects", "items": [{"na'),
    "a cut answer": {"fault": "cut-response", "fraction": 0.7},
    "a bad status line": {"fault": "bad-status-line"},
    **{
        f"a redirect {code}": instead(code, PAGE, Location="http://127.0.0.1:9/sign-in?token=SECRET")
        for code in (301, 302, 303, 307, 308)
    },
    "not modified": instead(304),
    "another object": instead(200, FOREIGN),
    "a listing of another prefix": instead(200, {"kind": "storage#objects", "items": [{"name": "other/x"}]}),
    "prefixes of another": instead(200, {"kind": "storage#objects", "prefixes": ["other/"]}),
    "a prefix that is no folder": instead(200, {"kind": "storage#objects", "prefixes": ["runs/a/lo"]}),
    "a garbled listing": instead(200, {"kind": "storage#objects", "items": [{"nome": "x"}]}),
    "a listing of one name": instead(200, {"kind": "storage#objects", "items": "x"}),
    "a listing that goes on with nothing": instead(200, {"kind": "storage#objects", "nextPageToken": ""}),
    "a listing without its kind": instead(200, {"items": []}),
    "another bucket": instead(200, {"kind": "storage#bucket", "name": "another"}),
    "garbled settings": instead(200, {"kind": "storage#bucket", "name": "bucket", "lifecycle": {"rule": "x"}}),
    "a copy that is neither done nor not": instead(200, {"kind": "storage#rewriteResponse", "done": "yes"}),
    "a copy of another": instead(200, {"kind": "storage#rewriteResponse", "done": True, "resource": FOREIGN}),
    "a session elsewhere": instead(200, "", Location="/login"),
    "a session of another server": instead(200, "", Location="http://127.0.0.1:9/login"),
    "more than was sent": instead(308, "", Range="bytes=0-99999999"),
    "a range that is none": instead(308, "", Range="items 1-2"),
    "a checksum refused with 412": instead(
        412, {"error": {"errors": [{"message": "crc32c validation failed. Expected = 1 vs Actual = 2."}]}}
    ),
    **{word: reason(word) for word in ("rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded")},
    "bytes without the store's headers": {"fault": "bare"},
}


class Operation(NamedTuple):
    act: Callable[[CloudStorage, Path], Any]
    kinds: tuple[str, ...]  # of requests; each gets the bad response in turn
    result: Any = None
    objects: dict[str, bytes | None] = {}  # noqa: RUF012 - objects afterwards; never changed


def listed(paths: Any) -> list[str]:
    return sorted(paths)


OPERATIONS = {
    "read": Operation(lambda store, _: store.read("log/0"), ("object.media",), DATA),
    "read_range": Operation(lambda store, _: store.read_range("log/0", 10, 15), ("object.media",), DATA[10:25]),
    "read_range at the end": Operation(lambda store, _: store.read_range("log/0", 100, 15), ("object.media",), b""),
    "download": Operation(lambda store, at: store.download("large", at), ("object.media",), checksum_bytes(LARGE)),
    "checksum": Operation(lambda store, _: store.checksum("log/0"), ("object.media",), checksum_bytes(DATA)),
    "stat": Operation(lambda store, _: store.stat("log/0"), ("object.get",), checksum_bytes(DATA)),
    "exists": Operation(lambda store, _: store.exists("log/0"), ("object.get",), result=True),
    "exists not": Operation(lambda store, _: store.exists("log/1"), ("object.get",), result=False),
    "files": Operation(lambda store, _: listed(store.files("log")), ("object.list",), ["log/0", "log/HINT"]),
    "folders": Operation(lambda store, _: listed(store.folders("")), ("object.list",), ["log"]),
    "create": Operation(lambda store, _: store.create("log/1", DATA), ("object.insert",), objects={"log/1": DATA}),
    "write": Operation(lambda store, _: store.write("log/HINT", DATA), ("object.insert",), objects={"log/HINT": DATA}),
    "upload": Operation(
        lambda store, at: (at.write_bytes(LARGE), store.upload(at, "up"))[1],
        ("upload.initiate", "upload.chunk"),
        checksum_bytes(LARGE),
        {"up": LARGE},
    ),
    "copy": Operation(lambda store, _: store.copy("log/0", "copied"), ("object.rewrite",), objects={"copied": DATA}),
    "delete": Operation(
        lambda store, _: store.delete("log"), ("object.list",), objects={"log/0": None, "log/HINT": None}
    ),
    "delete one": Operation(
        lambda store, _: store.delete("log", files=["log/0"]), ("object.delete",), objects={"log/0": None}
    ),
    "probe": Operation(
        lambda store, _: store.probe(),
        ("bucket.get", "object.insert", "object.get", "object.list", "object.delete"),
        [],
    ),
}


HOME = {"log/0": DATA, "log/HINT": b"0", "large": LARGE}


# Valid for that request: Google's test bench responds to a delete with an empty 200, and the object is deleted.
VALID = {
    ("object.delete", "nothing with 200"),
    ("object.delete", "nothing with 201 after it took effect"),
    ("object.delete", "a session elsewhere"),
    ("object.delete", "a session of another server"),
    ("object.delete", "a cut answer"),
    ("upload.initiate", "a cut answer"),  # the whole response is in a header
}


def bucket_of(cloud: FakeGcs) -> dict[str, bytes]:
    return {name: cloud.store.bytes("bucket", name) for name in cloud.store.names("bucket")}


def filled(cloud: FakeGcs) -> dict[str, bytes]:
    """Fill the bucket as it is before an operation, without requests."""
    for name in cloud.store.names("bucket"):
        cloud.store.delete("bucket", name)
    content = {**{f"runs/a/{name}": data for name, data in HOME.items()}, **OTHER_OBJECTS}
    for name, data in content.items():
        cloud.store.put("bucket", name, data)
    return content


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.tasks.foundation.storage.gcs.storage._PART_BYTES", PART_BYTES)


def cases(operation: Operation) -> list[tuple[str, str]]:
    found = [(kind, name) for kind in operation.kinds for name in RESPONSES if (kind, name) not in VALID]
    bare = operation.kinds == ("object.media",) and operation.result != b""
    return [(kind, name) for kind, name in found if bare or RESPONSES[name]["fault"] != "bare"]


def plan_of(kind: str, response: str, times: int | None) -> FaultPlan:
    # A client also queries the progress of an upload.
    kinds = [kind, "upload.query"] if kind == "upload.chunk" and times is None else [kind]
    return FaultPlan.scripted([{"match": {"kind": each}, "times": times, **RESPONSES[response]} for each in kinds])


@pytest.mark.parametrize("name", OPERATIONS)
def test_result_is_right_after_one_bad_response(cloud: FakeGcs, tmp_path: Path, name: str) -> None:
    operation = OPERATIONS[name]
    storage = CloudStorage(
        "bucket", "runs/a", RetryPolicy(total_seconds=60, stall_seconds=60, first_wait_seconds=0.001)
    )
    for kind, response in cases(operation):
        before = filled(cloud)
        cloud.faults = plan_of(kind, response, 1)
        got = operation.act(storage, tmp_path / "file")
        assert (got, kind, response) == (operation.result, kind, response)
        assert len(cloud.fault_run.log) == 1, (kind, response)
        after = {f"runs/a/{path}": data for path, data in operation.objects.items()}
        expected = {path: data for path, data in {**before, **after}.items() if data is not None}
        assert bucket_of(cloud) == expected, (kind, response)
        if name == "download":
            assert (tmp_path / "file").read_bytes() == LARGE


@pytest.mark.parametrize("name", OPERATIONS)
def test_lasting_bad_responses_raise_and_change_nothing_else(cloud: FakeGcs, tmp_path: Path, name: str) -> None:
    operation = OPERATIONS[name]
    storage = CloudStorage(
        "bucket", "runs/a", RetryPolicy(total_seconds=0.01, stall_seconds=60, first_wait_seconds=0.001)
    )
    for kind, response in cases(operation):
        before = filled(cloud)
        cloud.faults = plan_of(kind, response, None)
        with pytest.raises(StorageError) as error:
            raise AssertionError((kind, response, operation.act(storage, tmp_path / "file")))
        assert not isinstance(error.value, FileMissing | FileAlreadyThere | StoreRefused), (kind, response, error.value)
        assert str(error.value).startswith("gs://bucket"), (kind, response)
        assert "SECRET" not in str(error.value)
        assert len(str(error.value)) < 600, str(error.value)
        cloud.faults = None
        after = bucket_of(cloud)
        mine = {f"runs/a/{path}" for path in (*operation.objects, ".probe")}
        assert {key: data for key, data in after.items() if not key.startswith(tuple(mine))} == {
            key: data for key, data in before.items() if not key.startswith(tuple(mine))
        }, (kind, response)


def test_web_page_is_reported_by_its_title(cloud: FakeGcs) -> None:
    storage = CloudStorage("bucket", "", RetryPolicy(total_seconds=0.05, stall_seconds=60, first_wait_seconds=0.01))
    cloud.faults = FaultPlan.scripted([{"match": {"kind": ""}, "times": None, **RESPONSES["a page with 200"]}])
    with pytest.raises(StorageError, match=r"gs://bucket/x: expected JSON, got a web page, 'Sign in'; gave"):
        storage.stat("x")
    cloud.faults = FaultPlan.scripted([{"match": {"kind": ""}, "times": None, **RESPONSES["a redirect 307"]}])
    with pytest.raises(StorageError, match=r"redirect \(307\) to http://127\.0\.0\.1:9/sign-in, which"):
        list(storage.files(""))


def test_listing_that_never_ends_is_an_error(cloud: FakeGcs) -> None:
    storage = CloudStorage("bucket", "", RetryPolicy(total_seconds=0.05, stall_seconds=60, first_wait_seconds=0.01))
    cloud.faults = FaultPlan.on(
        "object.list", times=None, **instead(200, {"kind": "storage#objects", "nextPageToken": "x"})
    )
    with pytest.raises(StorageError, match="expected a listing of ''"):
        list(storage.files(""))
