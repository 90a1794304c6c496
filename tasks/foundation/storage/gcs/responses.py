"""Answers to requests, from the store or from something between it and this process."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOT_FOUND, PRECONDITION_FAILED, UNAUTHORIZED = 404, 412, 401
RESUME_INCOMPLETE = 308
_BAD_REQUEST = 400
TRANSIENT_CODES = frozenset({408, 429, 500, 502, 503, 504})
# Reasons of a 403 that waiting helps against.
_RATE_LIMITS = frozenset({"rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded"})
# An upload's address is all that is needed to write to it.
_QUERY = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\")]*")
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: status of HTTP, headers, body."""

    status: int
    headers: Mapping[str, str]
    contents: bytes


class Answered(Exception):
    """The store answered with an error.

    Attributes:
        code: of HTTP.
        said: the store's own words.
        reason: its word for the cause, such as conditionNotMet; may be empty.
    """

    def __init__(self, code: int, contents: bytes) -> None:
        said, self.reason = _words(contents)
        self.code, self.said = code, without_queries(said) or "no words"
        super().__init__(f"{self.said} ({code})")

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self.code in TRANSIENT_CODES or self.reason in _RATE_LIMITS

    @property
    def is_of_checksums(self) -> bool:
        """Whether a body was not what its checksum said: a 400, and from Google's own test bench a 412."""
        said = self.said.lower()
        return (
            self.code in {_BAD_REQUEST, PRECONDITION_FAILED}
            and self.reason != "conditionNotMet"
            and ("crc32c" in said or "md5" in said)
            and any(word in said for word in ("match", "invalid", "validation failed"))
        )


class Garbled(Exception):
    """What arrived is not what was sent, in one direction or the other."""


class Malformed(Exception):
    """An answer that the store did not send, or not completely. Nothing in it is used."""


def require_success(answer: Answer) -> None:
    """Check the status of an answer.

    Raises:
        Answered: the store answered with an error.
        Malformed: it is a redirect, or an error page that the store did not write.
    """
    if answer.status < 300 or (answer.status == RESUME_INCOMPLETE and "Location" not in answer.headers):  # noqa: PLR2004 - HTTP's
        return
    if answer.status < 400:  # noqa: PLR2004 - HTTP's redirects
        target = without_queries(answer.headers.get("Location", "nowhere"))
        raise Malformed(f"the answer is a redirect ({answer.status}) to {target}, which Cloud Storage does not send")
    fault = Answered(answer.status, answer.contents)
    if not fault.is_transient and not _is_of_the_store(answer.contents):
        raise Malformed(f"the answer {answer.status} is {_kind_of(answer.contents)}, which Cloud Storage does not send")
    raise fault


def json_of(answer: Answer) -> dict[str, Any]:
    """The JSON object that an answer holds.

    Raises:
        Malformed: it holds none.
    """
    try:
        found = json.loads(answer.contents)
    except ValueError as fault:
        raise Malformed(f"the answer is {_kind_of(answer.contents)} where JSON is due") from fault
    if not isinstance(found, dict):
        raise Malformed(f"the answer is {str(found)[:_SHOWN]!r} where a JSON object is due")
    return found


def said_by(fault: BaseException) -> str:
    """What a fault says, in one line, without what is secret in addresses; its kind where it says nothing."""
    if isinstance(fault, TimeoutError) and not str(fault):
        return "nothing moved for too long"
    return without_queries(" ".join(str(fault).split())) or type(fault).__name__


def without_queries(text: str) -> str:
    """A text with the addresses in it cut at the question mark."""
    return _QUERY.sub(r"\1", text)


def _is_of_the_store(contents: bytes) -> bool:
    """Whether an error's body can be Cloud Storage's: its JSON, or plain text, as media and uploads have it."""
    text = contents.strip()
    if not text or text.startswith(b"<"):
        return False
    if not text.startswith(b"{"):
        return True
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return bool({"error", "message"} & found.keys())


def _kind_of(contents: bytes) -> str:
    text = contents.decode("utf-8", errors="replace").strip()
    if not text:
        return "empty"
    if not text.startswith("<"):
        return f"{text[:_SHOWN]!r} ({len(contents)} bytes)"
    title = _TITLE.search(text)
    words = " ".join((title[1] if title else "").split())[:_SHOWN]
    return f"a web page, {words!r}" if words else "a web page"


def _words(contents: bytes) -> tuple[str, str]:
    text = contents.decode("utf-8", errors="replace").strip()
    if text.startswith("<"):
        return _kind_of(contents), ""
    try:
        error: Any = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split()), ""
    if not isinstance(error, Mapping):
        return str(error), ""
    causes = error.get("errors")
    first = causes[0] if isinstance(causes, list) and causes and isinstance(causes[0], Mapping) else {}
    return str(error.get("message") or first.get("message", "")), str(first.get("reason", ""))
