"""The ledger and the stopwatch count every second once; heartbeats are written, and nothing ends the training."""

import math
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from baton.tasks.foundation.contracts.attempt import CAUSES, UNATTRIBUTED, AttemptRecord
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Committed, Event, Note, Phase, Training
from baton.tasks.foundation.telemetry.ledger import Ledger, Stopwatch
from tests.support.clock import NOON, FakeClock
from tests.support.event_recorder import EventRecorder
from tests.support.ledger_records import head_at, ledger_of, written


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def home(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "home")


def trained(step: int) -> Training:
    return Training(step=step, target=1000, examples_per_second=1.0)


def committed(step: int) -> Committed:
    return Committed(step=step, path="p", size=1, metrics={})


def test_time_from_process_start_goes_to_the_last_phase(clock: FakeClock) -> None:
    with ledger_of(clock, age=2.0) as ledger:
        clock.advance(3)
        for cause, seconds in (("compile", 4.0), ("train", 5.0), ("commit", 1.0), ("train", 2.0)):
            ledger.emit(Phase(cause=cause))
            clock.advance(seconds)
        ledger.emit(Note(text="of no account"))
        record = ledger.record()
    assert record.seconds == {"start-up": 5.0, "compile": 4.0, "train": 7.0, "commit": 1.0}
    assert record.wall_seconds == 17.0
    assert record.doing == "train"
    assert record.began == (NOON - timedelta(seconds=2)).isoformat(timespec="milliseconds")


def test_unknown_cause_counts_as_unattributed(clock: FakeClock) -> None:
    with ledger_of(clock) as ledger:
        ledger.emit(Phase(cause="coffee"))
        clock.advance(3)
        assert ledger.record().seconds == {UNATTRIBUTED: 3.0}


def test_long_lived_process_counts_from_entering(clock: FakeClock) -> None:
    with Ledger(whole_process=False, clock=clock, now=clock.now, age=lambda: 500.0) as ledger:
        clock.advance(1)
        assert ledger.record().wall_seconds == 1.0


def test_setting_the_wall_clock_changes_no_sum(clock: FakeClock) -> None:
    with ledger_of(clock) as ledger:
        ledger.emit(Phase(cause="train"))
        clock.advance(10)
        clock.day -= timedelta(hours=5)
        clock.advance(10)
        assert ledger.record().seconds == {"train": 20.0}


@pytest.mark.parametrize(("seconds", "counted"), [(4, 4.0), (4000, 0.0)])
def test_shut_down_counts_unless_the_process_stays(
    seconds: float, counted: float, clock: FakeClock, home: LocalStorage
) -> None:
    with ledger_of(clock) as ledger:
        ledger.open(home, head_at(0))
        ledger.end("complete")
    clock.advance(seconds)
    ledger._write_at_exit()
    assert written(home, ledger.attempt).wall_seconds == counted


def test_only_the_newest_ledger_writes_at_exit(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr("atexit.register", registered.append)
    monkeypatch.setattr("atexit.unregister", lambda call: call in registered and registered.remove(call))
    with ledger_of(clock) as first:
        assert registered == [first._write_at_exit]
        with Ledger(whole_process=False, clock=clock, now=clock.now):
            assert registered == []
        with ledger_of(clock) as third:
            assert registered == [third._write_at_exit]


EVENTS = some.one_of(
    some.sampled_from([*CAUSES, "coffee"]).map(lambda cause: Phase(cause=cause)),
    some.integers(0, 50).map(trained),
    some.integers(0, 50).map(committed),
)


@given(some.lists(some.tuples(some.floats(0, 1000), EVENTS)), some.floats(0, 100), some.floats(-1e6, 1e6))
def test_causes_add_up_to_the_wall_clock(steps: list[tuple[float, Event]], age: float, jump: float) -> None:
    clock = FakeClock()
    with ledger_of(clock, age) as ledger:
        for seconds, event in steps:
            clock.advance(seconds)
            ledger.emit(event)
            clock.day += timedelta(seconds=jump)
        record = ledger.record()
    # Each cause is rounded to a millisecond.
    assert record.wall_seconds == pytest.approx(age + clock.seconds - 1000.0, abs=0.0005 * len(CAUSES))
    kept = record.seconds.get("train", 0.0) + 0.002
    assert record.uncommitted_seconds + record.discarded_seconds <= kept


@given(some.lists(some.tuples(some.floats(), some.floats(), EVENTS), min_size=1), some.floats())
def test_heartbeat_is_written_whatever_the_clocks_say(steps: list[tuple[float, float, Event]], age: float) -> None:
    """Without heartbeats a running attempt looks dead, and its time is not counted."""
    clock = FakeClock()
    with ledger_of(clock, age) as ledger:
        for seconds, waited, event in steps:
            clock.seconds = seconds
            ledger.emit(replace(event, input_wait_seconds=waited) if isinstance(event, Training) else event)
            record = AttemptRecord.model_validate_json(ledger.record().to_json())
    assert math.isfinite(record.wall_seconds)


def test_commit_covers_training_up_to_its_step(clock: FakeClock) -> None:
    with ledger_of(clock) as ledger:
        ledger.emit(Phase(cause="train"))
        for step in (10, 20, 30):
            clock.advance(5)
            ledger.emit(trained(step))
        assert ledger.record().uncommitted_seconds == 15.0
        ledger.emit(committed(20))  # training continued during the commit
        assert ledger.record().uncommitted_seconds == 5.0
        clock.advance(1)
        ledger.emit(Phase(cause="commit"))
        clock.advance(4)
        ledger.emit(committed(30))
        record = ledger.record()
    assert (record.uncommitted_seconds, record.committed_step, record.step) == (0.0, 30, 30)


def test_discarded_work_stays_lost_after_the_next_commit(clock: FakeClock) -> None:
    with ledger_of(clock) as ledger:
        ledger.emit(Phase(cause="train"))
        for step, seconds in ((10, 5), (20, 5), (30, 5)):
            clock.advance(seconds)
            ledger.emit(trained(step))
            if step == 10:
                ledger.emit(committed(10))
        clock.advance(2)
        ledger.emit(trained(15))  # after going back to step 10
        assert (ledger.record().discarded_seconds, ledger.record().uncommitted_seconds) == (10.0, 2.0)
        ledger.emit(Phase(cause="commit"))
        ledger.emit(committed(15))
        assert (ledger.record().discarded_seconds, ledger.record().uncommitted_seconds) == (10.0, 0.0)


def test_events_of_many_threads_lose_no_second(home: LocalStorage) -> None:
    began = time.monotonic()
    with Ledger(whole_process=False) as ledger:
        ledger.open(home, head_at(0))

        def work(seed: int) -> None:
            for number in range(500):
                ledger.emit(Phase(cause=CAUSES[(seed + number) % len(CAUSES)]))
                ledger.emit(trained(number))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        record = ledger.record()
        took = time.monotonic() - began
    assert took - 1.0 < record.wall_seconds <= took + 0.006


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
