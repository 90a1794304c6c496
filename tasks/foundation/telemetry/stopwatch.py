"""Where a stage's own time goes: laps by cause, each of them announced."""

import time
from collections.abc import Callable

from tasks.foundation.telemetry.events import Phase, Sink
from tasks.foundation.telemetry.measurements import seconds_between, sound_seconds


class Stopwatch:
    """Wall-clock seconds by cause. From `begin(cause)` until the next one all time goes to `cause`.

    It belongs to one thread. What runs beside it in another thread (an upload, say) begins no lap of its own:
    otherwise one second would be counted twice.
    """

    def __init__(self, telemetry: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is counted before the first `begin`.

        Args:
            telemetry: is told of every change of cause.
            clock: seconds, never going back.
        """
        self._telemetry = telemetry
        self._clock = clock
        self._laps: dict[str, float] = {}
        self._cause: str | None = None
        self._since = 0.0

    def begin(self, cause: str) -> None:
        """Close the lap before, and give time to `cause` from now on.

        Args:
            cause: one of `contracts.attempt.CAUSES`; the one that runs already goes on. It is announced all the same:
                somebody else may have announced another one meanwhile.
        """
        now = self._clock()
        self._close(now)
        self._cause, self._since = cause, now
        self._telemetry.emit(Phase(cause=cause))

    def move(self, seconds: float, source: str, to: str) -> None:
        """Give time to another cause afterwards, when it is known; it is not announced.

        Args:
            seconds: how much, of laps that `source` has had by now.
            source: the cause that it went to.
            to: the cause that it belongs to.
        """
        seconds = sound_seconds(seconds)
        self._laps[source] = self._laps.get(source, 0.0) - seconds
        self._laps[to] = self._laps.get(to, 0.0) + seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by cause since the first `begin`, the running lap up to this moment included; they add up."""
        self._close(self._clock())
        # Less than nothing is left where two clocks disagree on what was moved.
        return {cause: max(amount, 0.0) for cause, amount in self._laps.items()}

    def _close(self, now: float) -> None:
        if self._cause is not None:
            self._laps[self._cause] = self._laps.get(self._cause, 0.0) + seconds_between(self._since, now)
            self._since = now
