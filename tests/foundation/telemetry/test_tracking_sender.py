"""The end of a command does not wait for a tracker that does not respond."""

import threading
import uuid
from collections.abc import Sequence

import pytest

from tasks.foundation.storage.memory import MemoryStorage
from tasks.foundation.telemetry.trackers import Point, TrackedRun, TrackingSender
from tests.foundation.telemetry.test_tracking import Recording, assert_as_logged, train
from tests.support.small_logs import begin


class Slow(Recording):
    """Responds once it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.released = threading.Event(), threading.Event()

    def send(self, points: Sequence[Point]) -> None:
        self.asked.set()
        assert self.released.wait(120)
        super().send(points)


def test_slow_tracker_holds_back_no_end(caplog: pytest.LogCaptureFixture) -> None:
    log = begin(MemoryStorage(uuid.uuid4().hex))
    train(log, 10, 5, 10)
    tracker = Slow()
    sender = TrackingSender(TrackedRun(log, lambda: tracker))
    sender.start()
    assert tracker.asked.wait(120)
    train(log, 20, 20)
    sender.end(0.0)
    assert "the next command on this run sends the rest" in caplog.text
    tracker.released.set()
    sender.join(120)
    assert_as_logged(tracker, log)  # with what was committed meanwhile


def test_end_sends_what_was_committed_last() -> None:
    log = begin(MemoryStorage(uuid.uuid4().hex))
    tracker = Recording()
    sender = TrackingSender(TrackedRun(log, lambda: tracker))
    sender.start()
    train(log, 10, 10)
    sender.end(120.0)
    assert tracker.closed
    assert_as_logged(tracker, log)
