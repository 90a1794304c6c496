"""The curves of a run for a tracking server, made from its log, and the thread that sends them.

Nothing but the tracker itself remembers what it has. A process first compares the tracker's points with the log, and
sends those that are missing; so a kill at any moment neither loses nor repeats a point. A rewind or a quarantine can
abandon points that were sent. The tracker then starts over. No training and no commit waits for it.
"""

import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from tasks.foundation.contracts.log_entry import Commit, Entry, Evaluation, EvaluationOnTest, Quarantine, Rewind
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.telemetry.curves import training_curves

_LOGGER = logging.getLogger(__name__)
# Trackers accept these characters in the name of a metric, on every system.
_REFUSED = re.compile(r"[^\w\-. /]", re.ASCII)


@dataclass(frozen=True, slots=True)
class PointKey:
    """What a point is known by.

    Attributes:
        name: train/, validation/ or test/ and the metric.
        step: training step.
        milliseconds: POSIX time of the log entry that the point is from.
    """

    name: str
    step: int
    milliseconds: int


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric."""

    key: PointKey
    value: float


class Tracker(Protocol):
    """A tracking server or store that has one run of its own for each of Baton's."""

    def keys(self) -> Collection[PointKey]:
        """Return what the tracker has of the run; nothing if it does not know the run."""

    def send(self, points: Sequence[Point]) -> None:
        """Add points that it does not have."""

    def start_over(self) -> None:
        """Withdraw everything it has of the run."""

    def close(self) -> None:
        """Write what is buffered; a later call of `keys` begins anew."""


class TrackedRun:
    """Keeps a tracker up to date with the log of a run. Not thread-safe.

    After the first update, an update reads the new entries only, unless the run was rewound.
    """

    def __init__(self, log: RunLog, connect: Callable[[], Tracker]) -> None:
        """Read and send nothing yet.

        Args:
            log: of the run; no other thread uses it.
            connect: makes the tracker, once the run has begun.
        """
        self._log = log
        self._connect = connect
        self._tracker: Tracker | None = None
        self._done: int | None = None  # number of the entry up to which the tracker is up to date
        self._lineage: set[str] = set()  # paths of the checkpoints that lead to the tip
        self._warned = ""

    def update(self) -> bool:
        """Send what is missing. What fails causes a warning, not an error, and is sent by the next update.

        Returns:
            Whether the tracker now has all of the log.
        """
        try:
            self._update()
        except Exception as fault:  # noqa: BLE001 - a tracker's client may raise anything, and must not end the training
            self._done = None  # some points may have arrived
            text = f"{type(fault).__name__}: {fault}"
            if text != self._warned:
                _LOGGER.warning("could not send the curves; trying again after the next commit: %s", text)
            self._warned = text
            return False
        return True

    def close(self) -> bool:
        """Update once more, and close the tracker. What fails causes a warning.

        Returns:
            Whether the tracker has all of the log.
        """
        is_sent = self.update()
        try:
            if self._tracker is not None:
                self._tracker.close()
        except Exception as fault:  # noqa: BLE001 - as above
            _LOGGER.warning("could not close the tracker: %s: %s", type(fault).__name__, fault)
            return False
        return is_sent

    def _update(self) -> None:
        head = self._log.head()
        if head is None or head.number == self._done:
            return
        new = None
        if self._done is not None:
            new = [self._log.entry(number) for number in range(self._done + 1, head.number + 1)]
            if any(isinstance(entry.body, Rewind | Quarantine) for entry in new):
                new = None
        if new is None:
            self._compare([entry for entry in self._log.entries(blocks="read") if entry.number <= head.number])
        else:
            self._lineage |= {entry.body.checkpoint.path for entry in new if isinstance(entry.body, Commit)}
            self._send(_points(new, self._lineage))
        self._done = head.number

    def _compare(self, entries: Sequence[Entry]) -> None:
        self._lineage = _lineage(entries)
        points = list(_points(entries, self._lineage))
        self._tracker = self._connect() if self._tracker is None else self._tracker
        there = set(self._tracker.keys())
        if there - {point.key for point in points}:
            self._tracker.start_over()
            there = set()
        self._send(point for point in points if point.key not in there)

    def _send(self, points: Iterable[Point]) -> None:
        waiting = list(points)
        if waiting and self._tracker is not None:
            self._tracker.send(waiting)


def _lineage(entries: Sequence[Entry]) -> set[str]:
    parents = {entry.body.checkpoint.path: entry.body.parent for entry in entries if isinstance(entry.body, Commit)}
    tip = entries[-1].head.tip
    path, lineage = None if tip is None else tip.path, set[str]()
    while path is not None and path not in lineage:
        lineage.add(path)
        path = parents.get(path)
    return lineage


def _points(entries: Iterable[Entry], lineage: Collection[str]) -> Iterable[Point]:
    """The points of the entries about checkpoints that lead to the tip."""
    for entry in entries:
        time = _milliseconds(entry)
        match entry.body:
            case Commit(checkpoint=checkpoint) if checkpoint.path in lineage:
                for step, values in training_curves(entry, entry.body):
                    for name, value in values.items():
                        yield Point(PointKey(_name("train", name), step, time), value)
            case Evaluation(checkpoint=checkpoint, metrics=metrics) if checkpoint.path in lineage:
                for name, value in metrics.items():
                    yield Point(PointKey(_name("validation", name), checkpoint.step, time), value)
            case EvaluationOnTest(checkpoint=checkpoint, metrics=metrics) if checkpoint.path in lineage:
                for name, value in metrics.items():
                    yield Point(PointKey(_name("test", name), checkpoint.step, time), value)
            case _:
                pass


def _name(part: str, metric: str) -> str:
    return f"{part}/{_REFUSED.sub('_', metric)}"


def _milliseconds(entry: Entry) -> int:
    """POSIX time of an entry; 0 if it cannot be read."""
    try:
        return max(0, int(datetime.fromisoformat(entry.time).timestamp() * 1000))
    except (ValueError, OverflowError):
        return 0


class TrackingSender(threading.Thread):
    """Updates a tracker now, whenever there is news, and at the end.

    It is a daemon: a server that does not respond must not keep the process.

    Attributes:
        news: set when the log has grown.
    """

    def __init__(self, tracked: TrackedRun) -> None:
        """Send nothing before it is started.

        Args:
            tracked: only this thread uses it.
        """
        super().__init__(name="baton-tracking", daemon=True)
        self.news = threading.Event()
        self.news.set()
        self._tracked = tracked
        self._ending = False
        self._is_sent = False

    def run(self) -> None:
        """Update until told to end; then once more, and close the tracker."""
        while True:
            self.news.wait()
            self.news.clear()
            ending = self._ending  # read first: news after it is seen by the next round
            if ending:
                self._is_sent = self._tracked.close()
                return
            self._tracked.update()

    def end(self, seconds: float) -> None:
        """Update once more, and wait for it at most for `seconds`. A warning says if not everything was sent."""
        self._ending = True
        self.news.set()
        self.join(seconds)
        if self.is_alive() or not self._is_sent:
            _LOGGER.warning("the tracker does not have all curves; the next command on this run sends the rest")
