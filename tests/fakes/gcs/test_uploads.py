"""Uploads and downloads at the level of HTTP: multipart bodies, resumable sessions, ranges, checksums."""

import base64
import http.client

import google_crc32c
import pytest

from tests.fakes.gcs.raw import Raw
from tests.fakes.gcs.server import FakeGcs

QUANTUM = 256 * 1024
DATA = bytes(range(256)) * 1024 * 3


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


@pytest.mark.parametrize("line", ["\n", "\r\n"], ids=["as-gcsfs", "as-the-official-client"])
@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"\r\n\r\n", b"--==0==", b"x\n--==0==--", b"--==0==--\r\n", DATA],
    ids=lambda value: f"{value[:12]!r}",
)
def test_multipart_upload_keeps_every_byte(raw: Raw, server: FakeGcs, line: str, data: bytes) -> None:
    response = raw.insert_multipart("a/b", data, line=line)
    assert response.status == 200
    assert response.json()["size"] == str(len(data))
    assert response.json()["contentType"] == "text/plain"
    assert server.store.bytes("bucket", "a/b") == data


def test_unquoted_boundary_is_accepted(raw: Raw, server: FakeGcs) -> None:
    body = b'--abc\r\n\r\n{"name": "n"}\r\n--abc\r\n\r\nhello\r\n--abc--\r\n'
    headers = {"Content-Type": "multipart/related; boundary=abc"}
    assert raw.request("POST", "/upload/storage/v1/b/bucket/o?uploadType=multipart", body, headers).status == 200
    assert server.store.bytes("bucket", "n") == b"hello"


def test_metadata_has_checksums_and_names(raw: Raw) -> None:
    found = raw.insert("a/b c", DATA).json()
    assert found["crc32c"] == crc32c(DATA)
    assert found["selfLink"].endswith("/storage/v1/b/bucket/o/a%2Fb%20c")
    assert found == raw.get("a/b c").json()
    assert int(raw.insert("a/b c", b"").json()["generation"]) > int(found["generation"])


def test_wrong_checksums_are_refused(raw: Raw, server: FakeGcs) -> None:
    assert raw.insert("n", b"data", headers={"X-Goog-Hash": f"crc32c={crc32c(b'else')}"}).status == 400
    assert raw.insert("n", b"data", headers={"X-Goog-Hash": f"crc32c={crc32c(b'data')}"}).status == 200
    session = raw.request(
        "POST", "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=r", {"crc32c": crc32c(b"else")}
    ).headers["Location"]
    assert raw.chunk(session, "0-3/4", b"data").status == 400
    assert server.store.names("bucket") == ["n"]


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_resumable_upload_stores_every_byte(raw: Raw, server: FakeGcs, method: str) -> None:
    session = raw.initiate("r")
    first = raw.chunk(session, f"0-{QUANTUM - 1}/*", DATA[:QUANTUM], method)
    assert (first.status, first.headers["Range"]) == (308, f"bytes=0-{QUANTUM - 1}")
    assert server.store.names("bucket") == [], "nothing is visible before the end"
    last = raw.chunk(session, f"{QUANTUM}-{len(DATA) - 1}/{len(DATA)}", DATA[QUANTUM:], method)
    assert last.status == 200
    assert last.json()["crc32c"] == crc32c(DATA)
    assert server.store.bytes("bucket", "r") == DATA
    assert [server.count(kind) for kind in ("upload.initiate", "upload.chunk", "upload.query")] == [1, 2, 0]


def test_session_reports_its_progress(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r")
    for where in ("*/*", f"*/{len(DATA)}"):
        response = raw.chunk(session, where)
        assert (response.status, response.headers["Range"]) == (308, None)
    raw.chunk(session, f"0-{QUANTUM - 1}/{len(DATA)}", DATA[:QUANTUM])
    response = raw.chunk(session, f"*/{len(DATA)}")
    assert (response.status, response.headers["Range"]) == (308, f"bytes=0-{QUANTUM - 1}")
    assert server.count("upload.query") == 3


def test_resent_chunk_is_stored_once(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r")
    for stop in (QUANTUM, QUANTUM, 2 * QUANTUM):  # repeated, then overlapping
        response = raw.chunk(session, f"0-{stop - 1}/*", DATA[:stop])
        assert response.headers["Range"] == f"bytes=0-{stop - 1}"
    response = raw.chunk(session, f"{QUANTUM}-{len(DATA) - 1}/{len(DATA)}", DATA[QUANTUM:])
    assert (response.status, response.json()["size"]) == (200, str(len(DATA)))
    assert response.json()["crc32c"] == crc32c(DATA)
    assert server.store.bytes("bucket", "r") == DATA


def test_finished_session_returns_the_same_object_again(raw: Raw) -> None:
    session = raw.initiate("r", ifGenerationMatch=0)
    first = raw.chunk(session, "0-3/4", b"data").json()
    assert raw.chunk(session, "0-3/4", b"data").json() == first
    assert raw.chunk(session, "*/4").json() == first
    assert raw.get("r").json()["generation"] == first["generation"]


def test_unknown_total_is_settled_by_an_empty_request(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r")
    raw.chunk(session, f"0-{QUANTUM - 1}/*", DATA[:QUANTUM])
    assert raw.chunk(session, f"*/{QUANTUM}").status == 200
    assert server.store.bytes("bucket", "r") == DATA[:QUANTUM]
    assert raw.chunk(raw.initiate("empty"), "*/0").status == 200
    assert server.store.bytes("bucket", "empty") == b""


def test_gap_is_refused_with_the_services_message(raw: Raw) -> None:
    response = raw.chunk(raw.initiate("r"), f"{QUANTUM}-{2 * QUANTUM - 1}/*", DATA[:QUANTUM])
    assert response.status == 503
    assert b"the upload offset is 262144 byte(s), which exceeds already uploaded size of 0 byte(s)" in response.body


def test_chunk_of_a_wrong_size_is_refused(raw: Raw) -> None:
    session = raw.initiate("r")
    for stop in (1000, QUANTUM + 1):
        response = raw.chunk(session, f"0-{stop - 1}/*", DATA[:stop])
        assert response.status == 400
        assert "multiple of 262144" in response.message
    assert raw.chunk(session, "0-9/4000", DATA[:5]).status == 400
    assert raw.chunk(session, "nonsense").status == 400
    assert raw.chunk(session, "*/*").headers["Range"] is None


def test_session_checks_preconditions_at_start_and_end(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r", ifGenerationMatch=0)
    server.store.put("bucket", "r", b"another was faster")
    assert raw.chunk(session, "0-3/4", b"data").status == 412
    assert server.store.bytes("bucket", "r") == b"another was faster"
    path = "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=r&ifGenerationMatch=0"
    assert raw.request("POST", path, {}).status == 412


@pytest.mark.parametrize(
    ("requested", "found"),
    [("0-0", (0, 1)), ("5-9", (5, 10)), ("-4", (16, 20)), ("15-", (15, 20)), ("10-99", (10, 20)), ("-99", (0, 20))],
)
def test_requested_range_is_returned(raw: Raw, requested: str, found: tuple[int, int]) -> None:
    data = bytes(range(20))
    raw.insert("n", data)
    response = raw.media("n", {"Range": f"bytes={requested}"})
    assert (response.status, response.body) == (206, data[slice(*found)])
    assert response.headers["Content-Range"] == f"bytes {found[0]}-{found[1] - 1}/20"
    assert response.headers["X-Goog-Stored-Content-Length"] == "20"
    assert f"crc32c={crc32c(data)}" in response.headers["X-Goog-Hash"]


def test_range_across_the_chunks_of_an_upload(raw: Raw) -> None:
    session = raw.initiate("r")
    raw.chunk(session, f"0-{QUANTUM - 1}/*", DATA[:QUANTUM])
    raw.chunk(session, f"{QUANTUM}-{len(DATA) - 1}/{len(DATA)}", DATA[QUANTUM:])
    for start, stop in ((0, 10), (QUANTUM - 5, QUANTUM + 5), (QUANTUM, QUANTUM + 1), (100, len(DATA) - 100)):
        assert raw.media("r", {"Range": f"bytes={start}-{stop - 1}"}).body == DATA[start:stop]


def test_range_beyond_the_end(raw: Raw) -> None:
    raw.insert("n", b"data")
    raw.insert("empty", b"")
    for name in ("n", "empty"):
        response = raw.media(name, {"Range": "bytes=4-"})
        assert (response.status, response.message) == (416, "Request range not satisfiable")
    assert raw.media("empty").body == b""


def test_one_connection_serves_many_requests(server: FakeGcs) -> None:
    client = http.client.HTTPConnection(server.url.removeprefix("http://"))
    sockets = set()
    for _ in range(5):
        client.request("GET", "/storage/v1/b/bucket/o")
        client.getresponse().read()
        sockets.add(client.sock)
    assert len(sockets) == 1
