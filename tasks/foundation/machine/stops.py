"""Requests to stop training: signals, notices of Google Compute Engine, and the time budget.

A process has one main thread, which receives its signals, and one terminal. So it runs one piece of uninterrupted work
at a time, in one thread; `PROCESS_STOP` keeps its requests, and is the only state of a process that stops share.
Several hosts obey a request of any of them, at the same step. SIGHUP, which arrives when a terminal is closed or a
connection is lost, becomes a SIGTERM, so the usual handler of SIGTERM runs: Prefect's, the command's, or that of
uninterrupted work. A SIGHUP that is ignored stays ignored, as with nohup.
"""

import contextvars
import logging
import math
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final, get_args

from baton.tasks.foundation.contracts.log_entry import StopReason
from baton.tasks.foundation.contracts.run_spec import StopSpec
from baton.tasks.foundation.machine.collectives import Hosts
from baton.tasks.foundation.storage.transfers import Deadline
from baton.tasks.foundation.telemetry.events import Note, Sink

_LOGGER = logging.getLogger(__name__)

# The machine or the process ends after these, whether the work is committed or not.
_ENDS_THE_MACHINE: frozenset[StopReason] = frozenset({"sigterm", "preempted", "maintenance"})
_NEXT = "finishing the steps in flight, then committing; run the same command to continue"
_MESSAGES: dict[StopReason, str] = {
    "sigterm": f"SIGTERM: {_NEXT}",
    "sigint": f"SIGINT: {_NEXT}; press Ctrl-C again to leave at once",
    "time_budget": f"time budget used up: {_NEXT}",
    "preempted": f"this machine is being preempted: {_NEXT}",
    "maintenance": f"host maintenance is about to stop this machine: {_NEXT}",
}
_HANGUP_MESSAGE = f"terminal closed (SIGHUP): {_NEXT}"

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RESUMABLE: Final = 3  # the exit code of a process that stopped with work left to do


class Terminated(BaseException):
    """SIGTERM arrived. A BaseException, so that no handler of errors catches it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A request to stop.

    Attributes:
        reason: where it came from.
        at: when, in seconds of the clock of `Stops`.
    """

    reason: StopReason
    at: float


class Stops:
    """The stop requests so far. All methods may be called from any thread.

    Attributes:
        unsaved_work: whether something would be lost if the process ended now. Work that has nothing to lose sets it to
            False, and is abandoned when a signal arrives. After setting it, the work reads `requested`, so that it does
            not miss a request that arrived before.
    """

    def __init__(
        self,
        spec: StopSpec,
        *,
        clock: Callable[[], float],
        telemetry: Sink,
        leaving: Deadline | None = None,
        terminal_closed: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start without a request.

        Args:
            spec: has the length of the grace period.
            clock: monotonic time in seconds.
            telemetry: receives one note for each reason.
            leaving: each request sets this deadline to the rest of the grace period. So does Ctrl-C: no machine ends
                then, but the process should not wait minutes for a store.
            terminal_closed: whether a SIGHUP is the cause of a SIGTERM; only the note depends on it.
        """
        self._spec = spec
        self._leaving = leaving
        self._clock = clock
        self._telemetry = telemetry
        self._terminal_closed = terminal_closed
        # Sinks may read context variables (Prefect's logger does), and a new thread has none.
        self._context = contextvars.copy_context()
        # Another signal may arrive at any line of `request_stop`, so no lock guards this list.
        self._requests: list[Stop] = []
        self.unsaved_work = True
        self.together = False
        self._deadline = math.inf
        self._announced: set[StopReason] = set()
        self._announcing = threading.Lock()

    @property
    def may_leave(self) -> bool:
        """Whether a signal ends the work at once."""
        return not self.unsaved_work and (not self.together or self.grace_left() <= 0)

    @property
    def requested(self) -> Stop | None:
        """The first request, or None. Later requests do not change it."""
        first = self._requests[0] if self._requests else None
        if self._clock() >= self._deadline and (first is None or self._deadline < first.at):
            self._announce("time_budget")
            return Stop("time_budget", self._deadline)
        return first

    def grace_left(self) -> float:
        """Seconds until the machine may end; negative after that, infinite if no end is announced.

        They count from the first notice that the machine ends, even if Ctrl-C or the time budget came before it.
        """
        notices = [stop.at for stop in self._requests if stop.reason in _ENDS_THE_MACHINE]
        return self._spec.grace_seconds - (self._clock() - min(notices)) if notices else math.inf

    def request_stop(self, reason: StopReason) -> None:
        """Request a stop now, and announce it. A second request for the same reason changes nothing."""
        stop = Stop(reason, self._clock())
        self._requests.append(stop)
        # In a thread: a sink may wait for a blocked terminal, and the next signal must be handled meanwhile.
        threading.Thread(target=self._publish, args=(stop,), name="baton-note", daemon=True).start()

    def stop_within(self, seconds: float | None) -> None:
        """Request a stop `seconds` from now, unless an earlier one is requested; None requests nothing."""
        if seconds is not None:
            self._deadline = min(self._deadline, self._clock() + seconds)

    def _publish(self, stop: Stop) -> None:
        if self._leaving is not None:
            self._leaving.start(self._spec.grace_seconds - (self._clock() - stop.at))
        self._announce(stop.reason)

    def _announce(self, reason: StopReason) -> None:
        """Emit a note, once for each reason."""
        with self._announcing:
            if reason in self._announced:
                return
            self._announced.add(reason)
        text = _HANGUP_MESSAGE if reason == "sigterm" and self._terminal_closed() else _MESSAGES[reason]
        try:
            self._context.copy().run(self._telemetry.emit, Note(text=text, warning=True))
        except Exception:
            # A sink that raises must not end the run.
            _LOGGER.exception("a telemetry sink failed on the note about %s", reason)


def no_save() -> bool:
    """No save is in flight."""
    return False


class ProcessStop:
    """The stop requests of a process, past and present.

    Attributes:
        current: of the work that runs uninterrupted now; None if none does. Work within work joins it.
        terminal_closed: whether a SIGHUP has arrived.
        signals: descriptor to which each signal that arrives is written; None while nothing waits for them.
        signalled: whether a signal has asked this process to stop.
        save_in_flight: whether a save is in flight.
    """

    def __init__(self) -> None:
        self.current: Stops | None = None
        self.terminal_closed = self.signalled = False
        self.signals: int | None = None
        self.save_in_flight: Callable[[], bool] = no_save
        self._last: Stops | None = None
        self._stopped: Stops | None = None
        self._queue: queue.SimpleQueue[Callable[[], None]] | None = None

    def begin(self, stops: Stops) -> None:
        """Make these the stop requests of the work that runs now."""
        self._stopped = self.newest_stopped
        self.current = self._last = stops

    @property
    def newest_stopped(self) -> Stops | None:
        """The stop requests of the newest work that was asked to stop; None if none was."""
        return self._last if self.last_stop is not None else self._stopped

    @property
    def last_stop(self) -> Stop | None:
        """Why the last uninterrupted work was asked to stop; None if it was not."""
        return None if self._last is None else self._last.requested

    @property
    def saves(self) -> bool:
        """Whether something would be lost if the process ended now."""
        return (self.current is not None and self.current.unsaved_work) or self.save_in_flight()

    @property
    def work_queue(self) -> "queue.SimpleQueue[Callable[[], None]]":
        """Items run in one thread for all work of the process, because Keras keeps its policy and names per thread."""
        if self._queue is None:
            tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(tasks,), name="baton-work", daemon=True).start()
            self._queue = tasks  # last: a signal may interrupt this, and a queue without a thread runs nothing
        return self._queue


def _serve(tasks: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        tasks.get()()


PROCESS_STOP = ProcessStop()


_REASONS: tuple[StopReason, ...] = get_args(StopReason)
_NO_REASON = 0


def number_of(reason: StopReason | None) -> int:
    """A reason as a number that hosts can exchange; 0 for None."""
    return _NO_REASON if reason is None else 1 + _REASONS.index(reason)


def first_reason(numbers: Sequence[float]) -> StopReason | None:
    """The reason of the first host that has one."""
    return next((_REASONS[int(number) - 1] for number in numbers if number != _NO_REASON), None)


def agreed_stop(stops: Stops, hosts: Hosts) -> StopReason | None:
    """Why all hosts stop now; None if no host was asked to stop.

    This is a collective: all hosts call it in the same order.
    """
    stop = stops.requested
    return first_reason(hosts.gather_from_hosts([number_of(None if stop is None else stop.reason)])[:, 0].tolist())


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
