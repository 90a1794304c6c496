"""A command that is asked to go: SIGTERM becomes an exception, so that whatever holds a lock or a bar lets go of it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tasks.foundation.contracts.segment import STOP_REASONS

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
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Terminated


def stop_reason(fault: BaseException) -> str:
    """Why a command was interrupted: what Prefect or Python made of it says less than what was raised first."""
    reason = "sigint" if isinstance(fault, KeyboardInterrupt) else "sigterm"
    known: BaseException | None = fault
    while known is not None:
        told = getattr(known, "reason", None)  # other exceptions have a reason too, of another kind
        reason = told if told in STOP_REASONS else reason
        known = known.__context__
    return reason
