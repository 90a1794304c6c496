"""SIGHUP, which comes when a terminal is closed or a connection is lost: it is handled as SIGTERM is.

It is passed on as SIGTERM, so whoever handles that one (Prefect, a held piece of work, the command) does what it always
does. A SIGHUP that is ignored stays ignored, which is what nohup is for.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_heard: list[bool] = []


def terminal_closed() -> bool:
    """Whether a SIGHUP has come, and so is behind the SIGTERM that is heard of."""
    return bool(_heard)


@contextmanager
def sighup_as_sigterm() -> Iterator[None]:
    """Within, a first SIGHUP that would end the process becomes a SIGTERM, for which there must be a handler."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGHUP, _pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _pass_on(_number: int, _frame: FrameType | None) -> None:
    # The kernel and the shell may both send one; a second SIGTERM could interrupt what the first has begun.
    if not _heard:
        _heard.append(True)
        signal.raise_signal(signal.SIGTERM)
