"""Simple, multipart and resumable uploads, as the service documents them."""

import json
import re
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.fakes.gcs.objects import Checksums, Content, Hasher, Refusal, StoredObject
from tests.fakes.gcs.store import Preconditions

QUANTUM = 256 * 1024
HEAD_LIMIT = 1 << 16


def split_multipart(body: np.ndarray, content_type: str) -> tuple[dict[str, Any], str, np.ndarray]:
    """Metadata, content type and media of a multipart upload. The media is a view; nothing is copied.

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
    media_type = re.search(rb"(?i)content-type: *([^\r\n]+)", head[second : headers.end()])
    return metadata, media_type.group(1).decode().strip() if media_type else "", body[headers.end() : tail_start + end]


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
    preconditions: Preconditions
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


class Sessions:
    """All resumable uploads by upload_id."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}

    def add(self, session: Session) -> None:
        with self._lock:
            self._sessions[session.id] = session

    def get(self, upload_id: str) -> Session:
        with self._lock:
            found = self._sessions.get(upload_id)
        # 404 tells clients to start over.
        if found is None:
            raise Refusal(404, f"No such upload session: {upload_id}")
        return found

    def peek(self, upload_id: str) -> Session | None:
        with self._lock:
            return self._sessions.get(upload_id)
