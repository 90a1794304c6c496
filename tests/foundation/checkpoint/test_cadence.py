"""The interval between commits follows their cost and the losses, and never costs more than allowed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tasks.foundation.checkpoint.cadence import LEAST_COST_SECONDS, CommitCadence, young_interval
from baton.tasks.foundation.contracts.run_spec import CheckpointSpec
from baton.tasks.foundation.log.attempts import PRIOR_SECONDS, Losses
from tests.support.clock import FakeClock

COSTS = st.floats(0, 1e4)
BETWEEN = st.floats(1, 1e8)
SHARES = st.floats(1e-4, 1)
GB = 10**9


def cadence_of(clock: FakeClock | None = None, state_bytes: int = GB, **spec: object) -> CommitCadence:
    return CommitCadence(
        CheckpointSpec.model_validate(spec), state_bytes=state_bytes, processors=4, clock=clock or FakeClock()
    )


@given(COSTS, BETWEEN, SHARES)
def test_commits_never_cost_more_than_allowed(cost: float, between: float, share: float) -> None:
    interval = young_interval(cost, between, max_overhead=share)
    assert max(cost, LEAST_COST_SECONDS) / interval <= share * (1 + 1e-9)


@given(st.floats(0.2, 1e3), st.floats(1e4, 1e8), st.floats(0.5, 2))
def test_no_other_interval_is_cheaper(cost: float, between: float, factor: float) -> None:
    def wasted(interval: float) -> float:
        return cost / interval + interval / (2 * between)

    best = young_interval(cost, between, max_overhead=1)
    assert wasted(best) <= wasted(best * factor) * (1 + 1e-9)


@given(COSTS, COSTS, BETWEEN, BETWEEN, SHARES)
def test_dearer_commits_and_rarer_losses_make_it_longer(
    cost: float, other_cost: float, between: float, other_between: float, share: float
) -> None:
    low, high = sorted([cost, other_cost])
    short, long = sorted([between, other_between])
    assert young_interval(low, short, max_overhead=share) <= young_interval(high, long, max_overhead=share)


def test_numbers_and_null_keep_their_meaning() -> None:
    assert cadence_of(every_seconds=7.0).interval_seconds == 7.0
    assert cadence_of(every_seconds=None).interval_seconds == math.inf
    assert not cadence_of(every_seconds=7.0).is_auto
    assert cadence_of().is_auto


def test_a_short_run_sees_no_commit_more() -> None:
    small, large = cadence_of(state_bytes=1000), cadence_of(state_bytes=100 * GB)
    assert small.interval_seconds == 60
    assert large.interval_seconds > 2000


def test_the_cost_is_the_wait_and_the_share_of_processors() -> None:
    cadence = cadence_of()
    prior = cadence.cost_seconds
    assert prior > 0
    cadence.processed(8.0)
    assert cadence.cost_seconds == prior, "the wait is not known yet"
    cadence.stalled(0.5)
    assert cadence.cost_seconds == 0.5 + 8.0 / 4
    cadence.stalled(0.1)
    cadence.processed(4.0)
    assert cadence.cost_seconds == pytest.approx(0.3 + 6.0 / 4)
    expected = young_interval(cadence.cost_seconds, PRIOR_SECONDS, max_overhead=0.02)
    assert cadence.interval_seconds == expected


def test_losses_shorten_it_and_time_without_any_lengthens_it() -> None:
    clock = FakeClock()
    cadence = cadence_of(clock)
    cadence.stalled(1.0)
    at_first = cadence.interval_seconds
    cadence.losses = Losses(count=9, seconds=3600.0)
    assert cadence.between_seconds == (3600 + PRIOR_SECONDS) / 10
    often = cadence.interval_seconds
    assert often < at_first
    clock.advance(24 * 3600)
    assert often < cadence.interval_seconds
    assert cadence.between_seconds == (25 * 3600 + PRIOR_SECONDS) / 10


def test_a_small_state_is_committed_more_often_where_machines_are_lost_often() -> None:
    assert young_interval(0.001, 20 * 60, max_overhead=0.02) == pytest.approx(math.sqrt(2 * LEAST_COST_SECONDS * 1200))
    assert young_interval(0.001, 20, max_overhead=0.02) == LEAST_COST_SECONDS / 0.02


def test_the_largest_share_is_of_the_run_file() -> None:
    dear = {"between": 1.0}
    for share in (0.5, 0.001):
        cadence = cadence_of(max_overhead=share)
        cadence.stalled(10.0)
        cadence.losses = Losses(count=10**6, seconds=dear["between"])
        assert cadence.interval_seconds == 10.0 / share
