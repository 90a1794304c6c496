"""Each fault as a client sees it, and plans that can be replayed."""

import base64
import gzip
import http.client
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import google_crc32c
import pytest

from tests.fakes.gcs.fake_gcs import FakeGcs, FaultPlan
from tests.fakes.gcs.fake_gcs_faults import FAULTS, FaultRun
from tests.fakes.gcs.fake_gcs_raw import Answer, Raw

QUANTUM = 256 * 1024
DATA = bytes(range(256)) * 4096


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def fault(kind: str, request: str = "", **settings: Any) -> FaultPlan:
    return FaultPlan.scripted([{"match": {"kind": request}, "fault": kind, **settings}])


@pytest.mark.parametrize("code", [429, 500, 503])
def test_status_so_many_times(raw: Raw, server: FakeGcs, code: int) -> None:
    server.faults = fault("status", code=code, times=2)
    assert [raw.insert("n", DATA).status for _ in range(3)] == [code, code, 200]


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("reset-before-body", False),
        ("reset-in-body", False),
        ("reset-after-body", False),
        ("answer-lost", True),
        ("reset-in-answer", True),
    ],
)
def test_resets(raw: Raw, server: FakeGcs, kind: str, kept: bool) -> None:
    server.faults = fault(kind)
    # A reset, not an orderly end: the difference decides whether a client trusts what it has read.
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        raw.insert("n", DATA * 4)
    assert (server.store.names("bucket") == ["n"]) == kept
    assert raw.insert("n", DATA).status == 200


def test_a_reset_inside_a_chunk_keeps_whole_quanta(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r")
    server.faults = fault("reset-in-body", "upload.chunk", fraction=0.7)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        raw.chunk(session, f"0-{len(DATA) - 1}/{len(DATA)}", DATA)
    kept = 2 * QUANTUM
    assert raw.chunk(session, f"*/{len(DATA)}").headers["Range"] == f"bytes=0-{kept - 1}"
    assert raw.chunk(session, f"{kept}-{len(DATA) - 1}/{len(DATA)}", DATA[kept:]).status == 200
    assert server.store.bytes("bucket", "r") == DATA


def test_a_short_chunk_is_told_by_range(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r")
    server.faults = fault("short-chunk", fraction=0.3)
    answer = raw.chunk(session, f"0-{len(DATA) - 1}/{len(DATA)}", DATA)
    assert (answer.status, answer.headers["Range"]) == (308, f"bytes=0-{QUANTUM - 1}")
    assert raw.chunk(session, f"{QUANTUM}-{len(DATA) - 1}/{len(DATA)}", DATA[QUANTUM:]).status == 200
    assert server.store.bytes("bucket", "r") == DATA


def test_a_lost_answer_of_a_session_is_found_again(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r", ifGenerationMatch=0)
    server.faults = fault("answer-lost", "upload.chunk")
    with pytest.raises(ConnectionResetError):
        raw.chunk(session, f"0-{len(DATA) - 1}/{len(DATA)}", DATA)
    assert raw.chunk(session, f"*/{len(DATA)}").json()["size"] == str(len(DATA))


def test_reset_inside_the_answer(raw: Raw, server: FakeGcs) -> None:
    server.store.put("bucket", "n", DATA * 8)
    server.faults = fault("reset-in-answer", "object.media")
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        raw.media("n")
    assert raw.media("n").body == DATA * 8


def test_reset_inside_an_answer_without_a_body(raw: Raw, server: FakeGcs) -> None:
    server.store.put("bucket", "n", DATA)
    server.faults = fault("reset-in-answer", "object.delete")
    with pytest.raises(ConnectionResetError):
        raw.delete("n")
    assert server.store.names("bucket") == []


def test_error_answers_stay_readable(raw: Raw, server: FakeGcs) -> None:
    for kind in ("truncate", "truncate-quietly", "corrupt-download"):
        server.faults = fault(kind)
        assert raw.media("none").message == "No such object: bucket/none"


@pytest.mark.parametrize("then", ["reset", "continue"])
def test_stall(raw: Raw, server: FakeGcs, then: str) -> None:
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


def test_truncated_downloads(raw: Raw, server: FakeGcs) -> None:
    server.store.put("bucket", "n", DATA)
    server.faults = fault("truncate", fraction=0.25)
    with pytest.raises(http.client.IncompleteRead) as broken:
        raw.media("n")
    assert broken.value.partial == DATA[: len(DATA) // 4]
    server.faults = fault("truncate-quietly", fraction=0.25)
    answer = raw.media("n")
    assert answer.body == DATA[: len(DATA) // 4]
    assert answer.headers["X-Goog-Stored-Content-Length"] == str(len(DATA)), "the one header that tells"


def test_a_corrupted_download(raw: Raw, server: FakeGcs) -> None:
    server.store.put("bucket", "n", DATA)
    hashes = raw.media("n").headers["X-Goog-Hash"]
    server.faults = fault("corrupt-download", fraction=0.9)
    answer = raw.media("n")
    assert sum((one ^ other).bit_count() for one, other in zip(answer.body, DATA, strict=True)) == 1
    assert answer.headers["X-Goog-Hash"] == hashes
    assert raw.media("n").body == DATA, "what is kept is whole"


def test_a_corrupted_upload(raw: Raw, server: FakeGcs) -> None:
    honest = raw.insert("n", DATA).json()["crc32c"]
    server.faults = fault("corrupt-upload", times=3)
    assert raw.insert("n", DATA).json()["crc32c"] != honest
    kept = server.store.bytes("bucket", "n")
    assert sum((one ^ other).bit_count() for one, other in zip(kept, DATA, strict=True)) == 1
    assert raw.insert("m", DATA, headers={"X-Goog-Hash": f"crc32c={honest}"}).status == 400
    assert raw.chunk(raw.initiate("r"), f"0-{len(DATA) - 1}/{len(DATA)}", DATA).json()["crc32c"] != honest


def test_duplicate_delivery(raw: Raw, server: FakeGcs) -> None:
    server.faults = fault("duplicate", times=2)
    assert raw.insert("n", b"data", ifGenerationMatch=0).status == 412
    assert server.store.bytes("bucket", "n") == b"data", "it worked, and the answer says that it did not"
    assert raw.delete("n").status == 404
    assert server.store.names("bucket") == []


def test_an_expired_token(raw: Raw, server: FakeGcs) -> None:
    server.faults = fault("expired-token")
    answers = [raw.insert("n", DATA) for _ in range(2)]
    assert [answer.status for answer in answers] == [401, 200]
    assert answers[0].message == "Invalid Credentials"


def test_slow(raw: Raw, server: FakeGcs) -> None:
    server.faults = fault("slow", times=None, delay_seconds=0.05, bytes_per_second=10 * len(DATA))
    for request in (lambda: raw.insert("n", DATA), lambda: raw.media("n")):
        began = time.monotonic()
        request()
        assert time.monotonic() - began >= 0.145


def test_faults_by_name_whatever_the_upload(raw: Raw, server: FakeGcs) -> None:
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


def test_a_script_lets_some_pass_first(raw: Raw, server: FakeGcs) -> None:
    server.faults = fault("status", "object.insert", skip=1, times=1)
    assert [raw.insert("n", b"").status for _ in range(3)] == [200, 503, 200]


# A client cannot tell whether bytes without a hash are intact.
DRAWN = [kind for kind in FAULTS if kind != "bare"]
EVERYTHING = FaultPlan.random(seed=7, rates=dict.fromkeys(DRAWN, 0.05))


def replay(plan: FaultPlan, requests: int = 300) -> list[Any]:
    run = FaultRun(plan)
    kinds = ("object.insert", "object.media", "upload.chunk", "object.list")
    return [run.next("GET", kinds[number % 4], f"/b/bucket/o/{number % 7}") for number in range(requests)]


def test_a_plan_replays() -> None:
    assert replay(EVERYTHING) == replay(FaultPlan.from_json(EVERYTHING.to_json()))
    assert {found.kind for found in replay(EVERYTHING, 3000) if found} == set(DRAWN)


def test_another_seed_is_another_plan() -> None:
    assert replay(EVERYTHING) != replay(FaultPlan.random(seed=8, rates=EVERYTHING.rates))


def test_rates_are_kept() -> None:
    found = replay(FaultPlan.random(seed=1, rates={"status": 0.1}, max_consecutive=100), 5000)
    assert 400 < sum(one is not None for one in found) < 600
    assert {one.code for one in found if one} == {429, 500, 503}


def test_a_row_of_faults_ends() -> None:
    run = FaultRun(FaultPlan.random(seed=1, rates={"status": 1.0}))
    found = [run.next("GET", "object.get", "/b/bucket/o/n") is not None for _ in range(8)]
    assert found == [True, True, True, False] * 2
    assert run.next("GET", "object.get", "/b/bucket/o/other") is not None


def test_rates_of_some_requests_only(raw: Raw, server: FakeGcs) -> None:
    server.faults = FaultPlan.random(seed=1, rates={"status": 1.0}, kinds=("object.media",), path="/b/bucket/o/a")
    assert raw.insert("a1", b"").status == 200
    assert raw.insert("b1", b"").status == 200
    assert raw.media("b1").status == 200
    assert raw.media("a1").status in {429, 500, 503}


@pytest.mark.parametrize("seed", range(3))
def test_all_faults_at_once_leave_what_was_accepted(server: FakeGcs, seed: int) -> None:
    """A client that tries again gets through, and a create-only object holds the bytes of one try, whole."""
    rates = dict.fromkeys(set(DRAWN) - {"corrupt-upload"}, 0.05)
    server.faults = FaultPlan.random(seed=seed, rates=rates, stall_seconds=0.01)
    broken = (ConnectionError, http.client.HTTPException)

    def until_answered(request: Callable[[], Answer], accepted: set[int]) -> Answer:
        for _ in range(20):
            try:
                answer = request()
            except broken:
                continue
            if answer.status in accepted:
                return answer
        raise AssertionError("no answer in 20 tries")

    with Raw(server.url) as client:
        for number in range(60):
            name, data = f"n{number}", DATA[: number * 5000]
            until_answered(partial(client.insert, name, data, ifGenerationMatch=0), {200, 412})
            assert server.store.bytes("bucket", name) == data
            answer = until_answered(partial(client.media, name), {200})
            intact = crc32c(answer.body) in answer.headers["X-Goog-Hash"]
            assert intact == (answer.body == data)
            until_answered(partial(client.delete, name), {204, 404})
    assert server.store.names("bucket") == []
    assert len({entry["fault"] for entry in server.fault_run.log}) >= 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"rates": {"nonsense": 0.1}},
        {"rates": {"status": 0.9, "stall": 0.2}},
        {"rates": {"status": -0.1}},
        {"script": [{"fault": "nonsense"}]},
        {"script": [{"fault": "status", "matches": {}}]},
        {"script": [{"fault": "status", "fraction": 1.5}]},
    ],
)
def test_a_wrong_plan_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"nonsense|probabilities|unknown|within"):
        FaultPlan(**wrong)


@pytest.mark.parametrize("takes_effect", [True, False])
def test_something_else_answers_in_the_stores_place(raw: Raw, server: FakeGcs, *, takes_effect: bool) -> None:
    page = {"code": 307, "body": "<html>", "headers": {"Location": "http://elsewhere/"}, "takes_effect": takes_effect}
    server.faults = fault("instead", **page)
    answer = raw.insert("n", DATA)
    assert (answer.status, answer.body, answer.headers["Location"]) == (307, b"<html>", "http://elsewhere/")
    assert (server.store.names("bucket") == ["n"]) is takes_effect


def test_answers_that_are_not_whole(raw: Raw, server: FakeGcs) -> None:
    raw.insert("n", DATA)
    server.faults = fault("cut-answer")
    answer = raw.get("n")
    assert (answer.status, len(answer.body)) == (200, int(answer.headers["Content-Length"]))
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        answer.json()
    server.faults = fault("bare")
    answer = raw.media("n")
    assert answer.body == DATA
    assert not any(name.startswith("X-Goog-") for name in answer.headers)
    server.faults = fault("bad-status-line")
    with pytest.raises(http.client.BadStatusLine):
        raw.get("n")


def test_what_is_stored_as_gzip_is_unpacked_for_those_who_do_not_accept_it(raw: Raw, server: FakeGcs) -> None:
    packed = gzip.compress(DATA)
    server.store.put("bucket", "n", packed, contentEncoding="gzip")
    as_stored = raw.media("n", {"Accept-Encoding": "gzip", "Range": "bytes=0-9"})
    assert (as_stored.body, as_stored.headers["Content-Encoding"]) == (packed[:10], "gzip")
    unpacked = raw.media("n", {"Accept-Encoding": "identity", "Range": "bytes=0-9"})
    assert (unpacked.status, unpacked.body, unpacked.headers["Content-Encoding"]) == (200, DATA, None)
    assert f"crc32c={crc32c(packed)}" in unpacked.headers["X-Goog-Hash"]
