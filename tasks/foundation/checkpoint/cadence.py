"""How often to commit within a segment, with `checkpoint.every_seconds: auto`.

Commits cost time, and so does the work that a loss of the process throws away. The interval that minimizes their sum is
sqrt(2 C M), with the cost C of a commit and the mean time M between losses (Young 1974, "A first order approximation to
the optimum checkpoint interval"). It changes no bits: commits read the state and nothing else.
"""

import math
import os
import time
from collections.abc import Callable
from typing import Final

from baton.tasks.foundation.contracts.run_spec import CheckpointSpec
from baton.tasks.foundation.log.attempts import Losses

# However small the state is, a commit also costs a log entry, requests, retention, and files to keep. With the losses
# that a run begins with, one in four hours, it makes the shortest interval a minute.
LEAST_COST_SECONDS: Final = 0.125
# Until a commit has been measured. Copying, digest and writing take about 1 s of a processor for each GB.
_PRIOR_SECONDS_PER_BYTE: Final = 2e-9


def young_interval(cost_seconds: float, between_seconds: float, *, max_overhead: float) -> float:
    """The best time between two commits, in seconds, and never so short that commits cost more than allowed.

    Args:
        cost_seconds: what a commit takes from the training; at least 0, and counted as `LEAST_COST_SECONDS` if less.
        between_seconds: mean time between losses; more than 0.
        max_overhead: the largest share of the time that commits may cost, in (0, 1].
    """
    cost = max(cost_seconds, LEAST_COST_SECONDS)
    return max(math.sqrt(2 * cost * between_seconds), cost / max_overhead)


class CommitCadence:
    """The interval of one process, which follows what its commits cost and how often the run's attempts were lost.

    The training thread and the thread that saves both report to it.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        *,
        state_bytes: int,
        processors: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with an estimate.

        Args:
            state_bytes: size of the train state.
            processors: that share the work; None for those of this process.
            clock: monotonic time in seconds.
        """
        self._spec = spec
        self._processors = processors or len(os.sched_getaffinity(0))
        self._stall_seconds: float | None = None
        self._processor_seconds = 0.0
        self._prior_seconds = state_bytes * _PRIOR_SECONDS_PER_BYTE
        self._clock = clock
        self._losses: Losses | None = None
        self._learned_at = clock()

    @property
    def losses(self) -> Losses | None:
        """What the records of earlier attempts said; None: not read yet."""
        return self._losses

    @losses.setter
    def losses(self, losses: Losses) -> None:
        self._losses, self._learned_at = losses, self._clock()

    @property
    def is_auto(self) -> bool:
        """Whether the interval adapts."""
        return self._spec.every_seconds == "auto"

    @property
    def interval_seconds(self) -> float:
        """Seconds between two commits within a segment; infinite if there are none."""
        every = self._spec.every_seconds
        if every is None:
            return math.inf
        if every != "auto":
            return every
        return young_interval(self.cost_seconds, self.between_seconds, max_overhead=self._spec.max_overhead)

    @property
    def cost_seconds(self) -> float:
        """What a commit takes from the training: the wait, and the share of the processors."""
        if self._stall_seconds is None:
            return self._prior_seconds
        return self._stall_seconds + self._processor_seconds / self._processors

    @property
    def between_seconds(self) -> float:
        """Mean time between losses. It grows while this process lives."""
        known = self._losses or Losses(count=0, seconds=0.0)
        lived = max(self._clock() - self._learned_at, 0.0)
        return Losses(count=known.count, seconds=known.seconds + lived).mean_seconds

    def stalled(self, seconds: float) -> None:
        """Report how long the training waited for a commit."""
        self._stall_seconds = _smoothed(self._stall_seconds, seconds)

    def processed(self, seconds: float) -> None:
        """Report how much of a processor an async save took."""
        self._processor_seconds = _smoothed(self._processor_seconds or None, seconds)


def _smoothed(before: float | None, now: float) -> float:
    # One slow commit, such as the first one, does not decide alone.
    return now if before is None else (before + now) / 2
