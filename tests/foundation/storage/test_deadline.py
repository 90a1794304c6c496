"""The deadline of the process: wakes sleeping threads, never moves later, and starts when a command is interrupted."""

import threading
from types import SimpleNamespace

import pytest

from baton.tasks.foundation.storage import transfers
from baton.tasks.foundation.storage.transfers import Deadline


def test_deadline_wakes_sleepers_and_earliest_wins() -> None:
    deadline = Deadline()
    woken = threading.Event()
    thread = threading.Thread(target=lambda: (deadline.sleep(600), woken.set()), daemon=True)
    thread.start()
    deadline.start(0.05)
    assert woken.wait(60)
    deadline.start(500)
    assert deadline.remaining() <= 0.05
    for interrupt, is_set in ((KeyboardInterrupt(), True), (ValueError(), False)):
        command = deadline.for_command(7)
        with pytest.raises(type(interrupt)), command:
            raise interrupt
        assert deadline.is_set is is_set


def test_retries_still_wait_within_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was asked to stop does not flood a store that fails: each wait lasts, up to the deadline."""
    slept: list[float] = []
    monkeypatch.setattr(transfers, "time", SimpleNamespace(sleep=slept.append))
    deadline = Deadline(lambda: 1000.0)
    deadline.start(10)
    deadline.sleep(4)
    deadline.sleep(600)
    assert slept == [4, 10]
