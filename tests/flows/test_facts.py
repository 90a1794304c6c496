"""The state and the speed of a run."""

import pytest

from flows.facts import pace_of, state_of
from tests.support.ledger_records import record_of


@pytest.mark.parametrize(
    ("at_work", "ended_early", "step", "target", "state"),
    [
        (True, False, 100, 100, "at work"),
        (False, True, 50, 100, "ended early"),
        (False, False, 100, 100, "complete"),
        (False, False, 99, 100, "incomplete"),
        (False, False, 99, None, "unknown"),
    ],
)
def test_state_of_a_run(at_work: bool, ended_early: bool, step: int, target: int | None, state: str) -> None:
    assert state_of(at_work=at_work, ended_early=ended_early, step=step, target=target) == state


def test_pace_is_that_of_this_process() -> None:
    record = record_of("a" * 32, from_step=100, step=300, seconds={"train": 50.0, "compile": 20.0})
    assert pace_of(record, 1000) == (4.0, 175.0)
    assert pace_of(record, 200) == (4.0, 0.0)
    assert pace_of(record, None) == (4.0, None)


@pytest.mark.parametrize("changes", [{"step": 100}, {"seconds": {"compile": 20.0}}])
def test_pace_is_unknown_before_the_first_steps(changes: dict[str, object]) -> None:
    record = record_of("a" * 32, **{"from_step": 100, "step": 300, "seconds": {"train": 50.0}, **changes})
    assert pace_of(record, 1000) == (None, None)
