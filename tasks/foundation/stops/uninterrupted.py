"""Work that must not be cut in the middle: whoever asks the process to go is noted meanwhile, and heard after it.

The work runs in a thread of its own while the main thread waits where signals arrive. So a signal is noted at once,
even if the work is inside one TensorFlow call for seconds, and its handlers stay whose they are. That matters to
Prefect: its runner asks the process for a receipt before it sends SIGTERM, gets one only while Prefect's own handler
is installed, and kills at once where it gets none (seen with 3.8.8 and `flow-run execute` told to reschedule).
"""

import contextvars
import functools
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, Generic, NoReturn, TypeVar, cast

from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.stops.hangup import sighup_as_sigterm
from tasks.foundation.stops.metadata_server import watching_metadata
from tasks.foundation.stops.stops import Stop, Stops
from tasks.foundation.storage.deadline import LEAVING
from tasks.foundation.telemetry.events import Silent, Sink

T = TypeVar("T")

_SHOW_CURSOR: Final = "\x1b[?25h"
_CLEAR_LINE: Final = "\r\x1b[2K"  # a progress bar's
_STDERR: Final = 2
_WHAT_STANDS: Final = "left at once: what is committed stays, and the same command goes on from there"
_LEFT_BY_INTERRUPT: Final = 128 + signal.SIGINT
_LAST_WORDS_SECONDS: Final = 0.5
_MOMENT_SECONDS: Final = 0.1

# What is asked of the work that runs now, if any does; and what was asked of the last.
_current: list[Stops] = []
_last: list[Stops] = []
_before_leaving: list[Callable[[], None]] = []


def before_leaving_at_once(action: Callable[[], None]) -> None:
    """Have something done before a second SIGINT ends the process, which calls nothing else; it has half a second."""
    _before_leaving.append(action)


def last_stop() -> Stop | None:
    """What the last held work of this process was asked for, if it was."""
    return _last[0].asked if _last else None


def run_uninterrupted(
    work: Callable[[Stops], T],
    spec: StopSpec,
    *,
    within_seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    telemetry: Sink = Silent(),  # noqa: B008 - Silent has no state
) -> T:
    """Do `work`, which looks at what is asked of it, and end when it has ended.

    What a signal's handler raises meanwhile (KeyboardInterrupt, Prefect's TerminationSignal) is kept and raised after
    the work; a second SIGINT ends the process at once, with code 130. The metadata server's notices and the time budget
    raise nothing: look at `asked`. Within other such work it joins it: same `Stops`, the tighter budget of the two.
    Elsewhere than in the main thread no signals arrive, and the work is simply done.

    Args:
        work: is given the `Stops` to look at.
        spec: how long the grace period is.
        within_seconds: time budget, counted from here.
        clock: seconds, never going back.
        telemetry: is told once of each reason, from other threads, in a copy of this thread's context.

    Returns:
        What the work returns.

    Raises:
        BaseException: what a signal's handler raised; else whatever the work raises.
    """
    if _current:
        stops = _current[0]
        stops.stop_within(within_seconds)
        return work(stops)
    stops = Stops(spec, clock=clock, telemetry=telemetry, leaving=LEAVING)
    stops.stop_within(within_seconds)
    _current.append(stops)
    _last[:] = [stops]
    try:
        with watching_metadata(stops, grace_seconds=spec.grace_seconds):
            if threading.current_thread() is not threading.main_thread():
                return work(stops)
            return _beside(work, stops)
    finally:
        _current.clear()


def _beside(work: Callable[[Stops], T], stops: Stops) -> T:
    """The work in its thread, the main thread in wait."""
    raised: list[BaseException] = []
    with _default_sigterm_raises(), sighup_as_sigterm():
        task = _Task(functools.partial(contextvars.copy_context().run, work, stops))
        try:
            while not task.outcome and not (raised and not stops.at_stake):
                try:
                    _wait(task, stops, raised)
                except BaseException as another:  # noqa: BLE001 - it came while the one before was being kept
                    raised.append(another)
            if not task.outcome:  # nothing was trained yet, and compiling may take longer than the machine has
                raise raised[0]
            return task.result()
        finally:
            if task.outcome:
                task.close()
            # Also when the work failed: this process has been told to go, and whoever acts on the work's error (a
            # retry, a state "Failed") would go on in it. A machine that goes weighs more than a key press.
            if raised:
                raise next((each for each in raised if not isinstance(each, KeyboardInterrupt)), raised[0])


def _wait(task: "_Task[T]", stops: Stops, raised: list[BaseException]) -> None:
    noted = 0
    while not task.outcome:
        try:
            while noted < len(raised):
                _note(raised[noted], raised, stops)
                noted += 1
            if raised and not stops.at_stake:
                return
            task.begin()
            task.wait()
        except BaseException as told:  # noqa: BLE001 - raised when the work is over
            raised.append(told)  # and no more than this, since the next one may come at any bytecode


def _note(fault: BaseException, raised: list[BaseException], stops: Stops) -> None:
    if sum(isinstance(each, KeyboardInterrupt) for each in raised) > 1:
        _leave_at_once()
    stops.request_stop("sigint" if isinstance(fault, KeyboardInterrupt) else "sigterm")


class _Task(Generic[T]):
    """Work for the thread. The main thread may be interrupted at any bytecode here, so no Python lock is held in it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.outcome: list[tuple[T | None, BaseException | None]] = []
        self._work = work
        self._queued = self._begun = False
        self._reader, self._writer = socket.socketpair()

    def begin(self) -> None:
        """Hand it to the thread. Interrupted just then, it is handed over twice, and done once."""
        if not self._queued:
            _thread().put(self._run)
            self._queued = True

    def wait(self) -> None:
        """Until it is done, or for a moment; the caller looks which.

        A signal that comes between Python's last look and this call does not interrupt it; the next look finds it.
        """
        select.select([self._reader], [], [], _MOMENT_SECONDS)

    def result(self) -> T:
        """What it returned, or what it raised."""
        value, fault = self.outcome[0]
        if fault is not None:
            raise fault
        return cast("T", value)

    def close(self) -> None:
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
            self._work = _nothing  # holds a model
            with suppress(OSError):  # done, and closed by a main thread that has seen it
                self._writer.send(b".")


def _nothing() -> NoReturn:
    raise AssertionError("this work is done")


def _thread() -> "queue.SimpleQueue[Callable[[], None]]":
    """One thread for all such work of a process: Keras keeps its policy and its names by thread."""
    if not _QUEUES:
        tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(tasks,), name="baton-held", daemon=True).start()
        _QUEUES.append(tasks)
    return _QUEUES[0]


def _serve(tasks: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        tasks.get()()


_QUEUES: "list[queue.SimpleQueue[Callable[[], None]]]" = []


class _Told(BaseException):
    """SIGTERM, where nobody has a handler for it."""


@contextmanager
def _default_sigterm_raises() -> Iterator[None]:
    """Where SIGTERM would end the process on the spot, let it end it after the work."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise _Told

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except _Told:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave_at_once() -> NoReturn:
    # Writing can wait for ever, for a stopped terminal or a full pipe; leaving must not. Nor must one of them wait for
    # the other: with nobody to read the message, what was asked for is done all the same.
    threads = [threading.Thread(target=each, daemon=True) for each in (_say_what_stands, _last_words)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + _LAST_WORDS_SECONDS
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    os._exit(_LEFT_BY_INTERRUPT)


def _say_what_stands() -> None:
    with suppress(OSError):  # closed
        # To the descriptor: another thread may hold the stream, or the lock of a progress bar.
        os.write(_STDERR, f"{_CLEAR_LINE if os.isatty(_STDERR) else ''}{_WHAT_STANDS}\n".encode())


def _last_words() -> None:
    for action in _before_leaving:
        with suppress(Exception):  # whatever it is, the process leaves
            action()
    for stream in (sys.stderr, sys.stdout):
        # AttributeError: a process without a console has None here.
        with suppress(AttributeError, OSError, ValueError):
            if stream.isatty():
                stream.write(_SHOW_CURSOR)  # a progress bar hides it
            stream.flush()
