"""Uploads and downloads as the wire shows them: multipart bodies, resumable sessions, ranges, checksums."""

import base64
import hashlib
import http.client

import google_crc32c
import pytest

from tests.fakes.gcs.fake_gcs import FakeGcs
from tests.fakes.gcs.fake_gcs_raw import Raw

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
def test_a_multipart_upload_keeps_every_byte(raw: Raw, server: FakeGcs, line: str, data: bytes) -> None:
    answer = raw.insert_multipart("a/b", data, line=line)
    assert answer.status == 200
    assert answer.json()["size"] == str(len(data))
    assert answer.json()["contentType"] == "text/plain"
    assert server.store.bytes("bucket", "a/b") == data


def test_an_unquoted_boundary_is_read_too(raw: Raw, server: FakeGcs) -> None:
    body = b'--abc\r\n\r\n{"name": "n"}\r\n--abc\r\n\r\nhello\r\n--abc--\r\n'
    headers = {"Content-Type": "multipart/related; boundary=abc"}
    assert raw.ask("POST", "/upload/storage/v1/b/bucket/o?uploadType=multipart", body, headers).status == 200
    assert server.store.bytes("bucket", "n") == b"hello"


def test_a_chunked_body_is_taken(raw: Raw, server: FakeGcs) -> None:
    path = "/upload/storage/v1/b/bucket/o?uploadType=media&name=n"
    assert raw.ask("POST", path, iter([b"one ", b"two"])).status == 200
    assert server.store.bytes("bucket", "n") == b"one two"
    assert raw.get("n").status == 200, "the connection is still in step"


def test_metadata_tells_checksums_and_names(raw: Raw) -> None:
    found = raw.insert("a/b c", DATA).json()
    assert found["crc32c"] == crc32c(DATA)
    assert found["md5Hash"] == base64.b64encode(hashlib.md5(DATA, usedforsecurity=False).digest()).decode()
    assert found["selfLink"].endswith("/storage/v1/b/bucket/o/a%2Fb%20c")
    assert found == raw.get("a/b c").json()
    assert int(raw.insert("a/b c", b"").json()["generation"]) > int(found["generation"])


def test_wrong_checksums_are_refused(raw: Raw, server: FakeGcs) -> None:
    for headers in ({"X-Goog-Hash": f"crc32c={crc32c(b'else')}"}, {"Content-MD5": "AAAAAAAAAAAAAAAAAAAAAA=="}):
        assert raw.insert("n", b"data", headers=headers).status == 400
    assert raw.insert("n", b"data", headers={"X-Goog-Hash": f"crc32c={crc32c(b'data')}"}).status == 200
    session = raw.ask(
        "POST", "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=r", {"crc32c": crc32c(b"else")}
    ).headers["Location"]
    assert raw.chunk(session, "0-3/4", b"data").status == 400
    assert server.store.names("bucket") == ["n"]


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_a_resumable_upload(raw: Raw, server: FakeGcs, method: str) -> None:
    session = raw.initiate("r")
    first = raw.chunk(session, f"0-{QUANTUM - 1}/*", DATA[:QUANTUM], method)
    assert (first.status, first.headers["Range"]) == (308, f"bytes=0-{QUANTUM - 1}")
    assert server.store.names("bucket") == [], "nothing is visible before the end"
    last = raw.chunk(session, f"{QUANTUM}-{len(DATA) - 1}/{len(DATA)}", DATA[QUANTUM:], method)
    assert last.status == 200
    assert last.json()["crc32c"] == crc32c(DATA)
    assert server.store.bytes("bucket", "r") == DATA
    assert [server.count(kind) for kind in ("upload.initiate", "upload.chunk", "upload.query")] == [1, 2, 0]


def test_a_session_tells_how_far_it_got(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r")
    for where in ("*/*", f"*/{len(DATA)}"):
        answer = raw.chunk(session, where)
        assert (answer.status, answer.headers["Range"]) == (308, None)
    raw.chunk(session, f"0-{QUANTUM - 1}/{len(DATA)}", DATA[:QUANTUM])
    answer = raw.chunk(session, f"*/{len(DATA)}")
    assert (answer.status, answer.headers["Range"]) == (308, f"bytes=0-{QUANTUM - 1}")
    assert server.count("upload.query") == 3


def test_a_resent_chunk_is_stored_once(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r")
    for stop in (QUANTUM, QUANTUM, 2 * QUANTUM):  # again, and then overlapping
        answer = raw.chunk(session, f"0-{stop - 1}/*", DATA[:stop])
        assert answer.headers["Range"] == f"bytes=0-{stop - 1}"
    answer = raw.chunk(session, f"{QUANTUM}-{len(DATA) - 1}/{len(DATA)}", DATA[QUANTUM:])
    assert (answer.status, answer.json()["size"]) == (200, str(len(DATA)))
    assert answer.json()["crc32c"] == crc32c(DATA)
    assert server.store.bytes("bucket", "r") == DATA


def test_a_finished_session_answers_the_same_object_again(raw: Raw) -> None:
    session = raw.initiate("r", ifGenerationMatch=0)
    first = raw.chunk(session, "0-3/4", b"data").json()
    assert raw.chunk(session, "0-3/4", b"data").json() == first
    assert raw.chunk(session, "*/4").json() == first
    assert raw.get("r").json()["generation"] == first["generation"]


def test_an_unknown_total_is_settled_by_an_empty_request(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r")
    raw.chunk(session, f"0-{QUANTUM - 1}/*", DATA[:QUANTUM])
    assert raw.chunk(session, f"*/{QUANTUM}").status == 200
    assert server.store.bytes("bucket", "r") == DATA[:QUANTUM]
    assert raw.chunk(raw.initiate("empty"), "*/0").status == 200
    assert server.store.bytes("bucket", "empty") == b""


def test_a_gap_is_refused_in_the_services_words(raw: Raw) -> None:
    answer = raw.chunk(raw.initiate("r"), f"{QUANTUM}-{2 * QUANTUM - 1}/*", DATA[:QUANTUM])
    assert answer.status == 503
    assert b"the upload offset is 262144 byte(s), which exceeds already uploaded size of 0 byte(s)" in answer.body


def test_a_chunk_of_a_wrong_size_is_refused(raw: Raw) -> None:
    session = raw.initiate("r")
    for stop in (1000, QUANTUM + 1):
        answer = raw.chunk(session, f"0-{stop - 1}/*", DATA[:stop])
        assert answer.status == 400
        assert "multiple of 262144" in answer.message
    assert raw.chunk(session, "0-9/4000", DATA[:5]).status == 400
    assert raw.chunk(session, "nonsense").status == 400
    assert raw.chunk(session, "*/*").headers["Range"] is None


def test_a_cancelled_session_is_gone(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r")
    assert raw.ask("DELETE", session).status == 499
    assert raw.chunk(session, "0-3/4", b"data").status == 404
    assert raw.chunk(session, "*/*").status == 404
    assert server.store.names("bucket") == []


def test_preconditions_hold_at_the_start_and_at_the_end_of_a_session(raw: Raw, server: FakeGcs) -> None:
    session = raw.initiate("r", ifGenerationMatch=0)
    server.store.put("bucket", "r", b"another was faster")
    assert raw.chunk(session, "0-3/4", b"data").status == 412
    assert server.store.bytes("bucket", "r") == b"another was faster"
    path = "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=r&ifGenerationMatch=0"
    assert raw.ask("POST", path, {}).status == 412


@pytest.mark.parametrize(
    ("asked", "found"),
    [("0-0", (0, 1)), ("5-9", (5, 10)), ("-4", (16, 20)), ("15-", (15, 20)), ("10-99", (10, 20)), ("-99", (0, 20))],
)
def test_ranges(raw: Raw, asked: str, found: tuple[int, int]) -> None:
    data = bytes(range(20))
    raw.insert("n", data)
    answer = raw.media("n", {"Range": f"bytes={asked}"})
    assert (answer.status, answer.body) == (206, data[slice(*found)])
    assert answer.headers["Content-Range"] == f"bytes {found[0]}-{found[1] - 1}/20"
    assert answer.headers["X-Goog-Stored-Content-Length"] == "20"
    assert f"crc32c={crc32c(data)}" in answer.headers["X-Goog-Hash"]


def test_a_range_over_the_pieces_of_a_resumable_upload(raw: Raw) -> None:
    session = raw.initiate("r")
    raw.chunk(session, f"0-{QUANTUM - 1}/*", DATA[:QUANTUM])
    raw.chunk(session, f"{QUANTUM}-{len(DATA) - 1}/{len(DATA)}", DATA[QUANTUM:])
    for start, stop in ((0, 10), (QUANTUM - 5, QUANTUM + 5), (QUANTUM, QUANTUM + 1), (100, len(DATA) - 100)):
        assert raw.media("r", {"Range": f"bytes={start}-{stop - 1}"}).body == DATA[start:stop]


def test_a_range_beyond_the_end(raw: Raw) -> None:
    raw.insert("n", b"data")
    raw.insert("empty", b"")
    for name in ("n", "empty"):
        answer = raw.media(name, {"Range": "bytes=4-"})
        assert (answer.status, answer.message) == (416, "Request range not satisfiable")
    assert raw.media("empty").body == b""


def test_one_connection_serves_many_requests(server: FakeGcs) -> None:
    client = http.client.HTTPConnection(server.url.removeprefix("http://"))
    sockets = set()
    for _ in range(5):
        client.request("GET", "/storage/v1/b/bucket/o")
        client.getresponse().read()
        sockets.add(client.sock)
    assert len(sockets) == 1
