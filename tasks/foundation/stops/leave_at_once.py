"""End the process at once, as after a second Ctrl-C, even if its threads or its terminal are blocked."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

from tasks.foundation.stops.process_stop import PROCESS_STOP

_SHOW_CURSOR: Final = "\x1b[?25h"
_CLEAR_LINE: Final = "\r\x1b[2K"  # removes a progress bar
_STDERR: Final = 2
_MESSAGE: Final = "left at once: committed checkpoints are safe, and the same command continues from there"
_EXIT_CODE: Final = 128 + signal.SIGINT
_EXIT_SECONDS: Final = 0.5


def before_leaving_at_once(action: Callable[[], None]) -> None:
    """Register an action for `leave_at_once`, which runs no other exit handlers. All actions share half a second."""
    PROCESS_STOP.before_exit.append(action)


def leave_at_once(text: str = _MESSAGE, exit_code: int = _EXIT_CODE) -> NoReturn:
    """Print that the process ends, run the registered actions, and end.

    Args:
        text: what is printed, one line.
        exit_code: of the process.
    """
    # Writing may block forever, on a stopped terminal or a full pipe. So a separate thread writes, with a deadline.
    actions: tuple[tuple[Callable[..., None], tuple[str, ...]], ...] = ((_write_message, (text,)), (_run_actions, ()))
    threads = [threading.Thread(target=each, args=words, daemon=True) for each, words in actions]
    for thread in threads:
        thread.start()
    until = time.monotonic() + _EXIT_SECONDS
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    os._exit(exit_code)


def _write_message(text: str) -> None:
    with suppress(OSError):  # closed
        # Write to the file descriptor: another thread may hold the stream, or the lock of a progress bar.
        os.write(_STDERR, f"{_CLEAR_LINE if os.isatty(_STDERR) else ''}{text}\n".encode())


def _run_actions() -> None:
    for action in PROCESS_STOP.before_exit:
        with suppress(Exception):  # the process ends anyway
            action()
    for stream in (sys.stderr, sys.stdout):
        # AttributeError: the streams of a process without a console are None.
        with suppress(AttributeError, OSError, ValueError):
            if stream.isatty():
                stream.write(_SHOW_CURSOR)  # a progress bar hides it
            stream.flush()
