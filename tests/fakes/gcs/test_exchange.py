"""Each fault as a client sees it."""

import base64
import gzip
import http.client
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import google_crc32c
import pytest

from tests.fakes.gcs.faults import FAULTS
from tests.fakes.gcs.raw import Raw, RawResponse
from tests.fakes.gcs.server import FakeGcs, FaultPlan

QUANTUM = 256 * 1024
DATA = bytes(range(256)) * 4096


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def fault(kind: str, request: str = "", **settings: Any) -> FaultPlan:
    return FaultPlan.on(request, kind, **settings)


@pytest.mark.parametrize("code", [429, 500, 503])
def test_status_fault_ends_after_its_count(raw: Raw, server: FakeGcs, code: int) -> None:
    server.faults = fault("status", code=code, times=2)
    assert [raw.insert("n", DATA).status for _ in range(3)] == [code, code, 200]


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("reset-before-body", False),
        ("reset-in-body", False),
        ("reset-after-body", False),
        ("response-lost", True),
        ("reset-in-response", True),
    ],
)
def test_reset_keeps_a_write_only_after_it_took_effect(raw: Raw, server: FakeGcs, kind: str, kept: bool) -> None:
    server.faults = fault(kind)
    # A reset rather than an orderly close, because clients trust what they read before an orderly close.
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        raw.insert("n", DATA * 4)
    assert (server.store.names("bucket") == ["n"]) == kept
    assert raw.insert("n", DATA).status == 200


def test_reset_inside_a_chunk_keeps_whole_quanta(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r")
    server.faults = fault("reset-in-body", "upload.chunk", fraction=0.7)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        raw.chunk(session, f"0-{len(DATA) - 1}/{len(DATA)}", DATA)
    kept = 2 * QUANTUM
    assert raw.chunk(session, f"*/{len(DATA)}").headers["Range"] == f"bytes=0-{kept - 1}"
    assert raw.chunk(session, f"{kept}-{len(DATA) - 1}/{len(DATA)}", DATA[kept:]).status == 200
    assert server.store.bytes("bucket", "r") == DATA


def test_short_chunk_is_reported_by_range(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r")
    server.faults = fault("short-chunk", fraction=0.3)
    response = raw.chunk(session, f"0-{len(DATA) - 1}/{len(DATA)}", DATA)
    assert (response.status, response.headers["Range"]) == (308, f"bytes=0-{QUANTUM - 1}")
    assert raw.chunk(session, f"{QUANTUM}-{len(DATA) - 1}/{len(DATA)}", DATA[QUANTUM:]).status == 200
    assert server.store.bytes("bucket", "r") == DATA


def test_reset_inside_a_response_without_body(raw: Raw, server: FakeGcs) -> None:
    server.store.put("bucket", "n", DATA)
    server.faults = fault("reset-in-response", "object.delete")
    with pytest.raises(ConnectionResetError):
        raw.delete("n")
    assert server.store.names("bucket") == []


@pytest.mark.parametrize("then", ["reset", "continue"])
def test_stalled_request_is_reset_or_continues(raw: Raw, server: FakeGcs, then: str) -> None:
    server.faults = fault("stall", stall_seconds=0.2, stall_then=then)
    began = time.monotonic()
    if then == "reset":
        with pytest.raises(ConnectionResetError):
            raw.insert("n", DATA)
    else:
        assert raw.insert("n", DATA).status == 200
    assert time.monotonic() - began >= 0.2
    server.faults = fault("stall", stall_seconds=3, stall_then="continue")
    with Raw(server.url, timeout_seconds=0.1) as impatient, pytest.raises(TimeoutError):
        impatient.media("n")


def test_truncated_download_has_fewer_bytes(raw: Raw, server: FakeGcs) -> None:
    server.store.put("bucket", "n", DATA)
    server.faults = fault("truncate", fraction=0.25)
    with pytest.raises(http.client.IncompleteRead) as broken:
        raw.media("n")
    assert broken.value.partial == DATA[: len(DATA) // 4]
    server.faults = fault("truncate-quietly", fraction=0.25)
    response = raw.media("n")
    assert response.body == DATA[: len(DATA) // 4]
    assert response.headers["X-Goog-Stored-Content-Length"] == str(len(DATA)), "the only header with the true size"


def test_corrupted_download_has_the_right_checksum_header(raw: Raw, server: FakeGcs) -> None:
    server.store.put("bucket", "n", DATA)
    hashes = raw.media("n").headers["X-Goog-Hash"]
    server.faults = fault("corrupt-download", fraction=0.9)
    response = raw.media("n")
    assert sum((one ^ other).bit_count() for one, other in zip(response.body, DATA, strict=True)) == 1
    assert response.headers["X-Goog-Hash"] == hashes
    assert raw.media("n").body == DATA, "the stored bytes are intact"


def test_corrupted_upload_is_stored(raw: Raw, server: FakeGcs) -> None:
    honest = raw.insert("n", DATA).json()["crc32c"]
    server.faults = fault("corrupt-upload", times=3)
    assert raw.insert("n", DATA).json()["crc32c"] != honest
    kept = server.store.bytes("bucket", "n")
    assert sum((one ^ other).bit_count() for one, other in zip(kept, DATA, strict=True)) == 1
    assert raw.insert("m", DATA, headers={"X-Goog-Hash": f"crc32c={honest}"}).status == 400
    assert raw.chunk(raw.initiate("r"), f"0-{len(DATA) - 1}/{len(DATA)}", DATA).json()["crc32c"] != honest


def test_duplicate_delivery_takes_effect_twice(raw: Raw, server: FakeGcs) -> None:
    server.faults = fault("duplicate", times=2)
    assert raw.insert("n", b"data", ifGenerationMatch=0).status == 412
    assert server.store.bytes("bucket", "n") == b"data", "the write succeeded although the response is an error"
    assert raw.delete("n").status == 404
    assert server.store.names("bucket") == []


def test_faults_match_names_in_every_kind_of_upload(raw: Raw, server: FakeGcs) -> None:
    server.faults = FaultPlan.scripted(
        [{"match": {"path": "^/b/bucket/o/manifest$"}, "fault": "status", "times": None}]
    )
    assert raw.insert("manifest", b"").status == 503
    assert raw.insert_multipart("manifest", b"data" * 10_000).status == 503
    assert raw.insert_multipart("data", b"data").status == 200
    server.faults = None
    session = raw.initiate("manifest")
    server.faults = fault("status", "upload.")
    assert raw.chunk(session, "0-3/4", b"data").status == 503
    assert server.fault_run.log == [
        {"method": "PUT", "kind": "upload.chunk", "path": "/b/bucket/o/manifest", "fault": "status"}
    ]


def test_script_skips_requests_first(raw: Raw, server: FakeGcs) -> None:
    server.faults = fault("status", "object.insert", skip=1, times=1)
    assert [raw.insert("n", b"").status for _ in range(3)] == [200, 503, 200]


def test_rates_apply_to_matching_requests_only(raw: Raw, server: FakeGcs) -> None:
    server.faults = FaultPlan.random(seed=1, rates={"status": 1.0}, kinds=("object.media",), path="/b/bucket/o/a")
    assert raw.insert("a1", b"").status == 200
    assert raw.insert("b1", b"").status == 200
    assert raw.media("b1").status == 200
    assert raw.media("a1").status in {429, 500, 503}


@pytest.mark.parametrize("seed", range(3))
def test_accepted_writes_survive_all_faults_at_once(server: FakeGcs, seed: int) -> None:
    """A client that retries succeeds, and a create-only object has the complete bytes of one attempt."""
    rates = dict.fromkeys(set(FAULTS) - {"bare", "corrupt-upload"}, 0.05)
    server.faults = FaultPlan.random(seed=seed, rates=rates, stall_seconds=0.01)
    broken = (ConnectionError, http.client.HTTPException)

    def until_accepted(request: Callable[[], RawResponse], accepted: set[int]) -> RawResponse:
        for _ in range(20):
            try:
                response = request()
            except broken:
                continue
            if response.status in accepted:
                return response
        raise AssertionError("no response in 20 attempts")

    with Raw(server.url) as client:
        for number in range(60):
            name, data = f"n{number}", DATA[: number * 5000]
            until_accepted(partial(client.insert, name, data, ifGenerationMatch=0), {200, 412})
            assert server.store.bytes("bucket", name) == data
            response = until_accepted(partial(client.media, name), {200})
            intact = crc32c(response.body) in response.headers["X-Goog-Hash"]
            assert intact == (response.body == data)
            until_accepted(partial(client.delete, name), {204, 404})
    assert server.store.names("bucket") == []
    assert len({entry["fault"] for entry in server.fault_run.log}) >= 8


@pytest.mark.parametrize("takes_effect", [True, False])
def test_proxy_response_replaces_the_stores(raw: Raw, server: FakeGcs, *, takes_effect: bool) -> None:
    page = {"code": 307, "body": "<html>", "headers": {"Location": "http://elsewhere/"}, "takes_effect": takes_effect}
    server.faults = fault("instead", **page)
    response = raw.insert("n", DATA)
    assert (response.status, response.body, response.headers["Location"]) == (307, b"<html>", "http://elsewhere/")
    assert (server.store.names("bucket") == ["n"]) is takes_effect


def test_incomplete_responses_are_sent(raw: Raw, server: FakeGcs) -> None:
    raw.insert("n", DATA)
    server.faults = fault("cut-response")
    response = raw.get("n")
    assert (response.status, len(response.body)) == (200, int(response.headers["Content-Length"]))
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        response.json()
    server.faults = fault("bare")
    response = raw.media("n")
    assert response.body == DATA
    assert not any(name.startswith("X-Goog-") for name in response.headers)
    server.faults = fault("bad-status-line")
    with pytest.raises(http.client.BadStatusLine):
        raw.get("n")


def test_gzip_is_decompressed_unless_accepted(raw: Raw, server: FakeGcs) -> None:
    packed = gzip.compress(DATA)
    server.store.put("bucket", "n", packed, contentEncoding="gzip")
    as_stored = raw.media("n", {"Accept-Encoding": "gzip", "Range": "bytes=0-9"})
    assert (as_stored.body, as_stored.headers["Content-Encoding"]) == (packed[:10], "gzip")
    unpacked = raw.media("n", {"Accept-Encoding": "identity", "Range": "bytes=0-9"})
    assert (unpacked.status, unpacked.body, unpacked.headers["Content-Encoding"]) == (200, DATA, None)
    assert f"crc32c={crc32c(packed)}" in unpacked.headers["X-Goog-Hash"]
