"""What Cloud Storage answers: one checked model for each kind of answer, before anything in it is used.

A proxy, a login page or a cache can respond in the store's place with status 200. Without these checks such a
response would be read as an empty listing, a missing file or a successful write.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tasks.foundation.storage.base import FileStat

NOT_FOUND, PRECONDITION_FAILED, UNAUTHORIZED = 404, 412, 401
RESUME_INCOMPLETE = 308
_BAD_REQUEST = 400
TRANSIENT_CODES = frozenset({408, 429, 500, 502, 503, 504})
# Reasons of a 403 that goes away with time.
_RATE_LIMITS = frozenset({"rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded"})
# Anyone who knows the URL of an upload can write to it, so queries never appear in messages.
_QUERY = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\")]*")
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_SHOWN_CHARS = 80
_CRC32C_BYTES = 4
_COMPRESSIONS = {"br", "compress", "deflate", "gzip", "x-gzip", "zstd"}
_NO_CONTENT, _OK, _PARTIAL = 204, 200, 206
# The store sends at least one of these with the bytes of an object.
_STORE_HEADERS = ("X-Goog-Hash", "X-Goog-Generation", "X-Goog-Stored-Content-Length")


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response with its whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class ErrorResponse(Exception):
    """The store responded with an error.

    Attributes:
        code: HTTP status.
        message: the store's message.
        reason: the store's name for the cause, such as conditionNotMet; may be empty.
    """

    def __init__(self, code: int, body: bytes) -> None:
        message, self.reason = _message_and_reason(body)
        self.code, self.message = code, without_queries(message) or "no message"
        super().__init__(f"{self.message} ({code})")

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.code in TRANSIENT_CODES or self.reason in _RATE_LIMITS

    @property
    def is_checksum_mismatch(self) -> bool:
        """Whether the store received other bytes than were sent: a 400, and a 412 from Google's own test bench."""
        message = self.message.lower()
        return (
            self.code in {_BAD_REQUEST, PRECONDITION_FAILED}
            and self.reason != "conditionNotMet"
            and ("crc32c" in message or "md5" in message)
            and any(word in message for word in ("match", "invalid", "validation failed"))
        )


class ChecksumMismatch(Exception):
    """The bytes that arrived differ from the bytes that were sent, in either direction."""


class BodyTooLarge(Exception):
    """A body has more bytes than was asked for; the rest was not received."""


class MalformedResponse(Exception):
    """A response that the store did not send, or that is incomplete. Nothing in it is used."""


def require_success(response: Response) -> None:
    """Check the status of a response.

    Raises:
        ErrorResponse: the store responded with an error.
        MalformedResponse: it is a redirect, or an error page that the store did not write.
    """
    status = response.status
    if status < 300 or (status == RESUME_INCOMPLETE and "Location" not in response.headers):  # noqa: PLR2004 - of HTTP
        return
    if status < 400:  # noqa: PLR2004 - HTTP's redirects
        target = without_queries(response.headers.get("Location", "nowhere"))
        raise MalformedResponse(f"redirect ({status}) to {target}, which Cloud Storage does not send")
    error = ErrorResponse(status, response.body)
    if not error.is_transient and not _is_from_store(response.body):
        raise MalformedResponse(f"status {status} with {_kind_of(response.body)}, which Cloud Storage does not send")
    raise error


def json_of(response: Response) -> dict[str, Any]:
    """The JSON object in a response.

    Raises:
        MalformedResponse: the body is something else.
    """
    try:
        found = json.loads(response.body)
    except ValueError as error:
        raise MalformedResponse(f"expected JSON, got {_kind_of(response.body)}") from error
    if not isinstance(found, dict):
        raise MalformedResponse(f"expected a JSON object, got {str(found)[:_SHOWN_CHARS]!r}")
    return found


def message_of(error: BaseException) -> str:
    """An error's message in one line, without URL queries; its type if it has no message."""
    if isinstance(error, TimeoutError) and not str(error):
        return "timed out: no bytes sent or received"
    return without_queries(" ".join(str(error).split())) or type(error).__name__


def without_queries(text: str) -> str:
    """A text whose URLs are cut at the question mark."""
    return _QUERY.sub(r"\1", text)


def _is_from_store(body: bytes) -> bool:
    """Whether Cloud Storage can have sent an error's body: its JSON, or plain text as for media and uploads."""
    text = body.strip()
    if not text or text.startswith(b"<"):
        return False
    if not text.startswith(b"{"):
        return True
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return bool({"error", "message"} & found.keys())


def _kind_of(body: bytes) -> str:
    text = body.decode("utf-8", errors="replace").strip()
    if not text:
        return "an empty body"
    if not text.startswith("<"):
        return f"{text[:_SHOWN_CHARS]!r} ({len(body)} bytes)"
    title = _TITLE.search(text)
    words = " ".join((title[1] if title else "").split())[:_SHOWN_CHARS]
    return f"a web page, {words!r}" if words else "a web page"


def _message_and_reason(body: bytes) -> tuple[str, str]:
    text = body.decode("utf-8", errors="replace").strip()
    if text.startswith("<"):
        return _kind_of(body), ""
    try:
        error: Any = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split()), ""
    if not isinstance(error, Mapping):
        return str(error), ""
    causes = error.get("errors")
    first = causes[0] if isinstance(causes, list) and causes and isinstance(causes[0], Mapping) else {}
    return str(error.get("message") or first.get("message", "")), str(first.get("reason", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """An object as the store describes it.

    Attributes:
        name: the object's name.
        stat: size and checksum.
        generation: a number for each version of it.
        metadata: custom metadata.
        encoding: the compression of its stored bytes, such as gzip; usually empty.
        created: time of creation in RFC 3339, by the store's clock; may be empty.
    """

    name: str
    stat: FileStat
    generation: str
    metadata: Mapping[str, str]
    encoding: str
    created: str

    def seconds_before(self, other: "Resource") -> float:
        """Seconds from the creation of this object to that of another; 0 if the store does not report it."""
        try:
            return (datetime.fromisoformat(other.created) - datetime.fromisoformat(self.created)).total_seconds()
        except (ValueError, TypeError):
            return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of a listing."""

    names: tuple[str, ...]
    prefixes: tuple[str, ...]
    next_token: str | None


def resource_of(response: Response, *, key: str) -> Resource:
    """An object's description. A missing size means 0.

    Raises:
        MalformedResponse: it is something else, or describes another object.
    """
    return _resource(json_of(response), key)


def page_of(response: Response, *, prefix: str, delimiter: str | None, token: str | None) -> Page:
    """A page of a listing.

    Args:
        response: the response.
        prefix: of the request: every name starts with it.
        delimiter: of the request: every prefix ends with it.
        token: of the page before.

    Raises:
        MalformedResponse: it is something else, or lists names outside of the request.
    """
    found = json_of(response)
    if found.get("kind") != "storage#objects":
        raise _unexpected("a listing", found, "kind")
    items, prefixes = found.get("items", []), found.get("prefixes", [])
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise _unexpected("a listing", found, "items")
    page = Page(
        names=_below([item.get("name") for item in items], prefix),
        prefixes=_below(prefixes if isinstance(prefixes, list) else [None], prefix),
        next_token=found.get("nextPageToken"),
    )
    if not all(name.endswith(delimiter or "") for name in page.prefixes) or (page.prefixes and delimiter is None):
        raise _unexpected("a listing", found, "prefixes")
    # The same token again would list the same page forever.
    if page.next_token is not None and (not isinstance(page.next_token, str) or page.next_token in {"", token}):
        raise _unexpected("a listing", found, "nextPageToken")
    return page


def rewrite_token_of(response: Response, *, target: str) -> str | None:
    """The token to continue a copy with; None when the copy is complete.

    Raises:
        MalformedResponse: it is something else, or describes another copy.
    """
    found = json_of(response)
    done, token = found.get("done"), found.get("rewriteToken")
    if done is True:
        resource = found.get("resource")
        _resource(resource if isinstance(resource, dict) else {}, target)
        return None
    if done is not False or not isinstance(token, str) or not token:
        raise _unexpected("a response to a copy", found, "done")
    return token


def settings_of(response: Response, *, bucket: str) -> Mapping[str, Any]:
    """A bucket's settings.

    Raises:
        MalformedResponse: it is something else, or describes another bucket.
    """
    found = json_of(response)
    if found.get("name") != bucket:
        raise _unexpected(f"a description of the bucket {bucket}", found, "name")
    return found


def require_deleted(response: Response) -> None:
    """Check the response to a delete, which has no body.

    Raises:
        MalformedResponse: the store did not send it.
    """
    if response.status not in {_NO_CONTENT, _OK} or response.body.strip():
        raise MalformedResponse(f"expected an empty response to a delete, got {response.status} with a body")


def session_url_of(response: Response) -> str:
    """The URL of a resumable upload.

    Raises:
        MalformedResponse: there is none.
    """
    location = response.headers.get("Location", "")
    if response.status != _OK or not location.startswith(("https://", "http://")) or "upload_id=" not in location:
        raise MalformedResponse(f"the response ({response.status}) to the start of an upload has no upload URL")
    return location


def progress_of(response: Response, *, key: str, size: int) -> Resource | int:
    """State of a resumable upload: the finished object, or the number of bytes that the store has so far.

    Args:
        response: the response.
        key: the object's name.
        size: of the whole upload in bytes.

    Raises:
        MalformedResponse: it is neither.
    """
    if response.status != RESUME_INCOMPLETE:
        return resource_of(response, key=key)
    received = response.headers.get("Range")
    if received is None:
        return 0
    last = received.removeprefix("bytes=0-")
    if not last.isdecimal() or int(last) >= size:
        raise MalformedResponse(f"the store reports {received!r} of an upload of {size} bytes")
    return int(last) + 1


def crc32c_of_media(response: Response) -> str | None:
    """The crc32c of an object that comes with its bytes; None if the headers have none.

    Raises:
        MalformedResponse: the bytes are not from the store.
    """
    if response.status != _OK:
        raise MalformedResponse(f"expected status {_OK} for a read, got {response.status}")
    _require_store_headers(response)
    for value in _header_values(response.headers, "X-Goog-Hash"):
        name, _, encoded = value.strip().partition("=")
        if name == "crc32c":
            return _crc32c(encoded)
    return None


def size_of_ranged_media(response: Response, *, begin: int, size: int) -> int:
    """The size of the whole object that a range was read from.

    Args:
        response: the response.
        begin: offset of the range in bytes.
        size: number of bytes requested; there may be fewer at the object's end.

    Raises:
        MalformedResponse: it is not the requested range, or not from the store.
    """
    unit, _, content_range = response.headers.get("Content-Range", "").partition(" ")
    span, _, whole = content_range.partition("/")
    first, _, last = span.partition("-")
    if response.status != _PARTIAL or unit != "bytes" or not all(map(str.isdecimal, (first, last, whole))):
        raise MalformedResponse(f"the response ({response.status}) to a ranged read has no Content-Range")
    _require_store_headers(response)
    expected = min(size, int(whole) - begin)
    if (int(first), int(last) + 1 - begin, len(response.body)) != (begin, expected, expected):
        raise MalformedResponse(
            f"requested {size} bytes from {begin}, received {len(response.body)} with Content-Range {content_range}"
        )
    return int(whole)


def encoding_of_media(response: Response) -> str:
    """The compression of an object's stored bytes, such as gzip; empty if there is none.

    Raises:
        MalformedResponse: a proxy compressed them.
    """
    stored = response.headers.get("X-Goog-Stored-Content-Encoding", "")
    sent = _compression(response.headers.get("Content-Encoding", ""))
    if sent and stored and not _compression(stored):
        raise MalformedResponse(f"a proxy compressed the bytes ({sent}) without being asked to")
    return _compression(stored) or sent


def _compression(encoding: str) -> str:
    """The encoding if it compresses. Some tools write a character set there, which does not."""
    found = encoding.strip().lower()
    return found if found in _COMPRESSIONS else ""


def _require_store_headers(response: Response) -> None:
    if not any(name in response.headers for name in _STORE_HEADERS):
        raise MalformedResponse(f"{len(response.body)} bytes without any of the store's headers")


def _resource(found: Mapping[str, Any], key: str) -> Resource:
    what = f"a description of {key}"
    size, generation, metadata = found.get("size", "0"), found.get("generation"), found.get("metadata", {})
    if found.get("name") != key:
        raise _unexpected(what, found, "name")
    if not str(size).isdecimal():
        raise _unexpected(what, found, "size")
    if not str(generation).isdecimal():
        raise _unexpected(what, found, "generation")
    if not isinstance(metadata, Mapping):
        raise _unexpected(what, found, "metadata")
    crc32c = _crc32c(found.get("crc32c"))
    if crc32c is None:
        raise _unexpected(what, found, "crc32c")
    return Resource(
        name=key,
        stat=FileStat(size=int(size), crc32c=crc32c),
        generation=str(generation),
        metadata=metadata,
        encoding=_compression(str(found.get("contentEncoding", ""))),
        created=str(found.get("timeCreated", "")),
    )


def _crc32c(encoded: object) -> str | None:
    """The API's base64 in hexadecimal; None if it is not a crc32c."""
    try:
        data = base64.b64decode(str(encoded), validate=True)
    except binascii.Error:
        return None
    return data.hex() if len(data) == _CRC32C_BYTES else None


def _below(names: Iterable[object], prefix: str) -> tuple[str, ...]:
    found = []
    for name in names:
        if not isinstance(name, str) or not name.startswith(prefix) or name == "":
            raise MalformedResponse(f"a listing of {prefix!r} contains {str(name)[:80]!r}")
        found.append(name)
    return tuple(found)


def _header_values(headers: Mapping[str, str], name: str) -> list[str]:
    """All values of a header, which may be sent as several headers or as one with commas."""
    values = headers.getall(name, []) if hasattr(headers, "getall") else [headers.get(name, "")]
    return ",".join(values).split(",")


def _unexpected(what: str, found: Mapping[str, Any], key: str) -> MalformedResponse:
    shown = {name: str(value)[:40] for name, value in list(found.items())[:5]}
    return MalformedResponse(f"expected {what}, got {key}={str(found.get(key))[:80]!r} ({shown})")
