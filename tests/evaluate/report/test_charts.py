"""A long curve is thinned before it is drawn, and looks the same."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.evaluate.report.charts import decades, thinned

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


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (0.2, 9.0, [0.2, 0.5, 1, 2, 5]),  # one power of ten is between them
        (0.5, 20.0, [0.5, 1, 2, 5, 10, 20]),
        (1e-4, 1.0, [1e-4, 1e-3, 1e-2, 0.1, 1]),
        (1e-30, 1.0, [1e-30, 1e-26, 1e-22, 1e-18, 1e-14, 1e-10, 1e-6, 1e-2]),
    ],
)
def test_logarithmic_axes_have_several_ticks(low: float, high: float, values: list[float]) -> None:
    assert decades(math.log10(low), math.log10(high)) == pytest.approx(values)
