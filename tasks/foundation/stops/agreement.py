"""Several hosts stop together: what one of them was asked for, all of them heed, at the same step."""

from collections.abc import Sequence
from typing import Protocol, get_args

import numpy as np
import numpy.typing as npt

from tasks.foundation.contracts.segment import StopReason
from tasks.foundation.stops.stops import Stops

_REASONS: tuple[StopReason, ...] = get_args(StopReason)
_NOTHING = 0


class Together(Protocol):
    """The part of an accelerator by which its hosts tell each other something."""

    def of_all_hosts(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        """What every host says, float64 [hosts, len(numbers)]."""


def number_of(reason: StopReason | None) -> int:
    """A reason as a number that hosts can exchange."""
    return _NOTHING if reason is None else 1 + _REASONS.index(reason)


def first_reason(numbers: Sequence[float]) -> StopReason | None:
    """The reason of the first host that has one."""
    return next((_REASONS[int(number) - 1] for number in numbers if number != _NOTHING), None)


def agreed_stop(stops: Stops, hosts: Together) -> StopReason | None:
    """Why all hosts stop now, if any of them was asked to. Each of them calls it, in the same order."""
    asked = stops.asked
    return first_reason(hosts.of_all_hosts([number_of(None if asked is None else asked.reason)])[:, 0].tolist())
