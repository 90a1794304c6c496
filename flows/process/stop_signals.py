"""A command that is asked to go: SIGTERM becomes an exception, so that whatever holds a lock or a bar lets go of it.

SIGHUP is handled as SIGTERM is.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tasks.foundation.contracts.segment import STOP_REASONS
from tasks.foundation.errors import StoreUnreachable
from tasks.foundation.stops.hangup import sighup_as_sigterm, terminal_closed

RESUMABLE = 3  # the exit code of a run that stopped with work left to do


class Terminated(BaseException):
    """SIGTERM has arrived; a BaseException, so that nobody mistakes it for an error of the run."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within, the first SIGTERM raises `Terminated` in the main thread, where nothing nearer to the work heeds it.

    More of them change nothing: whoever heeds the first has work to do yet.
    """
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        with sighup_as_sigterm():
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Terminated


def sender_words() -> str:
    """What asked this command to go, after a `Terminated`."""
    return "the closed terminal (SIGHUP)" if terminal_closed() else "SIGTERM"


def unreachable_store(fault: BaseException) -> StoreUnreachable | None:
    """The error that says that the last work was not committed because the store was away; None if there is none."""
    known: BaseException | None = fault
    while known is not None and not isinstance(known, StoreUnreachable):
        known = known.__context__
    return known


def stop_reason(fault: BaseException) -> str:
    """Why a command was interrupted: what Prefect or Python made of it says less than what was raised first."""
    reason = "sigint" if isinstance(fault, KeyboardInterrupt) else "sigterm"
    known: BaseException | None = fault
    while known is not None:
        told = getattr(known, "reason", None)  # other exceptions have a reason too, of another kind
        reason = told if told in STOP_REASONS else reason
        known = known.__context__
    return reason
