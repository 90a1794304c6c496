"""What a run is doing, and how fast: from its log, its run file and the record of the process at work."""

from dataclasses import dataclass
from typing import Literal

from tasks.foundation.contracts.attempt import AttemptRecord
from tasks.foundation.runlog.accounting import GOOD

State = Literal["at work", "complete", "ended early", "incomplete", "unknown"]


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a process.

    Attributes:
        steps_per_second: while it trains; None before its first steps.
        seconds_left: until the target, at this speed, without starts and commits; None if either is not known.
    """

    steps_per_second: float | None
    seconds_left: float | None


def state_of(*, at_work: bool, ended_early: bool, step: int, target: int | None) -> State:
    """The state of a run.

    Args:
        at_work: whether a process trains it.
        ended_early: whether its callbacks ended it.
        step: of its tip.
        target: the step to train to; None if it is not known.
    """
    if at_work:
        return "at work"
    if ended_early:
        return "ended early"
    if target is None:
        return "unknown"
    return "complete" if step >= target else "incomplete"


def pace_of(record: AttemptRecord, target: int | None) -> Pace:
    """The speed of a process since it began to train."""
    trained, seconds = record.step - record.from_step, record.seconds.get(GOOD, 0.0)
    if trained <= 0 or seconds <= 0:
        return Pace(None, None)
    speed = trained / seconds
    return Pace(speed, None if target is None else max(target - record.step, 0) / speed)
