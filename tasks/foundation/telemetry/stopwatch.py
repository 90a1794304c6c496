"""The time of a stage by cause."""

import time
from collections.abc import Callable

from tasks.foundation.telemetry.events import Phase, Sink
from tasks.foundation.telemetry.measurements import seconds_between, sound_seconds


class Stopwatch:
    """Wall-clock seconds by cause. From `begin(cause)` until the next `begin`, all time goes to `cause`.

    Use it in one thread only. Work in other threads, such as an upload, must not begin a cause: its seconds would count
    twice.
    """

    def __init__(self, telemetry: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare the stopwatch. It counts from the first `begin` on.

        Args:
            telemetry: receives a `Phase` for every `begin`.
            clock: monotonic time in seconds.
        """
        self._telemetry = telemetry
        self._clock = clock
        self._laps: dict[str, float] = {}
        self._cause: str | None = None
        self._since = 0.0

    def begin(self, cause: str) -> None:
        """Give the time from now on to `cause`.

        Args:
            cause: one of `contracts.attempt.CAUSES`. If it is the current one, `Phase` is emitted again, because
                another sender may have emitted a different one.
        """
        now = self._clock()
        self._close(now)
        self._cause, self._since = cause, now
        self._telemetry.emit(Phase(cause=cause))

    def move(self, seconds: float, source: str, to: str) -> None:
        """Move past time to another cause, without a `Phase`.

        Args:
            seconds: time to move; at most what `source` has so far.
            source: the cause that it was given to.
            to: the cause that it belongs to.
        """
        seconds = sound_seconds(seconds)
        self._laps[source] = self._laps.get(source, 0.0) - seconds
        self._laps[to] = self._laps.get(to, 0.0) + seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by cause since the first `begin`, up to now."""
        self._close(self._clock())
        # Clocks that disagree about moved time could make a value negative.
        return {cause: max(amount, 0.0) for cause, amount in self._laps.items()}

    def _close(self, now: float) -> None:
        if self._cause is not None:
            self._laps[self._cause] = self._laps.get(self._cause, 0.0) + seconds_between(self._since, now)
            self._since = now
