"""Stop signals of a command: SIGTERM and SIGHUP raise an exception, so that `finally` blocks run."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tasks.foundation.contracts.log_entry import STOP_REASONS
from tasks.foundation.errors import BatonError, StoreUnreachable
from tasks.foundation.machine.stops import sighup_as_sigterm, terminal_closed
from tasks.foundation.machine.threads import leaving_in_time, report_signal


class Terminated(BaseException):
    """SIGTERM arrived. A BaseException, so that no handler of errors catches it."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise `Terminated` in the main thread on the first SIGTERM or SIGHUP, unless an inner handler replaces this one.

    Later signals are ignored, because the first one is still being handled. The process ends when the grace period is
    over, also if the exception does not get through.
    """
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        with sighup_as_sigterm(), leaving_in_time():
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    report_signal(number)
    raise Terminated


def stop_signal_name() -> str:
    """Return the name of the signal that raised `Terminated`, for messages."""
    return "the closed terminal (SIGHUP)" if terminal_closed() else "SIGTERM"


def unreachable_store(fault: BaseException) -> StoreUnreachable | None:
    """Find a `StoreUnreachable` in the chain of exceptions that led to `fault`.

    Returns:
        The error, which means that the last work is not committed; None if the chain has none.
    """
    return next((each for each in _chain(fault) if isinstance(each, StoreUnreachable)), None)


def is_clean_stop(fault: BaseException) -> bool:
    """Whether a signal ended the work, and nothing failed before: what was trained is committed."""
    is_signal = not isinstance(fault, Exception | SystemExit)
    return is_signal and not any(isinstance(each, BatonError) for each in _chain(fault))


def stop_reason(fault: BaseException) -> str:
    """Return the exit reason of an interrupted command, from the earliest exception in the chain that has one."""
    reason = "sigint" if isinstance(fault, KeyboardInterrupt) else "sigterm"
    for cause in _chain(fault):
        found = getattr(cause, "reason", None)  # exceptions of other packages may have this attribute, too
        reason = found if found in STOP_REASONS else reason
    return reason


def _chain(fault: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = fault
    while cause is not None:
        yield cause
        cause = cause.__context__
