"""The work thread of a process: work on the model runs in it, and the main thread waits and receives signals.

So a signal is handled at once, even if the work is inside one TensorFlow call for seconds, and the signal's handler
stays in place. Prefect needs that: its runner asks the process for a receipt before it sends SIGTERM. It gets one only
while Prefect's own handler is installed, and kills the process at once without one (seen with 3.8.8 and `flow-run
execute` set to reschedule).

A process ends at once after a second Ctrl-C, even if its threads or its terminal are blocked. It also ends when it was
asked to stop and its grace period is over, whatever keeps it. A handler raises an exception in the main thread, and the
process unwinds; but a pool of processes may wait forever for a lock that a killed child had, a thread or an exit
handler may never end, or the main thread may be inside a library where no handler is called. So another thread counts
from the signal. It learns of it by `signal.set_wakeup_fd`, which needs no handler.
"""

import contextvars
import functools
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, Final, Generic, NoReturn, TypeVar, cast

from baton.tasks.foundation.contracts.run_spec import StopSpec
from baton.tasks.foundation.machine.metadata_server import watching_metadata
from baton.tasks.foundation.machine.stops import (
    PROCESS_STOP,
    RESUMABLE,
    Stop,
    Stops,
    Terminated,
    sighup_as_sigterm,
    terminal_closed,
)
from baton.tasks.foundation.storage.transfers import LAST_SECONDS, PROCESS_DEADLINE
from baton.tasks.foundation.telemetry.events import Silent, Sink

T = TypeVar("T")

_POLL_SECONDS: Final = 0.1


class WorkThreadTask(Generic[T]):
    """One piece of work.

    A signal may interrupt the main thread at any bytecode of these methods, so none of them holds a Python lock.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self.outcome: list[tuple[T | None, BaseException | None]] = []
        self._work = work
        self._queued = self._begun = False
        self._reader, self._writer = socket.socketpair()

    def begin(self) -> None:
        """Hand the work to the thread. If a signal interrupts this, it may be handed over twice; it runs once."""
        if not self._queued:
            PROCESS_STOP.work_queue.put(self._run)
            self._queued = True

    def wait(self) -> None:
        """Wait until the work is done, or for a tenth of a second. `outcome` says which.

        A signal that arrives between Python's last check and the call of `select` does not interrupt it. Python finds
        the signal after the call.
        """
        select.select([self._reader], [], [], _POLL_SECONDS)

    def result(self) -> T:
        """Return what the work returned, or raise what it raised."""
        value, fault = self.outcome[0]
        if fault is not None:
            raise fault
        return cast("T", value)

    def close(self) -> None:
        """Close the sockets; call it once the work is done."""
        self._reader.close()
        self._writer.close()

    def _run(self) -> None:
        if self._begun:
            return
        self._begun = True
        try:
            self.outcome.append((self._work(), None))
        except BaseException as fault:  # noqa: BLE001 - raised in the main thread
            self.outcome.append((None, fault))
        finally:
            self._work = _already_done  # the work refers to a model
            with suppress(OSError):  # the main thread saw the outcome and closed the socket
                self._writer.send(b".")


def _already_done() -> NoReturn:
    raise AssertionError("this work is done already")


def run_in_work_thread(work: Callable[[], T]) -> T:
    """Run work that loses nothing if it is abandoned, such as an evaluation; see `run_uninterrupted` for other work.

    The main thread waits where signals arrive, so that a signal is handled at once, even if the work is inside one
    TensorFlow call. An exception of its handler is raised at once, and the work is abandoned: it runs on until the
    process ends. In another thread than the main one, the work runs in that thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    task = WorkThreadTask(functools.partial(contextvars.copy_context().run, work))
    try:
        while not task.outcome:
            task.begin()
            task.wait()
        return task.result()
    finally:
        if task.outcome:
            task.close()


_BESIDE: contextvars.ContextVar[bool] = contextvars.ContextVar("baton_beside", default=False)


class StopsBeside(Stops):
    """Follows the stop requests of the work that the process runs uninterrupted, one after the other.

    A process has one piece of such work at a time, and only that one receives signals and notices.
    """

    def __init__(self, spec: StopSpec, *, clock: Callable[[], float], telemetry: Sink) -> None:
        super().__init__(spec, clock=clock, telemetry=telemetry)
        # A request from before this work began has ended some other work.
        self._ignored = PROCESS_STOP.newest_stopped

    @property
    def requested(self) -> Stop | None:
        """The first request to the process since this work began, or the end of its own time budget."""
        followed = self._followed
        return super().requested if followed is None else followed.requested or super().requested

    def grace_left(self) -> float:
        """Seconds until the machine may end."""
        followed = self._followed
        return super().grace_left() if followed is None else followed.grace_left()

    @property
    def _followed(self) -> Stops | None:
        newest = PROCESS_STOP.newest_stopped
        return None if newest is self._ignored else newest


def runs_beside() -> bool:
    """Whether this code was started by `start_beside`."""
    return _BESIDE.get()


def start_beside(work: Callable[[], object], *, name: str) -> threading.Thread:
    """Start a thread whose uninterrupted work leaves signals and notices to the training; it has this thread's context.

    Args:
        work: handles its own errors.
        name: of the thread.
    """
    context = contextvars.copy_context()
    context.run(_BESIDE.set, True)
    run: Callable[..., Any] = context.run
    thread = threading.Thread(target=run, args=(work,), name=name, daemon=True)
    thread.start()
    return thread


_SHOW_CURSOR: Final = "\x1b[?25h"
CLEAR_LINE: Final = "\r\x1b[2K"  # removes a progress bar
_STDERR: Final = 2
_MESSAGE: Final = "left at once: committed checkpoints are safe, and the same command continues from there"
_EXIT_CODE: Final = 128 + signal.SIGINT
_EXIT_SECONDS: Final = 0.5


def leave_at_once(text: str = _MESSAGE, exit_code: int = _EXIT_CODE) -> NoReturn:
    """Print that the process ends, restore the terminal, and end without exit handlers, within a second.

    Args:
        text: what is printed, one line.
    """
    # Writing may block forever, on a stopped terminal or a full pipe. So a separate thread writes, with a deadline.
    actions: tuple[tuple[Callable[..., None], tuple[str, ...]], ...] = (
        (_write_message, (text,)),
        (_restore_terminal, ()),
    )
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
        os.write(_STDERR, f"{CLEAR_LINE if os.isatty(_STDERR) else ''}{text}\n".encode())


def _restore_terminal() -> None:
    for stream in (sys.stderr, sys.stdout):
        # AttributeError: the streams of a process without a console are None.
        with suppress(AttributeError, OSError, ValueError):
            if stream.isatty():
                stream.write(_SHOW_CURSOR)  # a progress bar hides it
            stream.flush()


def last_stop() -> Stop | None:
    """Why the last uninterrupted work of this process was asked to stop; None if it was not."""
    return PROCESS_STOP.last_stop


def run_uninterrupted(
    work: Callable[[Stops], T],
    spec: StopSpec,
    *,
    within_seconds: float | None = None,
    of_machine: bool = True,
    clock: Callable[[], float] = time.monotonic,
    telemetry: Sink = Silent(),  # noqa: B008 - Silent has no state
) -> T:
    """Run `work` to completion; signals that arrive meanwhile are delivered after it returns.

    An exception of a signal handler (KeyboardInterrupt, Prefect's TerminationSignal) is raised after the work. A second
    SIGINT ends the process at once, with exit code 130. Notices of the metadata server and the time budget raise
    nothing; the work reads them from `Stops.requested`. Work within such work joins it: it gets the same `Stops`, and
    the tighter budget of the two applies. In any other thread than the main one, which alone receives signals, the work
    is called directly.

    Args:
        work: gets the `Stops` to read.
        spec: has the length of the grace period.
        within_seconds: time budget, counted from now.
        of_machine: whether notices of the metadata server count; False if they are for a process that does the work.
        clock: monotonic time in seconds.
        telemetry: receives one note for each reason, from other threads, in a copy of this thread's context.

    Returns:
        What the work returns.

    Raises:
        BaseException: what a signal's handler raised; otherwise what the work raises.
    """
    if runs_beside():
        beside = StopsBeside(spec, clock=clock, telemetry=telemetry)
        beside.stop_within(within_seconds)
        return work(beside)
    if PROCESS_STOP.current is not None:
        PROCESS_STOP.current.stop_within(within_seconds)
        return work(PROCESS_STOP.current)
    stops = Stops(spec, clock=clock, telemetry=telemetry, leaving=PROCESS_DEADLINE, terminal_closed=terminal_closed)
    stops.stop_within(within_seconds)
    try:
        PROCESS_STOP.begin(stops)
        with watching_metadata(stops, grace_seconds=spec.grace_seconds) if of_machine else nullcontext():
            if threading.current_thread() is not threading.main_thread():
                return work(stops)
            return _run_in_work_thread(work, stops)
    finally:
        PROCESS_STOP.current = None


def _run_in_work_thread(work: Callable[[Stops], T], stops: Stops) -> T:
    raised: list[BaseException] = []
    with _default_sigterm_raises(), sighup_as_sigterm():
        task = WorkThreadTask(functools.partial(contextvars.copy_context().run, work, stops))
        try:
            while not task.outcome and not (raised and stops.may_leave):
                try:
                    _wait(task, stops, raised)
                except BaseException as another:  # noqa: BLE001 - it was raised while another one was being recorded
                    raised.append(another)
            if not task.outcome:  # nothing is trained yet, and compiling may take longer than the grace period
                raise raised[0]
            return task.result()
        finally:
            if task.outcome:
                task.close()
            # Also if the work failed: a process that was asked to stop must not retry. The end of the machine matters
            # more than a key press.
            if raised:
                raise next((each for each in raised if not isinstance(each, KeyboardInterrupt)), raised[0])


def _wait(task: WorkThreadTask[T], stops: Stops, raised: list[BaseException]) -> None:
    handled = 0
    while not task.outcome:
        try:
            while handled < len(raised):
                _request_stop(raised[handled], raised, stops)
                handled += 1
            if raised and stops.may_leave:
                return
            task.begin()
            task.wait()
        except BaseException as fault:  # noqa: BLE001 - raised after the work
            raised.append(fault)  # nothing else here: the next signal may arrive at any bytecode


def _request_stop(fault: BaseException, raised: list[BaseException], stops: Stops) -> None:
    if sum(isinstance(each, KeyboardInterrupt) for each in raised) > 1:
        leave_at_once()
    stops.request_stop("sigint" if isinstance(fault, KeyboardInterrupt) else "sigterm")


@contextmanager
def _default_sigterm_raises() -> Iterator[None]:
    """Inside, a SIGTERM that would end the process immediately ends it after the work."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_LOOK_SECONDS: Final = 0.2
_STOPS: Final = frozenset({signal.SIGTERM, signal.SIGHUP})
_LEFT: Final = (
    "stopped by a signal; something did not end within stop.grace_seconds = {grace:g} (code that waits for a thread or "
    "a child process?), so this process left; run the same command to continue"
)
_END: Final = b"\0"


@contextmanager
def leaving_in_time() -> Iterator[None]:
    """Inside, the process ends with exit code 3 once the grace period after a SIGTERM or SIGHUP is over.

    What is not committed yet may be saved first: the training ends by itself then, or hangs (`hang.py`).
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process, outer = os.getpid(), PROCESS_STOP.signals
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    PROCESS_STOP.signals = writer
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(reader, ended), name="baton-stop-watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        if os.getpid() == process:  # a fork has no watch
            PROCESS_STOP.signals = outer
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
            if ended.is_set() or not found:
                return
        PROCESS_STOP.signalled = True
        until = time.monotonic() + PROCESS_DEADLINE.grace_seconds
        while time.monotonic() < until or PROCESS_STOP.saves:
            if ended.wait(_LOOK_SECONDS):
                return
            if PROCESS_STOP.saves:  # afterwards, the process says what became of it
                until = max(until, time.monotonic() + LAST_SECONDS)
    _kill_children()
    leave_at_once(_LEFT.format(grace=PROCESS_DEADLINE.grace_seconds), RESUMABLE)


def _kill_children() -> None:
    """End the processes of pools, which may wait for this one forever."""
    processes = sys.modules.get("multiprocessing")
    with suppress(OSError, ValueError, AssertionError):  # a child that has ended, or is not of this process
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
