"""The operations of the JSON API but transfers. Each takes a request, and returns a response or raises a `Refusal`."""

import base64
import bisect
import json
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from tests.fakes.gcs.store import (
    Bucket,
    Refusal,
    Store,
    StoredObject,
    as_content,
    check_generation,
    generation_wanted,
    number_of,
)
from tests.fakes.gcs.transfers import Transfers, boundary_of
from tests.fakes.gcs.wire import Call, Request, Response, route

# The service recommends 1000 and allows up to 5000, which gcsfs requests.
DEFAULT_PAGE, LARGEST_PAGE = 1000, 5000
KNOWN = {"prefix", "delimiter", "pageToken", "maxResults", "fields", "projection", "prettyPrint", "alt", "userProject"}
NEEDS_NO_PROJECT = ("batch", "unknown", "token", "upload.chunk", "upload.query")


def list_objects(store: Store, bucket: str, query: Mapping[str, str]) -> dict[str, Any]:
    unknown = {name for name, value in query.items() if value.lower() not in {"", "false"}} - KNOWN
    if unknown:
        raise Refusal(501, f"The fake does not know {', '.join(sorted(unknown))}")
    limit = min(number_of(query, "maxResults") or DEFAULT_PAGE, LARGEST_PAGE)
    with store.lock:
        items, prefixes, token = _page(store.require(bucket, "storage.objects.list"), query, limit)
    response: dict[str, Any] = {"kind": "storage#objects"}
    if items:
        response["items"] = [item.resource() for item in items]
    if prefixes:
        response["prefixes"] = prefixes
    if token:
        response["nextPageToken"] = token
    return response


def _page(home: Bucket, query: Mapping[str, str], limit: int) -> tuple[list[StoredObject], list[str], str | None]:
    prefix, delimiter, names = query.get("prefix", ""), query.get("delimiter", ""), home.names
    items: list[StoredObject] = []
    prefixes: list[str] = []
    index = bisect.bisect_left(names, prefix)
    if query.get("pageToken"):
        try:
            after, folded = json.loads(base64.urlsafe_b64decode(query["pageToken"]))
        except ValueError:
            raise Refusal(400, "Invalid pageToken") from None
        index = max(index, _index_after(names, after, folded=folded))
    last: tuple[str, bool] | None = None
    while index < len(names) and names[index].startswith(prefix):
        if len(items) + len(prefixes) >= limit and last is not None:
            return items, prefixes, base64.urlsafe_b64encode(json.dumps(last).encode()).decode()
        name = names[index]
        cut = name.find(delimiter, len(prefix)) if delimiter else -1
        if cut >= 0:
            last = name[: cut + len(delimiter)], True
            prefixes.append(last[0])
            index = _index_after(names, last[0], folded=True)
        else:
            last = name, False
            items.append(home.live[name])
            index += 1
    return items, prefixes, None


def _index_after(names: list[str], last: str, *, folded: bool) -> int:
    """Where the next page starts. A prefix stood for all names that start with it."""
    if not folded:
        return bisect.bisect_right(names, last)
    return bisect.bisect_left(names, True, key=lambda name: name > last and not name.startswith(last))


class Service:
    """Responds to requests with a store.

    rewrite_bytes_per_call: a larger rewrite takes several calls with a rewriteToken, as between locations.
    """

    def __init__(self, store: Store, *, rewrite_bytes_per_call: int | None = None) -> None:
        self.store = store
        self.transfers = Transfers(store)
        self.rewrite_bytes_per_call = rewrite_bytes_per_call
        self._rewrites: dict[str, tuple[int | None, int]] = {}
        self._lock = threading.Lock()
        self._operations: dict[str, Callable[[Call, Request], Response]] = {
            "bucket.get": lambda call, _: Response.of_json(
                store.require(call.bucket, "storage.buckets.get").resource()
            ),
            "object.list": lambda call, request: Response.of_json(list_objects(store, call.bucket, request.query)),
            "object.get": self._get,
            "object.media": self.transfers.download,
            "object.insert": self.transfers.insert,
            "object.delete": self._delete,
            "object.rewrite": self._rewrite,
            "upload.initiate": self.transfers.initiate,
            "upload.chunk": self.transfers.chunk,
            "upload.query": self.transfers.chunk,
            "batch": self._batch,
        }

    def respond(self, call: Call, request: Request) -> Response:
        try:
            self._check_project(call, request)
            return self._operations.get(call.kind, self._unknown)(call, request)
        except Refusal as refusal:
            if refusal.status == 503:
                # The service sends this error of an upload as plain text.
                body = as_content(refusal.message.encode())
                return Response(503, {"Content-Type": "text/plain; charset=utf-8"}, body)
            return Response.of_refusal(refusal)

    def _unknown(self, _: Call, request: Request) -> Response:
        raise Refusal(404, f"Not Found: the fake does not know {request.method} {request.path}")

    def _check_project(self, call: Call, request: Request) -> None:
        if call.kind in NEEDS_NO_PROJECT:
            return
        if self.store.bucket(call.bucket).requester_pays and not request.query.get("userProject"):
            raise Refusal(400, "Bucket is a requester pays bucket but no user project provided.", "required")

    def _get(self, call: Call, request: Request) -> Response:
        found = self.store.read(call.bucket, call.name, number_of(request.query, "generation"))
        return Response.of_json(found.resource(), headers={"ETag": found.etag})

    def _delete(self, call: Call, request: Request) -> Response:
        self.store.delete(
            call.bucket, call.name, number_of(request.query, "generation"), generation_wanted(request.query)
        )
        return Response(204)

    def _copied(self, call: Call, request: Request, generation: int | None) -> dict[str, Any]:
        with self.store.lock:
            source = self.store.read(call.bucket, call.name, generation)
            made = self.store.insert(
                call.other_bucket,
                call.other_name,
                source.content,
                source.checksums,
                fields={**source.fields, **request.json()},
                if_generation=generation_wanted(request.query),
            )
            return made.resource()

    def _rewrite(self, call: Call, request: Request) -> Response:
        token = request.query.get("rewriteToken")
        with self._lock:
            if token is not None and token not in self._rewrites:
                raise Refusal(400, "Invalid rewriteToken")
            generation, done = self._rewrites.get(token or "", (None, 0))
        source = self.store.read(call.bucket, call.name, generation)
        done = min(done + (self.rewrite_bytes_per_call or source.size), source.size)
        response: dict[str, Any] = {
            "kind": "storage#rewriteResponse",
            "totalBytesRewritten": str(done),
            "objectSize": str(source.size),
            "done": done == source.size,
        }
        if done == source.size:
            # A source that changed between the calls no longer has this generation: 404.
            response["resource"] = self._copied(call, request, source.generation)
        else:
            check_generation(self.store.find(call.other_bucket, call.other_name), generation_wanted(request.query))
            response["rewriteToken"] = uuid.uuid4().hex
            with self._lock:
                self._rewrites[response["rewriteToken"]] = (source.generation, done)
        return Response.of_json(response)

    def _batch(self, _: Call, request: Request) -> Response:
        """Several requests in one: multipart/mixed of application/http, with "\\n" or "\\r\\n" as line ends."""
        marker = boundary_of(request.headers.get("content-type", "")).decode()
        responses = []
        for part in request.body.tobytes().decode().replace("\r\n", "\n").split(marker)[1:]:
            if part.startswith("--"):
                break
            responses.append(self._batched(part))
        boundary = f"batch_{uuid.uuid4().hex}"
        body = "".join(f"--{boundary}\r\n{response}\r\n" for response in responses) + f"--{boundary}--\r\n"
        return Response(200, {"Content-Type": f"multipart/mixed; boundary={boundary}"}, as_content(body.encode()))

    def _batched(self, part: str) -> str:
        """The answer to one request, which has no body: Baton and its peers only delete in batches."""
        outer, _, inner = part.strip("\n").partition("\n\n")
        method, target, *_ = inner.split("\n")[0].split(" ")
        sub = Request(method, target, {})
        response = self.respond(route(sub), sub)
        identity = re.search(r"(?i)content-id: *<?([^>\n]+)>?", outer)
        text = b"".join(piece.tobytes() for piece in response.body).decode()
        lines = [
            "Content-Type: application/http",
            f"Content-ID: <response-{identity.group(1) if identity else ''}>",
            "",
            f"HTTP/1.1 {response.status} {'OK' if response.status < 300 else 'Error'}",
            *(f"{key}: {value}" for key, value in response.headers.items()),
            f"Content-Length: {len(text)}",
            "",
            text,
        ]
        return "\r\n".join(lines)
