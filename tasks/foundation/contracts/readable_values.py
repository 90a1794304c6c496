"""Values in messages as a person would write them: 0.001, and not the 0.0010000000474974513 that a float32 becomes."""

import math
import struct
from collections.abc import Mapping
from typing import Any

_DIGITS_OF_FLOAT32 = 9  # are always enough to tell one from all others


def plain(value: Any) -> Any:
    """The value, with every float32 in it as the shortest decimal that is the same float32. For people, never stored.

    A float that no float32 equals is left as it is: 0.001, written as a double, already reads that way.
    """
    if isinstance(value, float):
        return _shortest(value)
    if isinstance(value, Mapping):
        return {key: plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [plain(below) for below in value]
    return value


def _shortest(value: float) -> float:
    if not math.isfinite(value) or _as_float32(value) != value:
        return value
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, _DIGITS_OF_FLOAT32 + 1))
    found = next((each for each in shorter if _as_float32(each) == value), value)
    # Fewer digits may take more room: 999999986991104.0 as 1000000000000000.0.
    return min(value, found, key=lambda each: len(repr(each)))


def _as_float32(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:  # beyond the largest float32
        return math.nan
