"""Decisions of several hosts before an inner loop, and statistics by host. Fake hosts exchange numbers."""

import itertools
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.log_entry import HostSteps
from baton.tasks.foundation.machine.stops import agreed_stop, first_reason, number_of
from baton.tasks.foundation.telemetry.events import Silent
from baton.tasks.train_segment.host_stats import HostPace, HostStats, InnerLoop, ProcessorTime
from baton.tasks.train_segment.loop import LoopDecision
from tests.support.event_recorder import EventRecorder


class Others:
    """Several hosts with given numbers; this process is number `host`."""

    def __init__(self, host: int, *others: list[float]) -> None:
        self._host, self._others = host, list(others)

    def gather_from_hosts(self, numbers: Sequence[float]) -> Any:
        exchanged = list(self._others)
        exchanged.insert(self._host, list(numbers))
        return np.array(exchanged, np.float64)


def decision(**changes: Any) -> LoopDecision:
    usual: dict[str, Any] = {
        "stop": None,
        "grace_left": math.inf,
        "segment_is_over": False,
        "commit_is_due": False,
        "steps": 7,
    }
    return LoopDecision(**{**usual, **changes})


def numbers(of: LoopDecision) -> list[float]:
    """The numbers that the host of a decision exchanges."""
    exchanged: list[list[float]] = []

    class Listener:
        def gather_from_hosts(self, mine: Sequence[float]) -> Any:
            exchanged.append(list(mine))
            return np.array([mine], np.float64)

    of.agreed(Listener())
    return exchanged[0]


def test_one_host_agrees_with_itself() -> None:
    mine = decision(stop="preempted", grace_left=3.5, commit_is_due=True)
    assert mine.agreed(Others(0)) == mine


def test_chief_decides_steps_and_commits() -> None:
    chief = decision(steps=5, commit_is_due=True, segment_is_over=True)
    assert decision(steps=9).agreed(Others(1, numbers(chief))) == chief
    assert chief.agreed(Others(0, numbers(decision(steps=9)))) == chief


@pytest.mark.parametrize("host", [0, 1, 2])
def test_stop_of_any_host_stops_all(host: int) -> None:
    hosts = [decision(), decision(stop="sigterm", grace_left=20.0), decision(stop="maintenance", grace_left=8.0)]
    mine = hosts.pop(host)
    agreed = mine.agreed(Others(host, *map(numbers, hosts)))
    assert (agreed.stop, agreed.grace_left) == ("sigterm", 8.0)


def test_reasons_are_exchanged_as_numbers() -> None:
    assert first_reason([number_of(None), number_of("time_budget"), number_of("sigint")]) == "time_budget"
    assert first_reason([number_of(None)]) is None


def test_all_hosts_obey_a_stop_of_another_host() -> None:
    class NoStop:
        requested = None

    assert agreed_stop(NoStop(), Others(0, [number_of("sigterm")])) == "sigterm"  # type: ignore[arg-type]


def test_statistics_are_listed_by_host() -> None:
    host_stats = HostStats()
    loop = InnerLoop(steps=4, input_wait_seconds=0.5, losses=(0.25,))
    host_stats.add(loop, 2.0)
    host_stats.add(InnerLoop(steps=2, input_wait_seconds=9.0, losses=(0.125,)), 1.0)

    class Accelerator(Others):
        hosts, replicas = 2, 2

    stats = host_stats.gather_from_hosts(Accelerator(0, [6, 4.0, 0.0, 0.5]), 32, telemetry=Silent())  # type: ignore[arg-type]
    mine, other = stats
    assert (mine.host, mine.steps, mine.examples, mine.train_seconds) == (0, 6, 96, 3.0)
    assert mine.input_wait_seconds == 1.5  # at most the duration of the loop
    assert mine.losses == (0.125,)
    assert (other.host, other.train_seconds, other.losses) == (1, 4.0, (0.5,))
    assert HostStats().gather_from_hosts(Accelerator(0), 32, telemetry=Silent()) == ()  # type: ignore[arg-type]


def test_numbers_of_pace_ride_along_with_the_decision() -> None:
    mine = decision(pace=(0.25, 0.125, 0.5))
    other = decision(pace=(0.25, 0.0, math.nan))
    agreed = mine.agreed(Others(0, numbers(other)))
    assert agreed.pace[:5] == (0.25, 0.125, 0.5, 0.25, 0.0)
    assert math.isnan(agreed.pace[5])


class Two:
    """Two hosts."""

    hosts, is_chief = 2, True


def paces(hosts: int, telemetry: EventRecorder, *, waits: float, intervals: int) -> list[HostSteps]:
    """What the chief keeps of the other host, which waits for input `waits` of each second, a step."""
    seconds = itertools.count()
    accelerator = Two()
    accelerator.hosts = hosts
    pace = HostPace(accelerator, clock=lambda: float(next(seconds)))  # type: ignore[arg-type]
    kept = []
    pace.enter()
    step = 0
    while len(kept) < intervals and step < 1000:
        mine = pace.numbers()
        kept += [each[1] for each in [pace.gathered((*mine, 1.0, waits, math.nan), step, telemetry)] if each]
        step += 1
        pace.add(InnerLoop(steps=1, input_wait_seconds=0.0, losses=()))
    pace.leave()
    return kept


def test_a_slow_host_is_reported_once() -> None:
    telemetry = EventRecorder()
    kept = paces(2, telemetry, waits=0.75, intervals=9)
    assert [each.input_wait_seconds for each in kept] == [0.75] * 9
    (text,) = telemetry.warnings
    assert re.fullmatch(r"host 1 needs \d+\.\d times the median of the others \(input wait\), since step \d", text)


def test_equal_hosts_and_one_host_are_not_reported() -> None:
    telemetry = EventRecorder()
    assert len(paces(2, telemetry, waits=0.0, intervals=9)) == 9
    assert paces(1, telemetry, waits=0.75, intervals=9) == []
    assert not telemetry.notes


def test_processor_time_counts_what_this_process_did() -> None:
    processor = ProcessorTime()
    processor.begin()
    used = time.process_time()
    while time.process_time() < used + 0.2:
        pass
    first = processor.lap()
    assert first is not None
    assert first >= 0.19
    processor.end()
