"""Several hosts share one log: only the chief writes it, and broadcasts the numbers of its entries."""

from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.machine.hosts import Hosts
from tasks.foundation.runlog.log import RunLog


def broadcast_head(log: RunLog, head: Head | None, hosts: Hosts) -> Head | None:
    """Return the chief's head on every host. A collective: all hosts must call it in the same order.

    Args:
        log: the log of the run.
        head: the head to broadcast; ignored on hosts other than the chief.
        hosts: the hosts of the run.
    """
    number = hosts.broadcast_from_chief(-1 if head is None else head.number)
    if hosts.is_chief:
        return head
    return None if number < 0 else log.entry(number).head


def require_broadcast_head(log: RunLog, head: Head | None, hosts: Hosts) -> Head:
    """Return `broadcast_head` of a run that has started."""
    found = broadcast_head(log, head, hosts)
    if found is None:
        raise AssertionError("the chief must have started the run")
    return found
