"""The hosts of a run: what each did, summed over the commits, and which of them is slow.

With synchronous training a collective in each step makes all hosts take the same time. So a slow host shows only in
what is its own: its wait for input, and the processor time that its threads need. The chief records both for intervals
of a few seconds (`HostSteps`). One pure function of them, `slow_hosts`, is behind the note on the console, `baton
status` and the report. Where the hosts only wait for each other, none is named.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from baton.tasks.foundation.contracts.log_entry import HostSteps, WorkerStats
from baton.tasks.foundation.log.history import History, commit_of

# An entry has no more of them: with 64 hosts they take about 80 kB.
MOST_INTERVALS: Final = 12


def summed_stats(history: History) -> tuple[WorkerStats, ...]:
    """Return the sums of each host over all commits since the number of hosts last changed, with all intervals."""
    total: tuple[WorkerStats, ...] = ()
    for entry in history.commits:
        total = added_stats(total, commit_of(entry).workers)
    return total


def added_stats(total: tuple[WorkerStats, ...], stats: tuple[WorkerStats, ...]) -> tuple[WorkerStats, ...]:
    """Return sums with the statistics of one more commit; those alone if the hosts are others."""
    if not stats:
        return total
    if _hosts(total) != _hosts(stats):
        return stats
    return tuple(_sum(before, newest) for before, newest in zip(total, stats, strict=True))


def with_newest_intervals(stats: tuple[WorkerStats, ...]) -> tuple[WorkerStats, ...]:
    """Return statistics with as many of the newest intervals as an entry has."""
    return tuple(
        each.model_copy(update={"intervals": each.intervals[-MOST_INTERVALS:]}) if each.intervals else each
        for each in stats
    )


def _hosts(stats: tuple[WorkerStats, ...]) -> list[tuple[int, int]]:
    return [(each.host, each.replicas) for each in stats]


def _sum(before: WorkerStats, newest: WorkerStats) -> WorkerStats:
    return newest.model_copy(
        update={
            "steps": before.steps + newest.steps,
            "examples": before.examples + newest.examples,
            "train_seconds": before.train_seconds + newest.train_seconds,
            "input_wait_seconds": before.input_wait_seconds + newest.input_wait_seconds,
            "intervals": before.intervals + newest.intervals,
        }
    )


def _costs(stats: Sequence[WorkerStats]) -> list[tuple[HostSteps, ...]]:
    """What each interval cost each host, for the intervals that all hosts have."""
    count = min((len(each.intervals) for each in stats), default=0)
    return list(zip(*(each.intervals[len(each.intervals) - count :] for each in stats), strict=True))


Cause = Literal["input wait", "processor time"]
# A host that needs this many times what the others need is slow.
_SLOW_FACTOR: Final = 1.5
# It is named if it was slow in this many of the newest intervals: one that stands out names nobody.
_NEWEST, _SLOW_OF_NEWEST = 5, 4
# Processor time beyond that of the others counts if it is at least this share of a step.
_LEAST_EXCESS: Final = 0.2
_LARGEST_FACTOR: Final = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowHost:
    """A host for which the others wait.

    Attributes:
        host: its number, from 0.
        factor: how many times the median of the others it needs, the median of the newest intervals.
        cause: what it needs more of.
        since_step: the step after which it was slow.
    """

    host: int
    factor: float
    cause: Cause
    since_step: int

    @property
    def words(self) -> str:
        """One line for people."""
        return (
            f"host {self.host} needs {self.factor:.1f} times the median of the others ({self.cause}), "
            f"since step {self.since_step:,}"
        )


def slow_hosts(stats: Sequence[WorkerStats]) -> tuple[SlowHost, ...]:
    """Return the hosts that were slow in the newest intervals, in order; a pure function of the statistics.

    A host waits for input `x` seconds of a step of `s` seconds longer than the median of the others: without that it
    would need `s - x`, so its factor is `s / (s - x)`. Processor times are divided by the median of the others'.
    """
    costs = _costs(stats)
    factors: dict[tuple[int, Cause], list[float]] = {}
    for interval in costs:
        for place, _ in enumerate(interval):
            for cause, factor in _factors(interval, place):
                factors.setdefault((place, cause), []).append(factor)
    found: dict[int, SlowHost] = {}
    for (place, cause), of_intervals in factors.items():
        first = _first_slow(of_intervals)
        if first is None:
            continue
        factor = statistics.median(of_intervals[-_NEWEST:])
        if place not in found or factor > found[place].factor:
            began = costs[first][place]
            since = max(began.step - began.steps, 0)
            found[place] = SlowHost(host=stats[place].host, factor=factor, cause=cause, since_step=since)
    return tuple(sorted(found.values(), key=lambda each: each.host))


def _factors(interval: Sequence[HostSteps], place: int) -> Iterator[tuple[Cause, float]]:
    """How many times the median of the others the host at `place` needs, by cause; 1 if that matters little."""
    mine, others = interval[place], [each for index, each in enumerate(interval) if index != place]
    if not others:
        return
    step = mine.step_seconds
    excess = min(mine.input_wait_seconds, step) - statistics.median(each.input_wait_seconds for each in others)
    yield "input wait", step / max(step - excess, step / _LARGEST_FACTOR) if excess > 0 else 1.0
    known = [each.processor_seconds for each in others if each.processor_seconds is not None]
    factor = 1.0
    if mine.processor_seconds is not None and len(known) == len(others):
        usual = statistics.median(known)
        if mine.processor_seconds - usual >= _LEAST_EXCESS * step:
            factor = mine.processor_seconds / max(usual, mine.processor_seconds / _LARGEST_FACTOR)
    yield "processor time", factor


def _first_slow(factors: Sequence[float]) -> int | None:
    """The interval since which a host is slow; None if it is not slow now."""
    slow = [factor >= _SLOW_FACTOR for factor in factors]
    begin = len(slow) - _NEWEST
    if begin < 0 or sum(slow[begin:]) < _SLOW_OF_NEWEST:
        return None
    while begin > 0 and sum(slow[begin - 1 : begin - 1 + _NEWEST]) >= _SLOW_OF_NEWEST:
        begin -= 1
    return begin + slow[begin:].index(True)
