"""A long curve is thinned before it is drawn, and looks the same."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluate.report.charts import thinned

VALUES = st.floats(allow_infinity=False, width=32)


@given(st.lists(VALUES, max_size=300), st.sampled_from([2, 10, 50]))
def test_thinned_curve_keeps_its_lowest_highest_and_last_points(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    kept = list(thinned(points, most))
    assert len(kept) <= most + 1
    assert [step for step, _ in kept[-1:]] == [step for step, _ in points[-1:]]
    assert kept == sorted(set(kept), key=lambda point: point[0])
    assert all(any(point is each for each in points) for point in kept)
    known = [value for value in values if not math.isnan(value)]
    if known:
        shown = [value for _, value in kept if not math.isnan(value)]
        assert (min(shown), max(shown)) == (min(known), max(known))


def test_short_curve_is_drawn_whole() -> None:
    points = [(step, float(step)) for step in range(2000)]
    assert thinned(points, 2000) == points
    assert len(thinned([*points, (2000, 0.0)], 2000)) < 2001
