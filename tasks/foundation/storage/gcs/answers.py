"""What the store answers when it does not do what it is asked."""

import json
import re
from collections.abc import Mapping
from typing import Any

NOT_FOUND, PRECONDITION_FAILED, UNAUTHORIZED = 404, 412, 401
# An upload's address is all that is needed to write to it.
_QUERY = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\")]*")


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


class Garbled(Exception):
    """What arrived is not what was sent, in one direction or the other."""


def said_by(fault: BaseException) -> str:
    """What a fault says, in one line, without what is secret in addresses; its kind where it says nothing."""
    if isinstance(fault, TimeoutError) and not str(fault):
        return "nothing moved for too long"
    return without_queries(" ".join(str(fault).split())) or type(fault).__name__


def without_queries(text: str) -> str:
    """A text with the addresses in it cut at the question mark."""
    return _QUERY.sub(r"\1", text)


def _words(contents: bytes) -> tuple[str, str]:
    text = contents.decode("utf-8", errors="replace").strip()
    try:
        error: Any = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split()), ""
    if not isinstance(error, Mapping):
        return str(error), ""
    causes = error.get("errors") or [{}]
    return str(error.get("message", "")), str(causes[0].get("reason", ""))
