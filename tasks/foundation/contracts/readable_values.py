"""Write values in messages as people do: 0.001, not 0.0010000000474974513, which a float32 becomes as a double."""

import math
import struct
from collections.abc import Mapping
from typing import Any

_DIGITS_OF_FLOAT32 = 9  # always enough to identify a float32


def readable(value: Any) -> Any:
    """Replace every float32 in the value by the shortest decimal that is the same float32. For messages only.

    A float that is not equal to any float32 stays as it is: the double 0.001 is already short.
    """
    if isinstance(value, float):
        return _shortest(value)
    if isinstance(value, Mapping):
        return {key: readable(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [readable(below) for below in value]
    return value


def _shortest(value: float) -> float:
    if not math.isfinite(value) or _as_float32(value) != value:
        return value
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, _DIGITS_OF_FLOAT32 + 1))
    found = next((each for each in shorter if _as_float32(each) == value), value)
    # Fewer digits can be a longer text: 999999986991104.0 becomes 1000000000000000.0.
    return min(value, found, key=lambda each: len(repr(each)))


def _as_float32(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:  # larger than the largest float32
        return math.nan
