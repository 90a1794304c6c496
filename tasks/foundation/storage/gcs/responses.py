"""HTTP responses from Cloud Storage, or from something between it and this process."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
