"""Chaos on gs://: a hundred seeded plans without TensorFlow. `make chaos` runs more."""

from collections import Counter

import pytest

from tests.end_to_end.cloud_chaos import RATES, play_all


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 10), *(pytest.param(first, 25, marks=pytest.mark.nightly) for first in (0, 25, 50, 75))],
)
def test_nothing_is_lost_doubled_or_wrong(first: int, count: int) -> None:
    lines: list[str] = []
    outcomes = play_all(range(first, first + count), lines.append)
    assert len(outcomes) == count
    assert not lines, "\n".join(lines)
    faults = sum((outcome.faults for outcome in outcomes), Counter[str]())
    assert faults.keys() == RATES.keys(), "a kind of fault never happened"
    ends = sum((outcome.ends for outcome in outcomes), Counter[str]())
    assert ends["Died"] > 0.6 * count
    assert ends["StaleWriter"] > 0.4 * count
    assert sum(outcome.in_flight for outcome in outcomes) > 0.2 * count
