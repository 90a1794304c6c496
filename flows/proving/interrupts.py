"""Handles SIGINT, SIGTERM and SIGHUP while trials run: processes are ended and scratch storage is removed first."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt within the block, so that `finally` blocks run."""
    with _handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def delayed_interrupts() -> Iterator[Sequence[int]]:
    """Delay SIGINT, SIGTERM and SIGHUP to the end of the block.

    An interrupt within `subprocess.Popen` could lose a started process, or leave a lock of `subprocess` taken. A signal
    mask is no alternative, because the started processes would inherit it.

    Yields:
        The numbers of the signals received so far; the list grows within the block.

    Raises:
        KeyboardInterrupt: at the end of the block, if a signal was received.
    """
    received: list[int] = []
    with _handled(lambda number, _frame: received.append(number), signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield received
    if received:
        raise KeyboardInterrupt


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Set a signal handler for the block. Only the main thread receives signals, so do nothing in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # nohup and a shell's background jobs rely on signals staying ignored.
    before = {
        number: signal.signal(number, handler)
        for number in numbers
        if signal.getsignal(number) not in {signal.SIG_IGN, None}
    }
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
