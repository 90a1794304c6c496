"""When a process counts as hung: nothing that it waits for has ended within a limit, counted while the process runs.

An inner loop lasts about a second, or as long as one step, so a short limit applies to it. Six times that limit applies
to what is of unknown length: restore, compilation and the first inner loop after it, evaluation, callbacks, commits. A
process that computes during these is not hung, and none is while bytes of a download arrive. Preparing data, waiting
for a remote stage and what follows the training have no limit: they have limits of their own, or depend on a machine
that may come late. Once the process was asked to stop, an inner loop may last as long as the grace period.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from tasks.foundation.telemetry.events import Committed, Event, Phase, Training, Waiting

_AUTO_SECONDS: Final = 600.0
_AUTO_LOOPS: Final = 20.0
# A limit that the user has set too low for this model would end every attempt.
_LEAST_LOOPS: Final = 3.0
_LONGER: Final = 6.0
# A process that uses more than this share of one processor computes. Heartbeats and polling use less than 0.01.
_COMPUTES: Final = 0.1
_MAX_CHECK_SECONDS, _CHECKS_PER_LIMIT = 5.0, 20.0
_LIMITED: Final = frozenset({"build", "restore", "compile", "train", "stage", "commit", "evaluate"})
_INNER_LOOP: Final = "an inner loop"
_FIRST_INNER_LOOP: Final = "the first inner loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """What did not end.

    Attributes:
        what: an inner loop, a phase of the ledger, or what the training waited for.
        seconds: since the last sign of life.
        limit: in seconds.
        step: the last step that was trained; None if there was none.
    """

    what: str
    seconds: float
    limit: float
    step: int | None

    @property
    def message(self) -> str:
        """One line for people."""
        where = "" if self.step is None else f" after step {self.step}"
        limit = f"limit {self.limit:.0f} s, from stop.hang_seconds"
        if self.what == _INNER_LOOP:
            return f"no inner loop has ended for {self.seconds:.0f} s{where} ({limit})"
        return f"{self.what} has not ended for {self.seconds:.0f} s{where}, and the process does not compute ({limit})"


class HangRule:
    """A `Sink` that follows what the training does, and says when it hangs. All methods are thread-safe.

    Attributes:
        check_seconds: how often to call `check`.
    """

    def __init__(
        self,
        hang_seconds: Literal["auto"] | float | None,
        *,
        clock: Callable[[], float],
        processor_seconds: Callable[[], float],
        downloaded_bytes: Callable[[], int],
        stopping: Callable[[], bool] = lambda: False,
        grace_seconds: float = math.inf,
    ) -> None:
        """Begin without a limit: the process starts up.

        Args:
            hang_seconds: see `StopSpec`.
            clock: monotonic time in seconds.
            processor_seconds: processor time that this process has used so far.
            downloaded_bytes: what this process has downloaded so far.
            stopping: whether the process was asked to stop.
            grace_seconds: an inner loop has no longer limit then, or three times the longest one if that is more.
        """
        self._set = hang_seconds
        self._base = _AUTO_SECONDS if not isinstance(hang_seconds, float) else hang_seconds
        self.check_seconds = min(self._base / _CHECKS_PER_LIMIT, _MAX_CHECK_SECONDS)
        # A check that comes this late means that the process was stopped (SIGSTOP), or the machine suspended.
        self._latest = self.check_seconds + max(self._base / 2, 1.0)
        self._clock, self._processor_seconds, self._downloaded_bytes = clock, processor_seconds, downloaded_bytes
        self._stopping, self._grace = stopping, grace_seconds
        self._lock = threading.RLock()  # reentrant: a signal handler may emit
        self._what: str | None = None
        self._began = self._since = self._checked = clock()
        self._used, self._downloaded = processor_seconds(), downloaded_bytes()
        self._longest = 0.0
        self._first: float | None = None  # duration of the first inner loop, while no other one has ended
        self._compiles = True
        self._step: int | None = None

    def emit(self, event: Event) -> None:
        """Take notice of one event: most are signs of life."""
        with self._lock:
            match event:
                case Phase(cause=cause):
                    self._compiles = self._compiles or cause == "compile"
                    first = _FIRST_INNER_LOOP if self._compiles else _INNER_LOOP
                    self._begin(first if cause == "train" else cause if cause in _LIMITED else None)
                case Waiting(on=on):
                    self._end_inner_loop()  # callbacks follow an inner loop, before its `Training`
                    self._begin(None if on == "a remote stage" else on)
                case Training(step=step):
                    self._end_inner_loop()
                    self._compiles, self._step = False, step
                    self._begin(_INNER_LOOP)
                case Committed() if self._what != _INNER_LOOP:
                    self._since = self._clock()
                case _:
                    pass

    def check(self) -> Hang | None:
        """Return what hangs, if anything does. Call it every `check_seconds`."""
        with self._lock:
            now, used = self._clock(), self._processor_seconds()
            elapsed, computed = now - self._checked, used - self._used
            self._checked, self._used = now, used
            computes = self._what != _INNER_LOOP and computed >= _COMPUTES * elapsed
            downloaded, before = self._downloaded_bytes(), self._downloaded
            self._downloaded = downloaded
            lives = computes or downloaded > before or elapsed > self._latest
            # Time in which this thread did not run may be time in which no thread did.
            missed = max(elapsed - 2 * self.check_seconds, 0.0)
            self._began = min(self._began + missed, now)
            self._since = now if lives else min(self._since + missed, now)
            limit, silent = self.limit, now - self._since
            if self._what is None or limit is None or silent <= limit:
                return None
            return Hang(what=self._what, seconds=silent, limit=limit, step=self._step)

    @property
    def limit(self) -> float | None:
        """Seconds without a sign of life that are allowed now; None: no limit."""
        if self._set is None or self._what is None:
            return None
        loops = _AUTO_LOOPS if self._set == "auto" else _LEAST_LOOPS
        # The first inner loop includes compilation on some devices, so it says little about the others.
        inner = max(self._base, loops * self._longest, _LEAST_LOOPS * (self._first or 0.0))
        if self._what == _INNER_LOOP and self._stopping():
            known = max(self._longest, self._first or 0.0)
            return min(inner, max(self._grace, _LEAST_LOOPS * known))
        return inner if self._what == _INNER_LOOP else _LONGER * inner

    def _begin(self, what: str | None) -> None:
        self._what = what
        self._began = self._since = self._clock()

    def _end_inner_loop(self) -> None:
        """Remember how long the inner loop took, if one ends here."""
        now = self._clock()
        seconds = now - self._began
        if now - self._checked > self._latest:
            return  # the process was stopped meanwhile
        if self._what == _FIRST_INNER_LOOP:
            self._first = seconds
        elif self._what == _INNER_LOOP:
            self._longest, self._first = max(self._longest, seconds), None
