"""Operations that transfer bytes, as the service documents them: multipart uploads, resumable sessions, downloads."""

import gzip
import json
import re
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

import numpy as np

from tests.fakes.gcs.store import (
    Checksums,
    Content,
    Hasher,
    Refusal,
    Store,
    StoredObject,
    as_content,
    check_name,
    checksums_of,
    cut,
    generation_wanted,
    joined,
    number_of,
)
from tests.fakes.gcs.wire import Call, Request, Response

QUANTUM = 256 * 1024
HEAD_LIMIT = 1 << 16


def split_multipart(body: np.ndarray, content_type: str) -> tuple[dict[str, Any], np.ndarray]:
    """Metadata and media of a multipart upload. The media is a view; nothing is copied.

    Lines end with "\\r\\n" (the official client) or "\\n" (gcsfs). The media may contain any bytes, even the boundary,
    so the search for its end starts at the end of the body.
    """
    boundary = boundary_of(content_type)
    head = body[:HEAD_LIMIT].tobytes()
    first = head.find(boundary)
    second = head.find(boundary, first + len(boundary))
    if first < 0 or second < 0:
        raise Refusal(400, "Failed to parse the multipart body: its boundary is missing.")
    try:
        metadata = json.loads(_after_headers(head[first + len(boundary) : second]) or b"{}")
    except ValueError:
        raise Refusal(400, "Parse Error", "parseError") from None
    headers = re.compile(rb"\r?\n\r?\n").search(head, second)
    tail_start = max(headers.end() if headers else 0, body.size - len(boundary) - 64)
    tail = body[tail_start:].tobytes()
    end = tail.rfind(boundary + b"--")
    if headers is None or end < 0:
        raise Refusal(400, "Failed to parse the multipart body: it is not closed.")
    # The line break before the boundary is part of the boundary.
    end -= 2 if tail[:end].endswith(b"\r\n") else 1
    return metadata, body[headers.end() : tail_start + end]


def boundary_of(content_type: str) -> bytes:
    found = re.search(r'boundary=(?:"([^"]+)"|([^;\s]+))', content_type)
    if found is None:
        raise Refusal(400, "The multipart request has no boundary.")
    return b"--" + (found.group(1) or found.group(2)).encode()


def _after_headers(part: bytes) -> bytes:
    pieces = re.split(rb"\r?\n\r?\n", part, maxsplit=1)
    return pieces[1].strip() if len(pieces) > 1 else b""


def verify(metadata: Mapping[str, Any], headers: Mapping[str, str], found: Checksums) -> None:
    """Refuse an upload whose bytes differ from the crc32c of its sender, in its metadata or a header."""
    hashes = dict(item.strip().partition("=")[::2] for item in headers.get("x-goog-hash", "").split(","))
    claim = hashes.get("crc32c") or metadata.get("crc32c")
    if claim and claim != found.crc32c:
        raise Refusal(400, f'Provided CRC32C "{claim}" doesn\'t match calculated CRC32C "{found.crc32c}".')


@dataclass(frozen=True, slots=True)
class ContentRange:
    """`bytes FIRST-LAST/TOTAL`, with None for each "*"."""

    first: int | None
    last: int | None
    total: int | None

    @classmethod
    def parse(cls, text: str | None, length: int) -> "ContentRange":
        """Parse the header. Without one, the request has the whole object."""
        if text is None:
            return cls(0, length - 1, length)
        found = re.fullmatch(r"bytes (?:\*|(\d+)-(\d+))/(?:\*|(\d+))", text.strip())
        if found is None:
            raise Refusal(400, f"Invalid Content-Range: {text}")
        first, last, total = (None if group is None else int(group) for group in found.groups())
        if first is not None and last is not None and last - first + 1 != length:
            raise Refusal(400, f"Content-Range {text} does not fit a body of {length} bytes.")
        return cls(first, last, total)


@dataclass(slots=True)
class Session:
    """One resumable upload. Each has its own lock, so chunks of other sessions do not wait."""

    bucket: str
    name: str
    metadata: dict[str, Any]
    if_generation: int | None
    hasher: Hasher
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    lock: threading.Lock = field(default_factory=threading.Lock)
    pieces: list[np.ndarray] = field(default_factory=list)
    finished: StoredObject | None = None
    refused: Refusal | None = None

    @property
    def size(self) -> int:
        return self.hasher.size

    @property
    def content(self) -> Content:
        return tuple(self.pieces)

    def take(self, where: ContentRange, data: np.ndarray) -> bool:
        """Store a chunk; returns whether the object is complete."""
        if where.first is None:
            return where.total is not None and where.total == self.size
        if where.first > self.size:
            # The real service's message and status, as observed: plain text, with two blanks.
            raise Refusal(
                503,
                f"Invalid request.  According to the Content-Range header, the upload offset is {where.first} byte(s), "
                f"which exceeds already uploaded size of {self.size} byte(s).",
            )
        is_last = where.total is not None and where.first + data.size == where.total
        if not is_last and data.size % QUANTUM:
            # The service stores the whole quanta of a long chunk. Refusing shows a client's mistake sooner.
            raise Refusal(
                400,
                "Invalid request.  The number of bytes uploaded is required to be equal or greater than 262144, except "
                "for the final request (it's recommended to be the exact multiple of 262144).  The received request "
                f"contained {data.size} bytes, which does not meet this requirement.",
            )
        self.keep(where.first, data)
        return is_last

    def keep(self, first: int, data: np.ndarray) -> None:
        """Store the new bytes; ignore those that were sent before."""
        fresh = data[self.size - first :]
        if fresh.size:
            self.pieces.append(fresh)
            self.hasher.update(fresh)


@dataclass(slots=True)
class Transfers:
    """Uploads and downloads of a store."""

    store: Store
    sessions: dict[str, Session] = field(default_factory=dict)

    def insert(self, call: Call, request: Request) -> Response:
        """A multipart upload."""
        query = request.query
        metadata, data = split_multipart(request.body, request.headers.get("content-type", ""))
        name = query.get("name") or str(metadata.get("name") or "")
        check_name(name)
        if request.spoil is not None:
            data = request.spoil(data)
        content = (data,) if data.size else ()
        checksums = checksums_of(content)
        verify(metadata, request.headers, checksums)
        made = self.store.insert(
            call.bucket, name, content, checksums, fields=metadata, if_generation=generation_wanted(query)
        )
        return _uploaded(made)

    def initiate(self, call: Call, request: Request) -> Response:
        """Start a resumable upload. The Location header of the response is the session URL."""
        query, metadata = request.query, request.json()
        name = query.get("name") or str(metadata.get("name") or "")
        check_name(name)
        session = Session(
            bucket=call.bucket,
            name=name,
            metadata=metadata,
            if_generation=generation_wanted(query),
            hasher=Hasher(),
        )
        self.store.may_insert(session.bucket, name, session.if_generation)
        self.sessions[session.id] = session
        address = urlencode({**query, "name": name, "upload_id": session.id})
        location = f"http://{request.headers['host']}/upload/storage/v1/b/{call.bucket}/o?{address}"
        return Response(200, {"Location": location, "X-GUploader-UploadID": session.id})

    def chunk(self, _: Call, request: Request) -> Response:
        """A chunk of a resumable upload, or a query of its progress."""
        session = self.sessions.get(request.query["upload_id"])
        if session is None:
            raise Refusal(404, "No such upload session.")  # tells clients to start over
        data = request.body
        where = ContentRange.parse(request.headers.get("content-range"), data.size)
        with session.lock:
            # A client whose response got lost repeats the request, and gets the same object.
            if session.finished is not None:
                return _uploaded(session.finished)
            if session.refused is not None:
                raise session.refused
            if request.keep_at_most is not None and where.first is not None and where.first <= session.size:
                self._keep_prefix(session, where.first, data[: int(data.size * request.keep_at_most)])
                return _incomplete(session)
            if request.spoil is not None and data.size:
                data = request.spoil(data)
            if not session.take(where, data):
                return _incomplete(session)
            return _uploaded(self._finish(session, request))

    def _finish(self, session: Session, request: Request) -> StoredObject:
        checksums = session.hasher.result()
        try:
            verify(session.metadata, request.headers, checksums)
            made = self.store.insert(
                session.bucket,
                session.name,
                session.content,
                checksums,
                fields=session.metadata,
                if_generation=session.if_generation,
            )
        except Refusal as refusal:
            # Not documented: a session that was refused at its end stays refused here.
            session.refused = refusal
            session.pieces.clear()
            raise
        # Only the store keeps the bytes now, so that a delete frees them.
        session.pieces.clear()
        session.finished = replace(made, content=())
        return session.finished

    def keep_interrupted(self, request: Request, received: np.ndarray) -> None:
        """Store the whole quanta of a chunk whose connection broke, as the service may."""
        session = self.sessions.get(request.query.get("upload_id", ""))
        found = re.match(r"bytes (\d+)-", request.headers.get("content-range", ""))
        if session is not None and found is not None:
            with session.lock:
                if session.finished is None and int(found.group(1)) <= session.size:
                    self._keep_prefix(session, int(found.group(1)), received)

    @staticmethod
    def _keep_prefix(session: Session, first: int, data: np.ndarray) -> None:
        stop = (first + data.size) // QUANTUM * QUANTUM
        if stop > session.size:
            session.keep(first, data[: stop - first])

    def download(self, call: Call, request: Request) -> Response:
        query = request.query
        found = self.store.read(call.bucket, call.name, number_of(query, "generation"))
        encoding = str(found.fields.get("contentEncoding") or "identity")
        headers = {
            "Content-Type": found.content_type,
            "X-Goog-Hash": _hashes(found),
            "X-Goog-Generation": str(found.generation),
            "X-Goog-Stored-Content-Length": str(found.size),
            "X-Goog-Stored-Content-Encoding": encoding,
            "ETag": found.etag,
        }
        if encoding == "gzip" and "gzip" not in request.headers.get("accept-encoding", ""):
            # As documented, gzip is decompressed for clients that do not accept it, and ranges are ignored.
            return Response(200, headers, as_content(gzip.decompress(joined(found.content))))
        if encoding != "identity":
            headers["Content-Encoding"] = encoding
        wanted = _range(request.headers.get("range", ""), found.size)
        if wanted is None:
            return Response(200, headers, found.content)
        start, stop = wanted
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{found.size}"
        return Response(206, headers, cut(found.content, start, stop))

    def name_in_body(self, request: Request, head: np.ndarray) -> str:
        """The object's name in the first bytes of a multipart upload, for fault plans that match names."""
        if request.query.get("uploadType") != "multipart":
            return ""
        found = re.search(rb'"name"\s*:\s*("(?:[^"\\]|\\.)*")', head[:HEAD_LIMIT].tobytes())
        return "" if found is None else str(json.loads(found.group(1)))


def _uploaded(made: StoredObject) -> Response:
    headers = {"X-Goog-Hash": _hashes(made), "X-Goog-Generation": str(made.generation), "ETag": made.etag}
    return Response.of_json(made.resource(), headers=headers)


def _incomplete(session: Session) -> Response:
    """308 with the progress; no Range while nothing is stored."""
    return Response(308, {"Range": f"bytes=0-{session.size - 1}"} if session.size else {})


def _hashes(found: StoredObject) -> str:
    return f"crc32c={found.checksums.crc32c},md5=AAAAAAAAAAAAAAAAAAAAAA=="  # the service has a true one


def _range(text: str, size: int) -> tuple[int, int] | None:
    """The bytes [start, stop) of a Range header; None for all bytes."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", text.strip())
    # Multiple ranges and malformed headers count as no range.
    if found is None or found.group(0) == "bytes=-":
        return None
    first, last = found.groups()
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= size or (first and last and int(last) < int(first)):
        raise Refusal(
            416, "Request range not satisfiable", "requestedRangeNotSatisfiable", {"Content-Range": f"bytes */{size}"}
        )
    return start, stop


def flipped(content: Content, fraction: float) -> Content:
    """The content with one bit flipped, at `fraction` of its length. Only the piece with that bit is copied."""
    bit = int(sum(piece.size for piece in content) * 8 * fraction)
    pieces = list(content)
    for index, piece in enumerate(pieces):
        if bit < piece.size * 8:
            pieces[index] = piece.copy()
            pieces[index][bit // 8] ^= 1 << bit % 8
            break
        bit -= piece.size * 8
    return tuple(pieces)
