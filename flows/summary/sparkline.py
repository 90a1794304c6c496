"""A curve as one line of text."""

import math
from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
_LOGARITHMIC_FROM_RATIO = 50


def sparkline(curve: Sequence[tuple[int, float]], *, columns: int, last: int, values: Sequence[float]) -> str:
    """Draw a curve with characters of eight heights.

    Args:
        curve: step and value, by step.
        columns: characters for the steps from 0 to `last`.
        last: the last step of all curves that are compared.
        values: all their values, which decide the heights. They are logarithmic if they are positive and far apart.

    Returns:
        A text of at most `columns` characters; a blank where the curve has no finite value.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or last < 1:
        return ""
    low, high = min(finite), max(finite)
    logarithmic = low > 0 and high / low > _LOGARITHMIC_FROM_RATIO

    def height(value: float) -> float:
        if logarithmic:
            return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
        return (value - low) / (high - low) if high > low else 0.5

    means: dict[int, list[float]] = {}
    for step, value in curve:
        if math.isfinite(value):
            means.setdefault(min(step * columns // last, columns - 1), []).append(value)
    drawn = (
        _LEVELS[min(int(height(sum(found) / len(found)) * len(_LEVELS)), len(_LEVELS) - 1)] if found else " "
        for found in (means.get(column, []) for column in range(columns))
    )
    return "".join(drawn).rstrip()
