"""Measured values for the log. A commit must not fail because someone set the clock."""

from collections.abc import Callable
from typing import Final, TypeVar

from pydantic import ValidationError

from tasks.foundation.telemetry.events import Note, Sink

T = TypeVar("T")

# Thirty years. Longer times come from a clock that was set, and their sums overflow.
_LONGEST_SECONDS: Final = 1e9


def sound_seconds(seconds: float) -> float:
    """A measured time; 0 if it is negative, NaN or impossibly long, because the clock was set."""
    return seconds if 0 <= seconds <= _LONGEST_SECONDS else 0.0


def seconds_between(earlier: float, later: float) -> float:
    """Seconds between two readings of a clock; see `sound_seconds`."""
    return sound_seconds(later - earlier)


def measured(build: Callable[[], T], otherwise: T, *, what: str, telemetry: Sink) -> T:
    """The result of `build`, or `otherwise` if a measured value is not valid, so that the commit does not fail.

    Args:
        build: makes a contract from measured values; raises ValueError (as pydantic does) if one is not valid.
        otherwise: the result in that case.
        what: names the values in the warning.
        telemetry: receives the warning.
    """
    try:
        return build()
    except (ValueError, OverflowError) as fault:
        text = f"{what} are not logged, because a measured value is not valid: {_reason(fault)}"
        telemetry.emit(Note(text=text, warning=True))
        return otherwise


def _reason(fault: Exception) -> str:
    if not isinstance(fault, ValidationError):
        return str(fault)
    first = fault.errors()[0]
    return f"{'.'.join(map(str, first['loc']))} = {first['input']}: {first['msg']}"
