"""Compares the speed of arms that train by turns: one trains until its next rows, and all others are stopped.

A machine that others share is faster in one minute than in the next, by more than the arms differ: two equal arms, one
after the other, can be 10 % apart. Turns of seconds have the same minutes. What is left is noise of single turns, which
many turns average out.

What an arm does by the clock, and not by steps, comes more often in short turns: Prefect's server and recorder are
stopped with the training, and then do what is due. Arms that have them need turns of many seconds.
"""

import contextlib
import os
import signal
import statistics
import threading
from collections.abc import Mapping, Sequence

from tests.benchmarks.process import Arm, Trace
from tests.support.forked import descendants

# The first rows have the tracing behind them, and Baton's first commit beside them.
_ROWS_BEFORE = 4
_SECONDS = 7200.0


def by_turns(arms: Mapping[str, Arm], *, turns: int, rows: int = 1) -> dict[str, list[float]]:
    """Start all arms, and let each in turn train for some rows.

    The row in which an arm was stopped is not measured: it is trained to its end first.

    Args:
        arms: processes that print rows of metrics without end.
        turns: how often each of them trains.
        rows: that are measured in each turn.

    Returns:
        The seconds of these rows, for each arm and turn.

    Raises:
        ArmFailed: an arm ended.
    """
    trained: dict[str, _Stoppable] = {}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    try:
        for name, arm in arms.items():
            trained[name] = _Stoppable(arm)
            trained[name].wait_for_rows(_ROWS_BEFORE)
            trained[name].send(signal.SIGSTOP)
        for turn in range(turns):
            for name in list(arms)[:: -1 if turn % 2 else 1]:
                process = trained[name]
                process.send(signal.SIGCONT)
                times = process.wait_for_rows(process.rows + 1 + rows)
                process.send(signal.SIGSTOP)
                seconds[name].append(times[-1] - times[-1 - rows])
    finally:
        for process in trained.values():
            process.end()
    return seconds


def ratios(rounds: Sequence[Mapping[str, Sequence[float]]], one: str, other: str) -> list[float]:
    """For each round, the median over its turns of the seconds of one arm over those of another."""
    return [statistics.median(a / b for a, b in zip(found[one], found[other], strict=True)) for found in rounds]


class _Stoppable:
    """An arm that runs beside this thread."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self._pid = 0
        self._times: list[float] = []
        self._over = False
        self._fault: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=arm.name)
        self._thread.start()

    @property
    def rows(self) -> int:
        """How many rows it has printed."""
        return len(self._times)

    def wait_for_rows(self, count: int) -> list[float]:
        """The times of its first `count` rows, once they are printed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._times) >= count or self._fault is not None)
            if self._fault is not None:
                raise self._fault
            return self._times[:count]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        for pid in (self._pid, *descendants(self._pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Let it train to its next row, where it is killed."""
        self._over = True
        if self._pid:
            self.send(signal.SIGCONT)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._arm.run(self._note, seconds=_SECONDS)
        except BaseException as fault:  # noqa: BLE001 - raised in the thread that waits
            with self._changed:
                self._fault = fault
                self._changed.notify_all()

    def _note(self, trace: Trace) -> bool:
        with self._changed:
            self._pid, self._times = trace.pid, list(trace.rows.values())
            self._changed.notify_all()
        return self._over
