"""What asks a training to stop, in one place to look at: signals, Google's notices, the time budget."""

import contextvars
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.contracts.segment import StopReason
from tasks.foundation.stops.hangup import terminal_closed
from tasks.foundation.storage.deadline import Deadline
from tasks.foundation.telemetry.events import Note, Sink

_LOGGER = logging.getLogger(__name__)

# After these the machine goes, whether the work is committed or not.
_PULL_THE_PLUG: frozenset[StopReason] = frozenset({"sigterm", "preempted", "maintenance"})
_ANSWER = "finishing the steps in flight, then committing; run the same command to continue"
_WORDS: dict[StopReason, str] = {
    "sigterm": f"SIGTERM: {_ANSWER}",  # of a SIGHUP see `_words`
    "sigint": f"SIGINT: {_ANSWER}; press Ctrl-C again to leave at once",
    "time_budget": f"time budget used up: {_ANSWER}",
    "preempted": f"this machine is being preempted: {_ANSWER}",
    "maintenance": f"host maintenance is about to stop this machine: {_ANSWER}",
}


def _words(reason: StopReason) -> str:
    if reason == "sigterm" and terminal_closed():
        return f"terminal closed (SIGHUP): {_ANSWER}"
    return _WORDS[reason]


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody asked for training to stop."""

    reason: StopReason
    at: float
    """`clock()` when it was asked for."""


class Stops:
    """What was asked for so far. May be looked at from any thread."""

    def __init__(
        self, spec: StopSpec, *, clock: Callable[[], float], telemetry: Sink, leaving: Deadline | None = None
    ) -> None:
        """Nothing is asked for yet.

        Args:
            spec: how long the grace period is.
            clock: seconds, never going back.
            telemetry: receives a note for each reason.
            leaving: is bound to what is left of the grace period, for every reason: after Ctrl-C no machine goes away,
                but waiting minutes for a store is not wanted either.
        """
        self._spec = spec
        self._leaving = leaving
        self._clock = clock
        self._telemetry = telemetry
        # Sinks may look at context variables (Prefect's logger does), and a new thread has none.
        self._context = contextvars.copy_context()
        # Appended to while a signal is being noted, which another may interrupt at any line: so no lock guards it.
        self._heard: list[Stop] = []
        # Whether something would be lost if the process went now. Work that has nothing yet says so, and is left alone
        # when a signal comes; it looks at `asked` after it has set this, so that it does not go on unheard.
        self.at_stake = True
        self._deadline = math.inf
        self._told: set[StopReason] = set()
        self._telling = threading.Lock()

    @property
    def asked(self) -> Stop | None:
        """The stop that was asked for first, or None. It stays, whatever comes later."""
        first = self._heard[0] if self._heard else None
        if self._clock() >= self._deadline and (first is None or self._deadline < first.at):
            self._tell("time_budget")
            return Stop("time_budget", self._deadline)
        return first

    def grace_left(self) -> float:
        """Seconds until the machine may go; negative once they are over, infinite if nobody is about to pull the plug.

        They count from the first notice that has consequences, even if Ctrl-C or the time budget asked before it.
        """
        notices = [stop.at for stop in self._heard if stop.reason in _PULL_THE_PLUG]
        return self._spec.grace_seconds - (self._clock() - min(notices)) if notices else math.inf

    def request_stop(self, reason: StopReason) -> None:
        """Note that a stop is asked for now, and say so. Hearing the same thing again changes nothing."""
        stop = Stop(reason, self._clock())
        self._heard.append(stop)
        # In a thread: a sink can wait for a stuck terminal, and the next signal must be heard just then.
        threading.Thread(target=self._spread, args=(stop,), name="baton-note", daemon=True).start()

    def _spread(self, stop: Stop) -> None:
        if self._leaving is not None:
            self._leaving.bind(self._spec.grace_seconds - (self._clock() - stop.at))
        self._tell(stop.reason)

    def _tell(self, reason: StopReason) -> None:
        """Once for each reason."""
        with self._telling:
            if reason in self._told:
                return
            self._told.add(reason)
        try:
            self._context.copy().run(self._telemetry.emit, Note(text=_words(reason), warning=True))
        except Exception:
            # A sink must not raise; one that does must not end the run.
            _LOGGER.exception("a sink failed on the news of %s", reason)

    def stop_within(self, seconds: float | None) -> None:
        """Ask for a stop in so many seconds, unless one comes earlier; None asks for nothing."""
        if seconds is not None:
            self._deadline = min(self._deadline, self._clock() + seconds)
