"""SIGHUP, which arrives when a terminal is closed or a connection is lost, is handled like SIGTERM.

It becomes a SIGTERM, so the usual handler of SIGTERM runs: Prefect's, the command's, or that of uninterrupted work. A
SIGHUP that is ignored stays ignored, as with nohup.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tasks.foundation.stops.process_stop import PROCESS_STOP


def terminal_closed() -> bool:
    """Whether a SIGHUP has arrived, so that it is the cause of the SIGTERM."""
    return PROCESS_STOP.terminal_closed


@contextmanager
def sighup_as_sigterm() -> Iterator[None]:
    """Inside, the first SIGHUP that would end the process becomes a SIGTERM. SIGTERM must have a handler."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGHUP, _send_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _send_sigterm(_number: int, _frame: FrameType | None) -> None:
    # The kernel and the shell may each send one. A second SIGTERM could interrupt the handling of the first.
    if not PROCESS_STOP.terminal_closed:
        PROCESS_STOP.terminal_closed = True
        signal.raise_signal(signal.SIGTERM)
