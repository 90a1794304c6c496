"""A curve as one line of text."""

import math

from hypothesis import given
from hypothesis import strategies as st

from flows.commands.compare import sparkline

CURVES = st.lists(st.tuples(st.integers(0, 1000), st.floats(width=32)), max_size=50)


@given(CURVES, st.integers(1, 80))
def test_any_curve_fits(curve: list[tuple[int, float]], columns: int) -> None:
    drawn = sparkline(curve, columns=columns, last=1000, values=[value for _, value in curve])
    assert len(drawn) <= columns
    assert set(drawn) <= set(" ▁▂▃▄▅▆▇█")


def test_heights_follow_the_values() -> None:
    curve = [(step, float(step)) for step in range(8)]
    assert sparkline(curve, columns=8, last=8, values=[value for _, value in curve]) == "▁▂▃▄▅▆▇█"


def test_curves_are_drawn_against_each_other() -> None:
    values = [0.0, 8.0]
    assert sparkline([(1, 0.0), (5, 8.0)], columns=2, last=8, values=values) == "▁█"
    assert sparkline([(5, 4.5)], columns=2, last=8, values=values) == " ▅"


def test_values_far_apart_are_logarithmic() -> None:
    curve = [(0, 1e-4), (1, 1e-2), (2, 1.0)]
    assert sparkline(curve, columns=3, last=3, values=[value for _, value in curve]) == "▁▅█"


def test_curve_without_finite_values_is_empty() -> None:
    assert sparkline([(1, math.nan), (2, math.inf)], columns=4, last=4, values=[math.nan, math.inf]) == ""
