"""One place to look at for whether training is to stop: signals, Google's notices, the time budget."""

import contextvars
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.contracts.segment import StopReason
from tasks.foundation.stops.metadata import watching_metadata
from tasks.foundation.stops.signals import hearing_signals, raise_again
from tasks.foundation.telemetry.events import Note, Silent, Sink

_LOGGER = logging.getLogger(__name__)

# After these the machine goes, whether the work is committed or not.
_PULL_THE_PLUG: frozenset[StopReason] = frozenset({"sigterm", "preempted", "maintenance"})
_ANSWER = "finishing the steps in flight, then committing; run the same command to continue"
_WORDS: dict[StopReason, str] = {
    "sigterm": f"SIGTERM: {_ANSWER}",
    "sigint": f"SIGINT: {_ANSWER}; press Ctrl-C again to leave at once",
    "time_budget": f"time budget used up: {_ANSWER}",
    "preempted": f"this machine is being preempted: {_ANSWER}",
    "maintenance": f"host maintenance is about to stop this machine: {_ANSWER}",
}


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody asked for training to stop."""

    reason: StopReason
    at: float
    """`clock()` when it was asked for."""


class Stops:
    """What was asked for so far. May be looked at from any thread."""

    def __init__(self, spec: StopSpec, *, clock: Callable[[], float], telemetry: Sink) -> None:
        self._spec = spec
        self._clock = clock
        self._telemetry = telemetry
        # Sinks may look at context variables (Prefect's logger does), and a new thread has none.
        self._context = contextvars.copy_context()
        # Appended to by signal handlers too, which may interrupt any line of the main thread: so no lock guards it.
        self._heard: list[Stop] = []
        self._deadline = math.inf
        self._told: set[StopReason] = set()
        self._telling = threading.Lock()

    @property
    def asked(self) -> Stop | None:
        """The stop that was asked for first, or None. It stays, whatever comes later."""
        first = self._heard[0] if self._heard else None
        if self._clock() >= self._deadline and (first is None or self._deadline < first.at):
            self.tell("time_budget")
            return Stop("time_budget", self._deadline)
        return first

    def grace_left(self) -> float:
        """Seconds until the machine may go; negative once they are over, infinite if nobody is about to pull the plug.

        They count from the first notice that has consequences, even if Ctrl-C or the time budget asked before it.
        """
        notices = [stop.at for stop in self._heard if stop.reason in _PULL_THE_PLUG]
        return self._spec.grace_seconds - (self._clock() - min(notices)) if notices else math.inf

    def hear(self, reason: StopReason) -> None:
        """Note that a stop is asked for now. Safe in a signal handler; hearing the same thing again changes nothing."""
        self._heard.append(Stop(reason, self._clock()))

    def tell(self, reason: StopReason) -> None:
        """Say so, once for each reason. Not for signal handlers: sinks take locks."""
        with self._telling:
            if reason in self._told:
                return
            self._told.add(reason)
        try:
            # A copy, because a context can be entered by one thread at a time only.
            self._context.copy().run(self._telemetry.emit, Note(text=_WORDS[reason], warning=True))
        except Exception:
            # A sink must not raise; one that does must not end the listening.
            _LOGGER.exception("a sink failed on the news of %s", reason)

    def stop_within(self, seconds: float | None) -> None:
        """Ask for a stop in so many seconds, unless one comes earlier; None asks for nothing."""
        if seconds is not None:
            self._deadline = min(self._deadline, self._clock() + seconds)


@contextmanager
def listening(
    spec: StopSpec,
    *,
    within_seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    telemetry: Sink = Silent(),  # noqa: B008 - Silent has no state
) -> Iterator[Stops]:
    """Collect whatever asks this process to stop training, for as long as the body runs.

    SIGTERM and SIGINT only set a flag meanwhile, if this is the main thread (elsewhere Python installs no handlers);
    a second SIGINT ends the process with code 130. A signal that the process ignored before stays ignored. On exit
    the handlers from before are back, and a signal that arrived is raised again, so that whoever held it hears it.
    Where Google Compute Engine's metadata server is, its notices are heard too; they and the time budget raise
    nothing, so look at `asked`.

    Within another `listening` of the process this one joins it: it yields the same `Stops`, with the outer one's
    spec, clock and telemetry.

    Args:
        spec: how long the grace period is.
        within_seconds: time budget, counted from here; within another one the tighter of the two holds from now on.
        clock: seconds, never going back.
        telemetry: is told once of each reason, mostly from other threads, in a copy of this thread's context.

    Raises:
        KeyboardInterrupt: or what else the handlers from before make of a signal that arrived, at the exit.
    """
    arrived: set[signal.Signals] = set()
    try:
        with _PROCESS.joined(spec, clock, telemetry) as stops, hearing_signals(stops, arrived):
            stops.stop_within(within_seconds)
            yield stops
    finally:
        # Also when the body failed, and then the signal's exception is the one to leave, with the body's as its
        # context: this process has been told to go, and whoever acts on the body's error (a retry, a state "Failed")
        # would go on in it. A handler that raises nothing lets the body's error through.
        raise_again(arrived)


class _Process:
    """Who listens in this process: the first to come sets up, the last to go takes down."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nobody listens. Also in a forked child, where nobody does and the lock may have been held."""
        self._lock = threading.Lock()
        self._stops: Stops | None = None
        self._users = 0
        self._watches = ExitStack()

    @contextmanager
    def joined(self, spec: StopSpec, clock: Callable[[], float], telemetry: Sink) -> Iterator[Stops]:
        stops = self._enter(spec, clock, telemetry)
        try:
            yield stops
        finally:
            self._leave(stops)

    def _enter(self, spec: StopSpec, clock: Callable[[], float], telemetry: Sink) -> Stops:
        with self._lock:
            if self._stops is None:
                stops = self._stops = Stops(spec, clock=clock, telemetry=telemetry)
                self._watches.enter_context(watching_metadata(stops, grace_seconds=spec.grace_seconds))
            self._users += 1
            return self._stops

    def _leave(self, stops: Stops) -> None:
        with self._lock:
            if self._stops is not stops:  # a forked child leaves a body that its parent entered
                return
            self._users -= 1
            if self._users:
                return
            self._stops = None
            watches = self._watches.pop_all()
        watches.close()


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.forget)
