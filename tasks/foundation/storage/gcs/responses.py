"""What Cloud Storage answers: one validated model for each kind of answer, before anything in it is used.

A proxy, a login page or a cache can respond in the store's place with status 200. Without these checks such a response
would be read as an empty listing, a missing file or a successful write. A model checks a body by itself, and the
function that ends with `_of` also that it answers this request. Each raises `MalformedResponse` for anything else, and
the request is sent again.
"""

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from baton.tasks.foundation.storage.interface import FileStat

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

NOT_FOUND, PRECONDITION_FAILED, UNAUTHORIZED = 404, 412, 401
_RESUME_INCOMPLETE = 308
_BAD_REQUEST = 400
_TRANSIENT_CODES = frozenset({408, 429, 500, 502, 503, 504})
# Reasons of a 403 that goes away with time.
_RATE_LIMITS = frozenset({"rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded"})
# Anyone who knows the URL of an upload can write to it, so queries never appear in messages.
_QUERY = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\")]*")
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
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
    headers: "CIMultiDictProxy[str]"
    body: bytes


class ChecksumMismatch(Exception):
    """The bytes that arrived differ from the bytes that were sent, in either direction."""


class BodyTooLarge(Exception):
    """A body has more bytes than was asked for; the rest was not received."""


class MalformedResponse(Exception):
    """A response that the store did not send, or that is incomplete. Nothing in it is used."""


class ErrorResponse(Exception):
    """The store responded with an error.

    Attributes:
        code: HTTP status.
        message: the store's message.
        reason: the store's name for the cause, such as conditionNotMet; may be empty.
        is_from_store: whether Cloud Storage can have sent the body: its JSON, or plain text as for media and uploads.
    """

    def __init__(self, code: int, body: bytes) -> None:
        found = _error_in(body)
        self.is_from_store = found is not None
        message, self.reason = found or (_kind_of(body), "")
        self.code, self.message = code, without_queries(message) or "no message"
        super().__init__(f"{self.message} ({code})")

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.code in _TRANSIENT_CODES or self.reason in _RATE_LIMITS

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


def _hex_of(crc32c: object) -> str:
    """The base64 of the JSON API in hexadecimal."""
    data = base64.b64decode(str(crc32c), validate=True)  # its error is a ValueError
    if len(data) != _CRC32C_BYTES:
        raise ValueError(f"{len(data)} bytes are not a crc32c")
    return data.hex()


def _compression(encoding: str) -> str:
    """The encoding if it compresses. Some tools write a character set there, which does not."""
    found = encoding.strip().lower()
    return found if found in _COMPRESSIONS else ""


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


_A = TypeVar("_A", bound=_Answer)
_Name = Annotated[str, Field(min_length=1)]


class Resource(_Answer):
    """An object as the store describes it.

    Attributes:
        name: the object's name.
        size: in bytes; Google's test bench leaves out that of an empty object.
        crc32c: in hexadecimal.
        generation: a number for each version of it.
        metadata: custom metadata.
        encoding: the compression of its stored bytes, such as gzip; usually empty.
        created: time of creation, by the store's clock.
    """

    name: _Name
    size: int = Field(0, ge=0)
    crc32c: Annotated[str, BeforeValidator(_hex_of)]
    generation: int = Field(ge=0)
    metadata: Mapping[str, Any] = {}
    encoding: Annotated[str, AfterValidator(_compression)] = Field("", alias="contentEncoding")
    created: AwareDatetime | None = Field(None, alias="timeCreated")

    @property
    def stat(self) -> FileStat:
        """Size and checksum."""
        return FileStat(size=self.size, crc32c=self.crc32c)


class _Item(_Answer):
    name: _Name


class Page(_Answer):
    """A page of a listing."""

    kind: Literal["storage#objects"]
    items: tuple[_Item, ...] = ()
    prefixes: tuple[_Name, ...] = ()
    next_token: str | None = Field(None, alias="nextPageToken")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the objects."""
        return tuple(item.name for item in self.items)


class _Rewrite(_Answer):
    done: bool
    token: str = Field("", alias="rewriteToken")
    resource: Resource | None = None


class LifecycleRule(_Answer):
    """A rule by which the store deletes or changes objects itself.

    Attributes:
        action: such as Delete.
        condition: what an object must meet, all of it.
    """

    action: str = Field("", validation_alias=AliasPath("action", "type"))
    condition: Mapping[str, Any] = {}


class Settings(_Answer):
    """The settings of a bucket that matter to a run. One that is missing is off.

    Attributes:
        name: the bucket's name.
        retention_seconds: how long no object can be deleted or replaced.
        holds_new_objects: whether each new object gets an event-based hold.
        keeps_old_versions: whether object versioning is on.
        soft_delete_seconds: how long deleted objects are kept, and cost money.
        requester_pays: whether each request has to name a project to charge.
        rules: the lifecycle rules.
    """

    name: str
    retention_seconds: int | None = Field(None, validation_alias=AliasPath("retentionPolicy", "retentionPeriod"))
    holds_new_objects: bool = Field(default=False, validation_alias="defaultEventBasedHold")
    keeps_old_versions: bool = Field(default=False, validation_alias=AliasPath("versioning", "enabled"))
    soft_delete_seconds: float = Field(0, validation_alias=AliasPath("softDeletePolicy", "retentionDurationSeconds"))
    requester_pays: bool = Field(default=False, validation_alias=AliasPath("billing", "requesterPays"))
    rules: tuple[LifecycleRule, ...] = Field((), validation_alias=AliasPath("lifecycle", "rule"))


# The fields of a bucket that `Settings` is made of, for the query.
SETTINGS_FIELDS = "name,versioning,retentionPolicy,defaultEventBasedHold,lifecycle,softDeletePolicy,billing"


class _Cause(_Answer):
    message: str = ""
    reason: str = ""


class _Error(_Answer):
    message: str = ""
    errors: tuple[_Cause, ...] = ()


class _ErrorBody(_Answer):
    error: _Error | str = Field(validation_alias=AliasChoices("error", "message"))


def _answer(model: type[_A], response: Response, what: str, is_ours: Callable[[_A], bool]) -> _A:
    """The JSON in a response, if it is `what` was asked for."""
    shown = _kind_of(response.body)
    try:
        found = model.model_validate_json(response.body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise MalformedResponse(f"expected JSON, got {shown}") from None
        where = ".".join(map(str, first["loc"]))
        raise MalformedResponse(f"expected {what}, got {shown} ({where}: {first['msg']})") from None
    if not is_ours(found):
        raise MalformedResponse(f"expected {what}, got {shown}")
    return found


def resource_of(response: Response, *, key: str) -> Resource:
    """The description of the object `key`."""
    return _answer(Resource, response, f"a description of {key}", lambda found: found.name == key)


def page_of(response: Response, *, prefix: str, delimiter: str | None, token: str | None) -> Page:
    """A page of the listing with these parameters; `token` is that of the page before."""

    def is_ours(page: Page) -> bool:
        below = all(name.startswith(prefix) for name in (*page.names, *page.prefixes))
        folders = all(delimiter and name.endswith(delimiter) for name in page.prefixes)
        # The same token again would list the same page forever.
        return below and folders and (token is None or page.next_token != token)

    return _answer(Page, response, f"a listing of {prefix!r}", is_ours)


def rewrite_token_of(response: Response, *, target: str) -> str | None:
    """The token to continue a copy to `target` with; None when the copy is complete."""

    def is_ours(found: _Rewrite) -> bool:
        return found.resource is not None and found.resource.name == target if found.done else bool(found.token)

    found = _answer(_Rewrite, response, f"a response to a copy to {target}", is_ours)
    return None if found.done else found.token


def settings_of(response: Response, *, bucket: str) -> Settings:
    """A bucket's settings."""
    return _answer(Settings, response, f"a description of the bucket {bucket}", lambda found: found.name == bucket)


def require_deleted(response: Response) -> None:
    """Check the response to a delete, which has no body."""
    if response.status not in {_NO_CONTENT, _OK} or response.body.strip():
        raise MalformedResponse(f"expected an empty response to a delete, got {response.status} with a body")


def session_url_of(response: Response) -> str:
    """The URL of a resumable upload."""
    location = response.headers.get("Location", "")
    if response.status != _OK or not location.startswith(("https://", "http://")) or "upload_id=" not in location:
        raise MalformedResponse(f"the response ({response.status}) to the start of an upload has no upload URL")
    return location


def progress_of(response: Response, *, key: str, size: int) -> Resource | int:
    """State of an upload of `size` bytes: the finished object, or the number of bytes that the store has so far."""
    if response.status != _RESUME_INCOMPLETE:
        return resource_of(response, key=key)
    received = response.headers.get("Range")
    if received is None:
        return 0
    last = received.removeprefix("bytes=0-")
    if not last.isdecimal() or int(last) >= size:
        raise MalformedResponse(f"the store reports {received!r} of an upload of {size} bytes")
    return int(last) + 1


def media_of(response: Response) -> tuple[str | None, str]:
    """What the headers say of the object whose bytes they come with.

    Returns:
        The crc32c of the whole object, in hexadecimal, or None; and the compression of its stored bytes, such as gzip,
        or "".
    """
    headers = response.headers
    if not any(name in headers for name in _STORE_HEADERS):
        raise MalformedResponse(f"{len(response.body)} bytes without any of the store's headers")
    stored = headers.get("X-Goog-Stored-Content-Encoding", "")
    sent = _compression(headers.get("Content-Encoding", ""))
    if sent and stored and not _compression(stored):
        raise MalformedResponse(f"a proxy compressed the bytes ({sent}) without being asked to")
    # One header with commas, or several.
    hashes = dict(each.strip().partition("=")[::2] for each in ",".join(headers.getall("X-Goog-Hash", [])).split(","))
    try:
        crc32c = _hex_of(hashes.get("crc32c"))
    except ValueError:
        crc32c = None
    return crc32c, _compression(stored) or sent


def whole_size_of(response: Response, *, begin: int, size: int) -> int:
    """The size of the whole object, from the response to a read of `size` bytes from `begin`; fewer at its end."""
    content_range = response.headers.get("Content-Range", "")
    found = _CONTENT_RANGE.fullmatch(content_range)
    if response.status != _PARTIAL or found is None:
        raise MalformedResponse(f"the response ({response.status}) to a ranged read has no Content-Range")
    first, last, whole = map(int, found.groups())
    expected = min(size, whole - begin)
    if (first, last + 1 - begin, len(response.body)) != (begin, expected, expected):
        raise MalformedResponse(
            f"requested {size} bytes from {begin}, received {len(response.body)} with Content-Range {content_range}"
        )
    return whole


def require_success(response: Response) -> None:
    """Check the status of a response.

    Raises:
        ErrorResponse: the store responded with an error.
        MalformedResponse: it is a redirect, or an error page that the store did not write.
    """
    status = response.status
    if status < 300 or (status == _RESUME_INCOMPLETE and "Location" not in response.headers):  # noqa: PLR2004 - of HTTP
        return
    if status < 400:  # noqa: PLR2004 - HTTP's redirects
        target = without_queries(response.headers.get("Location", "nowhere"))
        raise MalformedResponse(f"redirect ({status}) to {target}, which Cloud Storage does not send")
    error = ErrorResponse(status, response.body)
    if not error.is_transient and not error.is_from_store:
        raise MalformedResponse(f"status {status} with {_kind_of(response.body)}, which Cloud Storage does not send")
    raise error


def message_of(error: BaseException) -> str:
    """An error's message in one line, without URL queries; its type if it has no message."""
    if isinstance(error, TimeoutError) and not str(error):
        return "timed out: no bytes sent or received"
    return without_queries(" ".join(str(error).split())) or type(error).__name__


def without_queries(text: str) -> str:
    """A text whose URLs are cut at the question mark."""
    return _QUERY.sub(r"\1", text)


def _kind_of(body: bytes) -> str:
    text = body.decode("utf-8", errors="replace").strip()
    if not text:
        return "an empty body"
    if not text.startswith("<"):
        return f"{text[:_SHOWN_CHARS]!r} ({len(body)} bytes)"
    title = _TITLE.search(text)
    words = " ".join((title[1] if title else "").split())[:_SHOWN_CHARS]
    return f"a web page, {words!r}" if words else "a web page"


def _error_in(body: bytes) -> tuple[str, str] | None:
    """Message and reason of an error; None if Cloud Storage cannot have sent the body."""
    text = " ".join(body.decode("utf-8", errors="replace").split())
    if not text or text.startswith("<"):
        return None
    if not text.startswith("{"):
        return text, ""
    try:
        error = _ErrorBody.model_validate_json(body).error
    except ValidationError:
        return None
    if isinstance(error, str):
        return error, ""
    cause = error.errors[0] if error.errors else _Cause()
    return error.message or cause.message, cause.reason
