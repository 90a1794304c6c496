"""What several hosts agree on before an inner loop, and what each of them did; hosts are played by numbers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tasks.foundation.stops.agreement import agreed_stop, first_reason, number_of
from tasks.foundation.telemetry.events import Silent
from tasks.train_segment.host_stats import HostStats, InnerLoop
from tasks.train_segment.loop_decision import LoopDecision


class Others:
    """What the other hosts say; this one is `host`."""

    def __init__(self, host: int, *others: list[float]) -> None:
        self._host, self._others = host, list(others)

    def of_all_hosts(self, numbers: Sequence[float]) -> Any:
        said = list(self._others)
        said.insert(self._host, list(numbers))
        return np.array(said, np.float64)


def turn(**changes: Any) -> LoopDecision:
    usual: dict[str, Any] = {
        "stop": None,
        "grace_left": math.inf,
        "segment_is_over": False,
        "commit_is_due": False,
        "steps": 7,
    }
    return LoopDecision(**{**usual, **changes})


def numbers(of: LoopDecision) -> list[float]:
    """As the turn's host would say them."""
    said: list[list[float]] = []

    class Listener:
        def of_all_hosts(self, mine: Sequence[float]) -> Any:
            said.append(list(mine))
            return np.array([mine], np.float64)

    of.agreed(Listener())
    return said[0]


def test_one_host_agrees_with_itself() -> None:
    mine = turn(stop="preempted", grace_left=3.5, commit_is_due=True)
    assert mine.agreed(Others(0)) == mine


def test_the_chief_says_how_many_steps_and_when_to_commit() -> None:
    chief = turn(steps=5, commit_is_due=True, segment_is_over=True)
    assert turn(steps=9).agreed(Others(1, numbers(chief))) == chief
    assert chief.agreed(Others(0, numbers(turn(steps=9)))) == chief


@pytest.mark.parametrize("host", [0, 1, 2])
def test_a_stop_of_any_host_is_everybodys(host: int) -> None:
    hosts = [turn(), turn(stop="sigterm", grace_left=20.0), turn(stop="maintenance", grace_left=8.0)]
    mine = hosts.pop(host)
    agreed = mine.agreed(Others(host, *map(numbers, hosts)))
    assert (agreed.stop, agreed.grace_left) == ("sigterm", 8.0)


def test_reasons_survive_being_numbers() -> None:
    assert first_reason([number_of(None), number_of("time_budget"), number_of("sigint")]) == "time_budget"
    assert first_reason([number_of(None)]) is None


def test_a_stop_that_only_another_host_heard() -> None:
    class Nothing:
        asked = None

    assert agreed_stop(Nothing(), Others(0, [number_of("sigterm")])) == "sigterm"  # type: ignore[arg-type]


def test_effort_is_told_host_by_host() -> None:
    effort = HostStats()
    loop = InnerLoop(steps=4, input_wait_seconds=0.5, losses=(0.25,))
    effort.add(loop, 2.0)
    effort.add(InnerLoop(steps=2, input_wait_seconds=9.0, losses=(0.125,)), 1.0)

    class Accelerator(Others):
        hosts, replicas = 2, 2

    stats = effort.of_all_hosts(Accelerator(0, [6, 4.0, 0.0, 0.5]), 32, telemetry=Silent())  # type: ignore[arg-type]
    mine, other = stats
    assert (mine.host, mine.steps, mine.examples, mine.train_seconds) == (0, 6, 96, 3.0)
    assert mine.input_wait_seconds == 1.5  # never more than the loop took
    assert mine.losses == (0.125,)
    assert (other.host, other.train_seconds, other.losses) == (1, 4.0, (0.5,))
    assert HostStats().of_all_hosts(Accelerator(0), 32, telemetry=Silent()) == ()  # type: ignore[arg-type]
