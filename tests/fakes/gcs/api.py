"""Requests, responses and routes of the JSON API, independent of sockets."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np

from tests.fakes.gcs.objects import Content, Refusal, as_content

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

    @property
    def base(self) -> str:
        return f"http://{self.headers.get('host', 'localhost')}"

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
UPLOAD_PATH = re.compile(r"(?:/resumable)?/upload/storage/v1/b/(?P<bucket>[^/]+)/o")
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
        if request.method in {"PUT", "POST"}:
            where = request.headers.get("content-range", "")
            return "upload.query" if where.startswith("bytes */") else "upload.chunk"
    elif request.method == "POST" and query.get("uploadType") == "resumable":
        return "upload.initiate"
    elif request.method == "POST" and query.get("uploadType") in {"media", "multipart"}:
        return "object.insert"
    return "unknown"
