"""What a schedule of losses leaves of the time: a pure function of up-times and measured costs.

Each life of a machine is a start, training, commits, and the loss. What no commit holds by then is lost. Training that
waits for a commit and training that is slower beside one are the same here: the seconds that a commit costs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

# Given the number of lost machines and the seconds so far, the seconds of training between two commits.
Interval = Callable[[int, float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What an arm costs, in seconds.

    Attributes:
        start: from the start of the process to its first step: imports, restore, compile.
        commit: what one commit takes from the training.
        durable: from the begin of a commit until it survives a loss, at least `commit`.
        speed: steps per second over the fastest arm's, while nothing is committed.
        saves_on_notice: whether a notice makes it commit and end.
    """

    start: float
    commit: float
    durable: float
    speed: float = 1.0
    saves_on_notice: bool = False

    def __post_init__(self) -> None:
        if min(self.start, self.commit, self.durable) < 0 or self.durable < self.commit or not 0 < self.speed <= 1:
            raise ValueError(f"{self}: seconds are at least 0, durable is at least commit, and speed is in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Where the time of all machines went. The causes and what is `left` add up to the sum of the up-times.

    Attributes:
        kept: training that a commit holds.
        lost: training that was lost with a machine.
        start: starts.
        commit: waiting for commits.
        left: what was left of a notice after the last commit. The process has ended, and the next machine trains.
    """

    kept: float = 0.0
    lost: float = 0.0
    start: float = 0.0
    commit: float = 0.0
    left: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    @property
    def total(self) -> float:
        """All of it: from the start of each process to its end."""
        return self.kept + self.lost + self.start + self.commit


def replay(up_times: Sequence[float], costs: Costs, interval: Interval, *, notice: float = 0.0) -> Seconds:
    """Train on one machine after the other.

    Args:
        up_times: seconds that each machine lives.
        costs: of the arm.
        interval: seconds of training between two commits.
        notice: seconds before each loss at which it is announced; 0: it is not.
    """
    found, lived = Seconds(), 0.0
    for number, up_time in enumerate(up_times):
        found += _life(up_time, costs, interval(number, lived), notice if costs.saves_on_notice else 0.0)
        lived += up_time
    return found


def oracle(up_times: Sequence[float], costs: Costs) -> Seconds:
    """Train with one commit on each machine, which survives at the very moment of the loss."""
    found = Seconds()
    for up_time in up_times:
        kept = max(up_time - costs.start - costs.durable, 0.0)
        start = min(up_time, costs.start)
        found += Seconds(kept=kept, start=start, commit=up_time - start - kept)
    return found


def fastest_costs(arms: Sequence[Costs]) -> Costs:
    """The costs of the oracle: of each kind the lowest of all arms."""
    return Costs(
        start=min(each.start for each in arms),
        commit=min(each.commit for each in arms),
        durable=min(each.durable for each in arms),
    )


def goodput(seconds: Seconds, costs: Costs) -> float:
    """The share of the time that was kept, as steps of the fastest arm."""
    return seconds.kept * costs.speed / seconds.total if seconds.total else 0.0


def _life(up_time: float, costs: Costs, interval: float, notice: float) -> Seconds:
    """One machine: commits are made one after the other, and each holds what was trained before it."""
    if up_time <= costs.start:
        return Seconds(start=up_time)
    stop = max(up_time - notice, costs.start)
    at, trained, waited, kept, in_flight, durable_at = costs.start, 0.0, 0.0, 0.0, 0.0, -math.inf
    while at + interval < stop:
        at, trained = at + interval, trained + interval
        begin = max(at, durable_at)  # one commit in flight at a time
        if begin >= stop:
            waited, at = waited + stop - at, stop
            break
        kept = in_flight
        end = min(begin + costs.commit, stop)
        waited += end - at
        at, in_flight, durable_at = end, trained, begin + costs.durable
        if end == stop:
            break
    trained += stop - at
    last = max(stop, durable_at) + costs.durable if notice else math.inf
    if last <= up_time:
        return Seconds(kept=trained, start=costs.start, commit=waited + last - stop, left=up_time - last)
    if durable_at <= up_time:
        kept = in_flight
    # If a notice is too short for a commit, the process waits until the machine is lost.
    return Seconds(kept=kept, lost=trained - kept, start=costs.start, commit=waited + up_time - stop)
