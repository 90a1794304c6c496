"""What Baton's tests lean on and no client shows: sessions, preconditions in a race, and what each fault does."""

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.fakes.gcs.faults import FAULTS, FaultPlan, FaultRun
from tests.fakes.gcs.server import FakeGcs, fake_gcs_process

QUANTUM = 256 * 1024
DATA = bytes(range(256)) * 4096
UPLOAD = "/upload/storage/v1/b/bucket/o"
OBJECT = "/storage/v1/b/bucket/o/"
RESET = (ConnectionResetError, BrokenPipeError)


class Raw:
    """An HTTP client without retries or checks."""

    def __init__(self, url: str, *, timeout_seconds: float = 10.0) -> None:
        self.url, self._timeout_seconds = url, timeout_seconds

    def __call__(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None, **query: Any
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        target = target.removeprefix(self.url) + (f"?{urlencode(query)}" if query else "")
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=self._timeout_seconds)
        try:
            connection.request(method, target, body=body, headers=dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def insert(self, name: str, data: bytes, *, line: str = "\n", **query: Any) -> tuple[int, dict[str, Any]]:
        """A multipart upload as gcsfs sends it, or with other line ends. Returns status and answer."""
        head = line.join(("--==0==", "Content-Type: application/json", "", json.dumps({"name": name}), "--==0=="))
        body = (head + line + f"Content-Type: text/plain{line}{line}").encode() + data + f"{line}--==0==--".encode()
        headers = {"Content-Type": 'multipart/related; boundary="==0=="'}
        status, _, answer = self("POST", UPLOAD, body, headers, uploadType="multipart", **query)
        return status, json.loads(answer)

    def initiate(self, name: str, **query: Any) -> str:
        """Start a resumable upload; returns its session URL."""
        status, headers, answer = self("POST", UPLOAD, b"{}", uploadType="resumable", name=name, **query)
        assert status == 200, answer
        return headers["Location"]

    def chunk(self, session: str, where: str, data: bytes = b"") -> tuple[int, str | None]:
        """Send a chunk, or ask for progress. Returns status and Range."""
        status, headers, _ = self("PUT", session, data, {"Content-Range": f"bytes {where}"})
        return status, headers["Range"]


@pytest.fixture
def raw(server: FakeGcs) -> Raw:
    return Raw(server.url)


@pytest.fixture
def server() -> Iterator[FakeGcs]:
    with FakeGcs() as fake:
        yield fake
        assert fake.errors == []


@pytest.mark.parametrize("line", ["\n", "\r\n"], ids=["as-gcsfs", "as-the-official-client"])
@pytest.mark.parametrize("data", [b"", b"\r\n\r\n", b"x\n--==0==--", b"--==0==--\r\n"])
def test_multipart_upload_keeps_every_byte(raw: Raw, server: FakeGcs, line: str, data: bytes) -> None:
    status, answer = raw.insert("a/b", data, line=line)
    assert (status, answer["size"]) == (200, str(len(data)))
    assert server.store.bytes("bucket", "a/b") == data


def test_a_session_reports_its_progress_and_keeps_bytes_once(raw: Raw, server: FakeGcs) -> None:
    session, total = raw.initiate("r", ifGenerationMatch=0), len(DATA)
    assert raw.chunk(session, f"*/{total}") == (308, None)
    for stop in (QUANTUM, QUANTUM, 2 * QUANTUM):  # repeated, then overlapping
        assert raw.chunk(session, f"0-{stop - 1}/*", DATA[:stop]) == (308, f"bytes=0-{stop - 1}")
    assert raw.chunk(session, f"*/{total}") == (308, f"bytes=0-{2 * QUANTUM - 1}")
    assert server.store.names("bucket") == [], "nothing is visible before the end"
    assert raw.chunk(session, f"{QUANTUM}-{total - 1}/{total}", DATA[QUANTUM:])[0] == 200
    assert server.store.bytes("bucket", "r") == DATA
    made = server.store.find("bucket", "r")
    assert raw.chunk(session, f"*/{total}")[0] == 200, "asked again"
    assert server.store.find("bucket", "r") == made, "it is the same object"
    assert raw.chunk(raw.initiate("empty"), "*/0")[0] == 200
    assert server.store.bytes("bucket", "empty") == b""


def test_a_session_refuses_gaps_and_other_sizes(raw: Raw) -> None:
    session = raw.initiate("r")
    where = {"Content-Range": f"bytes {QUANTUM}-{2 * QUANTUM - 1}/*"}
    status, _, answer = raw("PUT", session, DATA[:QUANTUM], where)
    assert (status, b"exceeds already uploaded size of 0 byte(s)" in answer) == (503, True)
    assert raw.chunk(session, "0-999/*", DATA[:1000])[0] == 400, "not a multiple of 262144"
    assert raw.chunk(session, "0-9/4000", DATA[:5])[0] == 400
    assert raw.chunk(session, "nonsense")[0] == 400


def test_a_session_checks_preconditions_at_start_and_end(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r", ifGenerationMatch=0)
    server.store.put("bucket", "r", b"another was faster")
    assert raw.chunk(session, "0-3/4", b"data")[0] == 412
    assert server.store.bytes("bucket", "r") == b"another was faster"
    assert raw("POST", UPLOAD, b"{}", uploadType="resumable", name="r", ifGenerationMatch=0)[0] == 412


@pytest.mark.parametrize(
    ("query", "absent", "present"),
    [
        ({"ifGenerationMatch": "0"}, 200, 412),
        ({"ifGenerationMatch": "GENERATION"}, 412, 204),
        ({"ifGenerationMatch": "5"}, 412, 412),
        ({"ifGenerationNotMatch": "0"}, 501, 501),  # Baton sends none, so the fake has none
    ],
    ids=str,
)
def test_writes_check_preconditions(
    raw: Raw, server: FakeGcs, query: dict[str, str], absent: int, present: int
) -> None:
    generation = server.store.put("bucket", "present", b"old").generation
    query = {key: value.replace("GENERATION", str(generation)) for key, value in query.items()}
    assert raw.insert("absent", b"new", **query)[0] == absent
    assert raw("DELETE", OBJECT + "present", **query)[0] == present


def slow_clock() -> float:
    """A clock that sleeps. The store reads it between a check and its change, so a missing lock would show."""
    time.sleep(0.001)
    return 1000.0


def test_one_of_sixteen_racing_inserts_wins() -> None:
    barrier = threading.Barrier(16)
    with FakeGcs(clock=slow_clock) as server:
        raw = Raw(server.url)

        def race(racer: int, name: str) -> int:
            data = f"{racer}".encode() * 1000
            barrier.wait()
            if racer % 2:
                return raw.insert(name, data, ifGenerationMatch=0)[0]
            status, headers, _ = raw("POST", UPLOAD, b"{}", uploadType="resumable", name=name, ifGenerationMatch=0)
            return (
                raw.chunk(headers["Location"], f"0-{len(data) - 1}/{len(data)}", data)[0] if status == 200 else status
            )

        with ThreadPoolExecutor(16) as pool:
            for number in range(10):
                statuses = list(pool.map(race, range(16), [f"n{number}"] * 16))
                assert sorted(statuses) == [200] + [412] * 15
                assert server.store.bytes("bucket", f"n{number}") == f"{statuses.index(200)}".encode() * 1000
        generations = [server.store.put("bucket", "n", b"").generation for _ in range(5)]
    assert generations == sorted(set(generations)), "they rise while the clock stands still"


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("reset-before-body", False),
        ("reset-in-body", False),
        ("reset-after-body", False),
        ("unread", False),
        ("response-lost", True),
        ("reset-in-response", True),
        ("stall", True),
    ],
)
def test_reset_keeps_a_write_only_after_it_took_effect(raw: Raw, server: FakeGcs, kind: str, *, kept: bool) -> None:
    server.faults = FaultPlan.on("", kind, stall_seconds=0.1)
    # A reset rather than an orderly close, because clients trust what they read before an orderly close.
    with pytest.raises(RESET):
        raw.insert("n", DATA * 4)
    assert (server.store.names("bucket") == ["n"]) == kept
    assert raw.insert("n", DATA)[0] == 200


def test_a_broken_or_short_chunk_keeps_whole_quanta(raw: Raw, server: FakeGcs) -> None:
    for fault in ("reset-in-body", "short-chunk"):
        session, total, kept = raw.initiate("r"), len(DATA), 2 * QUANTUM
        server.faults = FaultPlan.on("upload.chunk", fault, fraction=0.7)
        if fault == "short-chunk":
            assert raw.chunk(session, f"0-{total - 1}/{total}", DATA)[0] == 308
        else:
            with pytest.raises(RESET):
                raw.chunk(session, f"0-{total - 1}/{total}", DATA)
        assert raw.chunk(session, f"*/{total}") == (308, f"bytes=0-{kept - 1}")
        assert raw.chunk(session, f"{kept}-{total - 1}/{total}", DATA[kept:])[0] == 200
        assert server.store.bytes("bucket", "r") == DATA


def test_downloads_are_cut_or_changed(raw: Raw, server: FakeGcs) -> None:
    server.store.put("bucket", "n", DATA)

    def read(fault: str, **settings: Any) -> tuple[int, http.client.HTTPMessage, bytes]:
        server.faults = FaultPlan.on("object.media", fault, **settings)
        return raw("GET", OBJECT + "n", alt="media")

    with pytest.raises(http.client.IncompleteRead):
        read("truncate", fraction=0.25)
    for fault in ("truncate-quietly", "cut-response"):
        _, headers, body = read(fault, fraction=0.25)
        assert int(headers["Content-Length"]) == len(body) == len(DATA) // 4
    _, headers, body = read("corrupt-download")
    assert sum((one ^ other).bit_count() for one, other in zip(body, DATA, strict=True)) == 1
    assert "crc32c=" in headers["X-Goog-Hash"]
    assert not any(name.startswith("X-Goog-") for name in read("bare")[1])
    assert read("expired-token")[0] == 401
    assert read("instead", code=307, headers={"Location": "http://elsewhere/"})[1]["Location"] == "http://elsewhere/"
    with pytest.raises(http.client.BadStatusLine):
        read("bad-status-line")
    with pytest.raises(RESET):
        read("reset-in-response")
    for fault in ({"fault": "slow", "delay_seconds": 3}, {"fault": "stall", "stall_seconds": 3}):
        server.faults = FaultPlan.scripted([fault])
        with pytest.raises(TimeoutError):
            Raw(server.url, timeout_seconds=0.1)("GET", OBJECT + "n", alt="media")
    server.faults = FaultPlan.on("", "stall", stall_seconds=0.1, stall_then="continue")
    assert raw("GET", OBJECT + "n", alt="media")[2] == DATA


def test_uploads_are_changed_or_take_effect_twice(raw: Raw, server: FakeGcs) -> None:
    server.faults = FaultPlan.on("", "corrupt-upload")
    assert raw.insert("n", DATA)[1]["crc32c"] != raw.insert("m", DATA)[1]["crc32c"]
    kept = server.store.bytes("bucket", "n")
    assert sum((one ^ other).bit_count() for one, other in zip(kept, DATA, strict=True)) == 1
    server.faults = FaultPlan.on("", "duplicate", times=2)
    assert raw.insert("twice", b"data", ifGenerationMatch=0)[0] == 412
    assert server.store.bytes("bucket", "twice") == b"data", "the write succeeded although the response is an error"
    assert raw("DELETE", OBJECT + "n")[0] == 404
    assert server.store.names("bucket") == ["m", "twice"]


def test_a_script_matches_names_in_every_kind_of_upload(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("manifest")
    entry = {"match": {"path": "^/b/bucket/o/manifest$"}, "fault": "status", "times": 2, "skip": 1}
    server.faults = FaultPlan.scripted([entry])
    assert [raw.insert("manifest", b"data" * 10_000)[0] for _ in range(2)] == [200, 503]
    assert raw.insert("data", b"data")[0] == 200
    assert raw.chunk(session, "0-3/4", b"data")[0] == 503
    assert [one["kind"] for one in server.fault_run.log] == ["object.insert", "upload.chunk"]
    server.faults = FaultPlan.random(seed=1, rates={"status": 1.0})
    found = [raw.insert("n", b"")[0] != 200 for _ in range(8)]
    assert found == [True, True, True, False] * 2, "three in a row at most"


def test_the_same_plan_gives_the_same_faults() -> None:
    kinds = ("object.insert", "object.media", "upload.chunk", "object.list")

    def replay(plan: FaultPlan) -> list[Any]:
        run = FaultRun(plan)
        return [run.next("GET", kinds[number % 4], f"/b/bucket/o/{number % 7}") for number in range(3000)]

    plan = FaultPlan.random(seed=7, rates=dict.fromkeys(FAULTS, 0.04))
    assert replay(plan) == replay(FaultPlan(**json.loads(plan.to_json())))
    assert {found.kind for found in replay(plan) if found} == set(FAULTS)
    assert replay(plan) != replay(FaultPlan.random(seed=8, rates=plan.rates))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rates": {"nonsense": 0.1}},
        {"rates": {"status": 0.9, "stall": 0.2}},
        {"script": [{"fault": "nonsense"}]},
        {"script": [{"fault": "status", "matches": {}}]},
        {"script": [{"fault": "status", "fraction": 1.5}]},
    ],
)
def test_invalid_plan_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"nonsense|probabilities|unknown|within"):
        FaultPlan(**wrong)


def test_separate_process_can_be_controlled() -> None:
    with fake_gcs_process(("bucket",)) as server:
        raw = Raw(server.url)
        assert raw.insert("n", b"data")[0] == 200
        server.set_faults(FaultPlan.on("object.media", "status", code=429))
        assert [raw("GET", OBJECT + "n", alt="media")[0] for _ in range(2)] == [429, 200]
        counts = {"POST object.insert": 1, "GET object.media": 2}
        assert server.state() == {"counts": counts, "objects": {"bucket": ["n"]}}
