"""Several hosts stop together: all of them obey a stop request of any of them, at the same step."""

from collections.abc import Sequence
from typing import get_args

from tasks.foundation.contracts.segment import StopReason
from tasks.foundation.hosts import Hosts
from tasks.foundation.stops.stops import Stops

_REASONS: tuple[StopReason, ...] = get_args(StopReason)
_NO_REASON = 0


def number_of(reason: StopReason | None) -> int:
    """A reason as a number that hosts can exchange; 0 for None."""
    return _NO_REASON if reason is None else 1 + _REASONS.index(reason)


def first_reason(numbers: Sequence[float]) -> StopReason | None:
    """The reason of the first host that has one."""
    return next((_REASONS[int(number) - 1] for number in numbers if number != _NO_REASON), None)


def agreed_stop(stops: Stops, hosts: Hosts) -> StopReason | None:
    """Why all hosts stop now; None if no host was asked to stop.

    This is a collective: all hosts call it in the same order.
    """
    stop = stops.requested
    return first_reason(hosts.gather_from_hosts([number_of(None if stop is None else stop.reason)])[:, 0].tolist())
