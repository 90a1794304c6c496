"""Run work to completion; signals that arrive meanwhile are delivered after it returns.

The work runs in a separate thread, and the main thread waits for signals. So a signal is handled at once, even if the
work is inside one TensorFlow call for seconds, and the signal's handler stays in place. Prefect needs that: its runner
asks the process for a receipt before it sends SIGTERM. It gets one only while Prefect's own handler is installed, and
kills the process at once without one (seen with 3.8.8 and `flow-run execute` set to reschedule).
"""

import contextvars
import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.stops.beside import StopsBeside, runs_beside
from tasks.foundation.stops.hangup import sighup_as_sigterm, terminal_closed
from tasks.foundation.stops.leave_at_once import leave_at_once
from tasks.foundation.stops.metadata_server import watching_metadata
from tasks.foundation.stops.process_stop import PROCESS_STOP
from tasks.foundation.stops.stops import Stop, Stops
from tasks.foundation.stops.work_thread import WorkThreadTask
from tasks.foundation.storage.deadline import PROCESS_DEADLINE
from tasks.foundation.telemetry.events import Silent, Sink

T = TypeVar("T")


def last_stop() -> Stop | None:
    """Why the last uninterrupted work of this process was asked to stop; None if it was not."""
    return PROCESS_STOP.last_stop


def run_uninterrupted(
    work: Callable[[Stops], T],
    spec: StopSpec,
    *,
    within_seconds: float | None = None,
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
        with watching_metadata(stops, grace_seconds=spec.grace_seconds):
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
            while not task.outcome and not (raised and not stops.unsaved_work):
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
            if raised and not stops.unsaved_work:
                return
            task.begin()
            task.wait()
        except BaseException as fault:  # noqa: BLE001 - raised after the work
            raised.append(fault)  # nothing else here: the next signal may arrive at any bytecode


def _request_stop(fault: BaseException, raised: list[BaseException], stops: Stops) -> None:
    if sum(isinstance(each, KeyboardInterrupt) for each in raised) > 1:
        leave_at_once()
    stops.request_stop("sigint" if isinstance(fault, KeyboardInterrupt) else "sigterm")


class _Terminated(BaseException):
    """SIGTERM, in a process without a handler for it."""


@contextmanager
def _default_sigterm_raises() -> Iterator[None]:
    """Inside, a SIGTERM that would end the process immediately ends it after the work."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
