"""The stopwatch of a stage."""

from tasks.foundation.telemetry.events import Phase
from tasks.foundation.telemetry.ledger import Stopwatch
from tests.support.clock import FakeClock
from tests.support.event_recorder import EventRecorder


def test_stopwatch_emits_phases_and_adds_up() -> None:
    clock, recorder = FakeClock(), EventRecorder()
    watch = Stopwatch(recorder, clock)
    clock.advance(100)
    assert watch.seconds == {}
    for cause in ("build", "train", "train", "stage", "train"):
        watch.begin(cause)
        clock.advance(1)
    assert watch.seconds == {"build": 1.0, "train": 3.0, "stage": 1.0}
    clock.advance(1)
    assert watch.seconds["train"] == 4.0
    assert [event.cause for event in recorder.events if isinstance(event, Phase)] == [
        "build",
        "train",
        "train",
        "stage",
        "train",
    ]
