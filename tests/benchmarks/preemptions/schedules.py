"""Schedules of losses: up-times of machines in seconds, from a file or drawn from a seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Machines, one after the other.

    Attributes:
        name: shown in the table.
        up_times: seconds that each lives.
    """

    name: str
    up_times: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean up-time in seconds."""
        return sum(self.up_times) / len(self.up_times)


def exponential(mean: float, count: int, *, seed: int = 0) -> Schedule:
    """Losses that do not depend on the age of a machine. `mean` is in seconds."""
    drawn = np.random.default_rng(seed).exponential(mean, count)
    return Schedule(name=f"exponential, mean {_minutes(mean)}", up_times=tuple(map(float, drawn)))


def weibull(mean: float, count: int, *, shape: float = 0.7, seed: int = 0) -> Schedule:
    """Losses of which most come early (shape below 1). `mean` is in seconds."""
    drawn = np.random.default_rng(seed).weibull(shape, count) * mean / math.gamma(1 + 1 / shape)
    name = f"Weibull, shape {shape:g}, mean {_minutes(mean)}"
    return Schedule(name=name, up_times=tuple(map(float, drawn)))


def from_file(file: Path) -> Schedule:
    """Read up-times: a number of seconds in each line; `#` begins a comment.

    Raises:
        ValueError: a line is no positive number, or there is none.
    """
    found: list[float] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split("#", maxsplit=1)[0].strip()
        if words:
            found.append(_seconds(words, f"{file}, line {number}"))
    if not found:
        raise ValueError(f"{file} has no up-times; write a number of seconds in each line")
    return Schedule(name=file.stem, up_times=tuple(found))


def _seconds(words: str, where: str) -> float:
    try:
        value = float(words)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{where}: {words!r} is no up-time; write a positive number of seconds")
    return value


def scaled(schedule: Schedule, *, mean: float, least: float, most: float) -> Sequence[float]:
    """Up-times on a short scale, for real processes: of this mean before they are limited to [least, most]."""
    return [min(max(each * mean / schedule.mean, least), most) for each in schedule.up_times]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:g} min"
