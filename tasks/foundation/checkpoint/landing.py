"""Wait for the save in flight, on all hosts together."""

from typing import Final

from tasks.foundation.checkpoint.committer import Committer
from tasks.foundation.errors import AcceleratorLost, BlowUp, NonFinite
from tasks.foundation.hosts import Hosts

_LANDED: Final = 0.0
_NOT_FINITE: Final = 1.0
_FAILED: Final = 2.0


def land(committer: Committer | None, hosts: Hosts) -> int | None:
    """Wait until everything in flight has landed. This is a collective: all hosts call it in the same order.

    Args:
        committer: of this process; only the chief's has saves in flight. None: saves are made in line.
        hosts: of the run.

    Returns:
        The number of the log entry of the newest save that has landed, on every host; None if none has.

    Raises:
        NonFinite: the state in flight has weights that are not finite; raised on every host.
        AcceleratorLost: on hosts other than the chief: a save of the chief failed.
        BatonError: on the chief: what failed.
    """
    if committer is None:
        return None
    fault: Exception | None = None
    number, step = -1, 0
    try:
        entry = committer.wait()
        number = -1 if entry is None else entry.number
    except Exception as error:  # noqa: BLE001 - raised below, once the other hosts know
        fault = error
        step = error.step if isinstance(error, BlowUp) else 0
    status = _LANDED if fault is None else _NOT_FINITE if isinstance(fault, BlowUp) else _FAILED
    status, newest, step = hosts.gather_from_hosts([status, number, step])[0].tolist()
    if fault is not None:
        raise fault
    if status == _NOT_FINITE:
        raise found_by_chief(int(step))
    if status == _FAILED:
        raise AcceleratorLost(
            "the chief could not commit a checkpoint; its log says why. Committed checkpoints are kept; run the same "
            "command again on all workers to continue"
        )
    return None if newest < 0 else int(newest)


def found_by_chief(step: int, *, where: str = "") -> NonFinite:
    """The error of the other hosts when the chief finds weights that are not finite.

    Args:
        step: of the state.
        where: added to the step, for example ", in segment 2".
    """
    return NonFinite(f"step {step}{where}: the chief found weights that are not finite", step=step)
