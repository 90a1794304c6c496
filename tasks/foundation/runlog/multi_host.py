"""Several hosts, one log: the chief writes it, and the others follow by the numbers of its entries."""

from typing import Protocol

from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.runlog.log import RunLog


class Hosts(Protocol):
    """The part of an accelerator that says who writes, and what the chief says."""

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the log."""

    def of_chief(self, number: int) -> int:
        """The chief's number, on every host; it waits for the chief."""


def head_of_chief(log: RunLog, head: Head | None, hosts: Hosts) -> Head | None:
    """The chief's head, on every host: what is written stays. A collective, so all hosts call it in the same order.

    Args:
        log: the run's.
        head: on the chief, what all are to have; elsewhere not looked at.
        hosts: of the run.
    """
    number = hosts.of_chief(-1 if head is None else head.number)
    if hosts.is_chief:
        return head
    return None if number < 0 else log.entry(number).head


def require_head_of_chief(log: RunLog, head: Head | None, hosts: Hosts) -> Head:
    """`head_of_chief`, where the run is known to have begun."""
    found = head_of_chief(log, head, hosts)
    if found is None:
        raise AssertionError("the chief has begun the run by now")
    return found
