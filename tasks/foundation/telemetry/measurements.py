"""Measured values on their way into the log: what a clock got wrong must not cost a commit."""

from collections.abc import Callable
from typing import Final, TypeVar

from pydantic import ValidationError

from tasks.foundation.telemetry.events import Note, Sink

T = TypeVar("T")

# Thirty years. A longer time is a fault of the clock, and sums of such times overflow.
_LONGEST_SECONDS: Final = 1e9


def sound_seconds(seconds: float) -> float:
    """A measured time; 0 where it is negative, NaN or longer than any process lives: its clock was set meanwhile."""
    return seconds if 0 <= seconds <= _LONGEST_SECONDS else 0.0


def seconds_between(earlier: float, later: float) -> float:
    """Seconds from one reading of a clock to the next, as `sound_seconds`."""
    return sound_seconds(later - earlier)


def measured(build: Callable[[], T], otherwise: T, *, what: str, telemetry: Sink) -> T:
    """The contract that `build` makes of measured values.

    A commit must not fail because a number beside it was measured wrong: values that do not validate are dropped.

    Args:
        build: makes the contract; a ValueError of it (pydantic's is one) says that a value cannot be right.
        otherwise: takes its place then.
        what: names the values in the note about it.
        telemetry: receives that note.
    """
    try:
        return build()
    except (ValueError, OverflowError) as fault:
        text = f"{what} are left out of the log: a measured value is not valid ({_reason(fault)})"
        telemetry.emit(Note(text=text, warning=True))
        return otherwise


def _reason(fault: Exception) -> str:
    if not isinstance(fault, ValidationError):
        return str(fault)
    first = fault.errors()[0]
    return f"{'.'.join(map(str, first['loc']))} = {first['input']}: {first['msg']}"
