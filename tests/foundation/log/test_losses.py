"""Attempts that lost work are counted, and the time of all that trained."""

from datetime import timedelta
from typing import Any

import pytest

from baton.tasks.foundation.log.attempts import PRIOR_SECONDS, Losses, losses_of
from tests.support.clock import NOON
from tests.support.ledger_records import record_of

LATER = NOON + timedelta(hours=1)


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({}, 1),  # killed
        ({"ended": "preempted", "uncommitted_seconds": 0.0}, 0),
        ({"ended": "preempted"}, 1),
        ({"ended": "OutOfMemory"}, 1),
        ({"ended": "complete"}, 0),
        ({"ended": "sigint"}, 0),
        ({"alive": LATER.isoformat()}, 0),  # at work
    ],
)
def test_what_counts_as_a_loss(changes: dict[str, Any], lost: int) -> None:
    found = losses_of([record_of("a", **changes)], now=LATER)
    assert found == Losses(count=lost, seconds=60.0)


def test_an_attempt_that_never_trained_says_nothing() -> None:
    refused = record_of("a", seconds={"start-up": 10.0}, uncommitted_seconds=0.0)
    assert losses_of([refused], now=LATER) == Losses(count=0, seconds=0.0)


def test_the_mean_begins_with_a_prior() -> None:
    assert Losses(count=0, seconds=0.0).mean_seconds == PRIOR_SECONDS
    assert Losses(count=0, seconds=1e6).mean_seconds == 1e6 + PRIOR_SECONDS
    assert Losses(count=10**6, seconds=3600.0 * 10**6).mean_seconds == pytest.approx(3600, rel=0.01)
