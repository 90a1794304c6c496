"""The stop requests of work that runs beside the uninterrupted work of a process, in a thread of its own."""

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.stops.process_stop import PROCESS_STOP
from tasks.foundation.stops.stops import Stop, Stops
from tasks.foundation.telemetry.events import Sink

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
