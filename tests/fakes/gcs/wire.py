"""Requests, responses and routes of the JSON API, and HTTP/1.1 on sockets that carries them.

Heads are parsed simply; bodies are read into arrays and sent from arrays.
"""

import contextlib
import http.client
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np

from tests.fakes.gcs.store import Content, Refusal, as_content, cut

EMPTY = np.empty(0, dtype=np.uint8)


@dataclass(slots=True)
class Request:
    """A request, or its head only. Header names are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: np.ndarray = field(default_factory=lambda: EMPTY)
    spoil: Callable[[np.ndarray], np.ndarray] | None = None
    """Changes the bytes that an upload stores: damage between network and disk."""
    keep_at_most: float | None = None
    """The fraction of a chunk that is stored, for a service that stores less than it received."""

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    def json(self) -> dict[str, Any]:
        if not self.body.size:
            return {}
        try:
            found = json.loads(self.body.tobytes())
        except ValueError:
            raise Refusal(400, "Parse Error", "parseError") from None
        if not isinstance(found, dict):
            raise Refusal(400, "Parse Error", "parseError")
        return found


@dataclass(slots=True)
class Response:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Content = ()

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.body)

    @classmethod
    def of_json(cls, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> "Response":
        body = as_content(json.dumps(value).encode())
        return cls(status, {"Content-Type": "application/json; charset=UTF-8", **(headers or {})}, body)

    @classmethod
    def of_refusal(cls, refusal: Refusal) -> "Response":
        return cls.of_json(refusal.as_json(), refusal.status, refusal.headers)


@dataclass(frozen=True, slots=True)
class Call:
    """The operation of a request, and the names in its path."""

    kind: str
    bucket: str = ""
    name: str = ""
    other_bucket: str = ""
    other_name: str = ""

    @property
    def path(self) -> str:
        """A path with the object's name, the same for every kind of request. Fault plans match it."""
        return (f"/b/{self.bucket}" if self.bucket else "/b") + (f"/o/{self.name}" if self.name else "")


# Names in paths are percent-encoded, including slashes, so one segment is one name.
ROUTES: tuple[tuple[str, str, str], ...] = (
    ("GET", r"/b/{bucket}", "bucket.get"),
    ("GET", r"/b/{bucket}/o", "object.list"),
    ("GET", r"/b/{bucket}/o/{name}", "object.get"),
    ("DELETE", r"/b/{bucket}/o/{name}", "object.delete"),
    ("POST", r"/b/{bucket}/o/{name}/rewriteTo/b/{other_bucket}/o/{other_name}", "object.rewrite"),
)
API_ROUTES = tuple(
    (method, re.compile("/storage/v1" + re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path)), kind)
    for method, path, kind in ROUTES
)
UPLOAD_PATH = re.compile(r"/upload/storage/v1/b/(?P<bucket>[^/]+)/o")
DOWNLOAD_PATH = re.compile(r"/download/storage/v1/b/(?P<bucket>[^/]+)/o/(?P<name>[^/]+)")


def route(request: Request) -> Call:
    """The operation of a request, judged by its head; kind "unknown" if there is none."""
    path, query = request.path, request.query
    if path == "/batch/storage/v1":
        return Call("batch")
    if path == "/_fake/token":
        return Call("token")
    found = UPLOAD_PATH.fullmatch(path)
    if found:
        return Call(_kind_of_upload(request, query), unquote(found["bucket"]), query.get("name", ""))
    found = DOWNLOAD_PATH.fullmatch(path)
    if found and request.method == "GET":
        return Call("object.media", unquote(found["bucket"]), unquote(found["name"]))
    for method, pattern, kind in API_ROUTES:
        found = pattern.fullmatch(path) if method == request.method else None
        if found:
            names = {key: unquote(value) for key, value in found.groupdict().items()}
            if kind == "object.get" and query.get("alt") == "media":
                kind = "object.media"  # noqa: PLW2901  # one path, two operations
            return Call(kind, **names)
    return Call("unknown")


def _kind_of_upload(request: Request, query: Mapping[str, str]) -> str:
    if "upload_id" in query:
        where = request.headers.get("content-range", "")
        return "upload.query" if where.startswith("bytes */") else "upload.chunk"
    return {"resumable": "upload.initiate", "multipart": "object.insert"}.get(query.get("uploadType", ""), "unknown")


HEAD_BYTES = 1 << 16
PIECE_BYTES = 1 << 22
JOIN_BELOW = 1 << 16


class Hangup(Exception):
    """The connection was closed by either side."""


class Pace:
    """Limits a transfer to a number of bytes per second; None means no limit."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self.piece_bytes = PIECE_BYTES if bytes_per_second is None else max(int(bytes_per_second / 50), 1)

    def spend(self, count: int) -> None:
        if self.bytes_per_second is not None:
            time.sleep(count / self.bytes_per_second)


class Wire:
    """One connection of a client."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.pace = Pace()
        self._early = bytearray()
        # Responses are many and small. Waiting to fill a packet would cost 40 ms each.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read_head(self) -> Request | None:
        """The next request without its body; None when the client has closed the connection."""
        while (end := self._early.find(b"\r\n\r\n")) < 0:
            if len(self._early) > HEAD_BYTES or not self._receive_more():
                return None
        lines = bytes(self._early[:end]).decode("latin-1").split("\r\n")
        del self._early[: end + 4]
        method, target, _ = lines[0].split(" ", 2)
        pairs = (line.partition(":") for line in lines[1:])
        headers = {key.strip().lower(): value.strip() for key, _, value in pairs}
        return Request(method, target, headers)

    def _receive_more(self) -> bool:
        try:
            received = self.socket.recv(HEAD_BYTES)
        except OSError:
            return False
        self._early += received
        return bool(received)

    def read_into(self, target: memoryview) -> int:
        """Read into `target` until it is full or the client stops sending; returns the number of bytes."""
        start = min(len(self._early), len(target))
        target[:start] = self._early[:start]
        del self._early[:start]
        while start < len(target):
            piece = target[start : start + self.pace.piece_bytes]
            try:
                # One call per piece, because each return waits for the GIL.
                received = self.socket.recv_into(piece, len(piece), socket.MSG_WAITALL)
            except OSError:
                return start
            if not received:
                return start
            start += received
            self.pace.spend(received)
        return start

    def send(self, data: bytes | memoryview) -> None:
        try:
            if self.pace.bytes_per_second is None:
                self.socket.sendall(data)
                return
            view = memoryview(data)
            for start in range(0, len(view), self.pace.piece_bytes):
                piece = view[start : start + self.pace.piece_bytes]
                self.pace.spend(len(piece))
                self.socket.sendall(piece)
        except OSError:
            raise Hangup from None

    def respond(self, response: Response, *, stop: int | None = None, claimed_size: int | None = None) -> None:
        """Send a response.

        stop: send only this many bytes of the body.
        claimed_size: a wrong value for Content-Length.
        """
        body = response.body if stop is None else cut(response.body, 0, stop)
        reason = http.client.responses.get(response.status, "Client Closed Request")
        lines = [f"HTTP/1.1 {response.status} {reason}", "Server: fake-gcs"]
        lines += [f"{key}: {value}" for key, value in response.headers.items()]
        if response.status not in {204, 304}:
            lines.append(f"Content-Length: {response.size if claimed_size is None else claimed_size}")
        self._send_parts(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), body)

    def _send_parts(self, head: bytes, body: Content) -> None:
        if sum(piece.size for piece in body) < JOIN_BELOW:
            self.send(head + b"".join(piece.tobytes() for piece in body))
            return
        self.send(head)
        for piece in body:
            self.send(memoryview(piece))

    def reset(self) -> None:
        """End the connection as a crash does: RST instead of FIN, and bytes in transit are lost."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
        raise Hangup


class Body:
    """A request's body, received on demand."""

    def __init__(self, wire: Wire, headers: dict[str, str]) -> None:
        self._wire = wire
        self._length = int(headers.get("content-length") or 0)
        self._data = np.empty(self._length, dtype=np.uint8) if self._length else EMPTY
        self._received = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def received(self) -> np.ndarray:
        return self._data[: self._received]

    def fill(self, stop: int | None = None) -> np.ndarray:
        """Receive up to `stop` bytes, or all.

        Raises:
            Hangup: the client closed the connection early; `received` has the bytes that arrived.
        """
        stop = self._length if stop is None else min(stop, self._length)
        if self._received < stop:
            self._received += self._wire.read_into(memoryview(self._data)[self._received : stop])
            if self._received < stop:
                raise Hangup
        return self._data[:stop]
