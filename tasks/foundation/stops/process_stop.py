"""The stop requests, work thread and exit of a process: the only mutable global state of `stops/`.

A process has one main thread, which receives its signals, and one terminal. So it runs one piece of uninterrupted work
at a time, in one thread.
"""

import queue
import threading
from collections.abc import Callable

from tasks.foundation.stops.stops import Stop, Stops


def no_save() -> bool:
    """No save is in flight."""
    return False


class ProcessStop:
    """The stop requests of a process, past and present.

    Attributes:
        current: of the work that runs uninterrupted now; None if none does. Work within work joins it.
        before_exit: called when a second SIGINT ends the process at once.
        terminal_closed: whether a SIGHUP has arrived.
        signals: descriptor to which each signal that arrives is written; None while nothing waits for them.
        signalled: whether a signal has asked this process to stop.
        save_in_flight: whether the committer has a save that has not landed.
    """

    def __init__(self) -> None:
        self.current: Stops | None = None
        self.before_exit: list[Callable[[], None]] = []
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
