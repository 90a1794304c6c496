"""End a process that was asked to stop when its grace period is over, whatever keeps it.

A handler of a signal raises an exception in the main thread, and the process then unwinds. User code can keep it from
that: a pool of processes waits for ever for a lock that a killed child had, a thread or an exit handler never ends, or
the main thread is inside a library and no handler is called. So another thread counts from the signal. It learns of it
by `signal.set_wakeup_fd`, which needs no handler.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from tasks.foundation.stops.leave_at_once import leave_at_once
from tasks.foundation.stops.process_stop import PROCESS_STOP
from tasks.foundation.storage.deadline import LAST_SECONDS, PROCESS_DEADLINE

_RESUMABLE: Final = 3
_POLL_SECONDS: Final = 0.2
_STOPS: Final = frozenset({signal.SIGTERM, signal.SIGHUP})
_MESSAGE: Final = (
    "stopped by a signal; something did not end within stop.grace_seconds = {grace:g} (code that waits for a thread or "
    "a child process?), so this process left; run the same command to continue"
)
_END: Final = b"\0"


@contextmanager
def leaving_in_time() -> Iterator[None]:
    """Inside, the process ends with exit code 3 once the grace period after a SIGTERM or SIGHUP is over.

    What is not committed yet may be saved first: the training ends by itself then, or hangs (`hang_watch.py`).
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    PROCESS_STOP.signals = writer
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(reader, ended), name="baton-stop-watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        if PROCESS_STOP.signals == writer:  # not in a fork
            PROCESS_STOP.signals = None
            signal.set_wakeup_fd(before)
            ended.set()
            with suppress(OSError):
                os.write(writer, _END)
            watch.join()  # it has read every signal then
        os.close(writer)


def report_signal(number: int) -> None:
    """Tell the watch of a signal, in its handler: a user's event loop may have replaced the wakeup descriptor."""
    if PROCESS_STOP.signals is not None:
        with suppress(OSError):
            os.write(PROCESS_STOP.signals, bytes([number]))


def limit_exit(code: int) -> None:
    """Let a process that a signal has stopped exit within `PROCESS_DEADLINE`, whatever its threads and handlers do."""
    if PROCESS_STOP.signalled:
        seconds = PROCESS_DEADLINE.remaining() + 2 * LAST_SECONDS
        threading.Thread(target=_exit_after, args=(seconds, code), daemon=True).start()


def _exit_after(seconds: float, code: int) -> None:
    time.sleep(seconds)
    _kill_children()
    os._exit(code)


def _watch(reader: int, ended: threading.Event) -> None:
    with open(reader, "rb", buffering=0) as pipe:
        while not _STOPS.intersection(found := pipe.read(64)):
            PROCESS_STOP.signalled = PROCESS_STOP.signalled or signal.SIGINT in found
            if ended.is_set():
                return
        PROCESS_STOP.signalled = True
        until = time.monotonic() + PROCESS_DEADLINE.grace_seconds
        while time.monotonic() < until or PROCESS_STOP.saves:
            if ended.wait(_POLL_SECONDS):
                return
    _kill_children()
    leave_at_once(_MESSAGE.format(grace=PROCESS_DEADLINE.grace_seconds), _RESUMABLE)


def _kill_children() -> None:
    """End the processes of pools, which may wait for this one for ever."""
    processes = sys.modules.get("multiprocessing")
    with suppress(Exception):  # the process ends anyway
        for child in processes.active_children() if processes is not None else ():
            child.kill()


def _block_signals() -> None:
    if PROCESS_STOP.signals is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)


def _unblock_signals() -> None:
    if PROCESS_STOP.signals is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


def _forget() -> None:
    """In a fork: its signals are not those of the process that watches."""
    if PROCESS_STOP.signals is not None:
        signal.set_wakeup_fd(-1)
        _unblock_signals()
        PROCESS_STOP.signals = None


# A fork writes its signals to its parent's pipe until it has forgotten it; until then it gets none.
os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_forget)
