"""Requests to stop training: signals, notices of Google Compute Engine, and the time budget."""

import contextvars
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.contracts.segment import StopReason
from tasks.foundation.storage.deadline import Deadline
from tasks.foundation.telemetry.events import Note, Sink

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
        self._deadline = math.inf
        self._announced: set[StopReason] = set()
        self._announcing = threading.Lock()

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
