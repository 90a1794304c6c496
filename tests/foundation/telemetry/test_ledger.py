"""The ledger counts every second once, signs for them, and never gets in training's way."""

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tasks.foundation.contracts.attempt import CAUSES, LAUNCH, UNATTRIBUTED, AttemptRecord
from tasks.foundation.errors import StorageError
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.telemetry.events import Committed, Event, Note, Phase, Training
from tasks.foundation.telemetry.ledger import Ledger, sign_interval
from tasks.foundation.telemetry.stopwatch import Stopwatch
from tests.support.ledger_records import NOON, Clock, head_at, ledger_of, written


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def home(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "home")


class Full(LocalStorage):
    """A disk without room."""

    writes = 0

    def write(self, path: str, data: bytes) -> None:
        del path, data
        self.writes += 1
        raise StorageError("no space left on the disk")


def trained(step: int) -> Training:
    return Training(step=step, target=1000, examples_per_second=1.0)


def committed(step: int) -> Committed:
    return Committed(step=step, path="p", size=1, metrics={})


def test_time_goes_to_the_last_phase_from_the_process_start_on(clock: Clock) -> None:
    with ledger_of(clock, age=2.0) as ledger:
        clock.passes(3)
        for cause, seconds in (("compile", 4.0), ("train", 5.0), ("commit", 1.0), ("train", 2.0)):
            ledger.emit(Phase(cause=cause))
            clock.passes(seconds)
        ledger.emit(Note(text="of no account"))
        record = ledger.record()
    assert record.seconds == {"start-up": 5.0, "compile": 4.0, "train": 7.0, "commit": 1.0}
    assert record.wall_seconds == 17.0
    assert record.doing == "train"
    assert record.began == (NOON - timedelta(seconds=2)).isoformat(timespec="milliseconds")


def test_an_unknown_cause_is_shown_as_unattributed(clock: Clock) -> None:
    with ledger_of(clock) as ledger:
        ledger.emit(Phase(cause="coffee"))
        clock.passes(3)
        assert ledger.record().seconds == {UNATTRIBUTED: 3.0}


def test_a_process_that_outlives_its_runs_counts_from_entering(clock: Clock) -> None:
    with Ledger(whole_process=False, clock=clock, now=clock.now, age=lambda: 500.0) as ledger:
        clock.passes(1)
        assert ledger.record().wall_seconds == 1.0


def test_the_time_of_day_may_be_set_without_disturbing_the_sums(clock: Clock) -> None:
    with ledger_of(clock) as ledger:
        ledger.emit(Phase(cause="train"))
        clock.passes(10)
        clock.day -= timedelta(hours=5)
        clock.passes(10)
        assert ledger.record().seconds == {"train": 20.0}


@pytest.mark.parametrize(("seconds", "counted"), [(4, 4.0), (4000, 0.0)])
def test_shutting_down_is_counted_unless_the_process_stays(
    seconds: float, counted: float, clock: Clock, home: LocalStorage
) -> None:
    with ledger_of(clock) as ledger:
        ledger.open(home, head_at(0))
        ledger.end("complete")
    clock.passes(seconds)
    ledger._sign_at_exit()
    assert written(home, ledger.attempt).wall_seconds == counted


def test_only_the_newest_ledger_of_a_process_signs_at_exit(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr("atexit.register", registered.append)
    monkeypatch.setattr("atexit.unregister", lambda call: call in registered and registered.remove(call))
    with ledger_of(clock) as first:
        assert registered == [first._sign_at_exit]
        with Ledger(whole_process=False, clock=clock, now=clock.now):
            assert registered == []
        with ledger_of(clock) as third:
            assert registered == [third._sign_at_exit]


EVENTS = some.one_of(
    some.sampled_from([*CAUSES, "coffee"]).map(lambda cause: Phase(cause=cause)),
    some.integers(0, 50).map(trained),
    some.integers(0, 50).map(committed),
)


@given(some.lists(some.tuples(some.floats(0, 1000), EVENTS)), some.floats(0, 100), some.floats(-1e6, 1e6))
def test_causes_add_up_to_the_wall_whatever_happens(steps: list[tuple[float, Event]], age: float, jump: float) -> None:
    clock = Clock()
    with ledger_of(clock, age) as ledger:
        for seconds, event in steps:
            clock.passes(seconds)
            ledger.emit(event)
            clock.day += timedelta(seconds=jump)
        record = ledger.record()
    # Each cause is rounded to a millisecond.
    assert record.wall_seconds == pytest.approx(age + clock.seconds - 1000.0, abs=0.0005 * len(CAUSES))
    kept = record.seconds.get("train", 0.0) + 0.002
    assert record.uncommitted_seconds + record.discarded_seconds <= kept


@given(some.lists(some.tuples(some.floats(), some.floats(), EVENTS), min_size=1), some.floats())
def test_a_sign_of_life_can_be_written_whatever_its_clocks_say(
    steps: list[tuple[float, float, Event]], age: float
) -> None:
    """Without signs of life a run at work looks dead, and its time is in no account."""
    clock = Clock()
    with ledger_of(clock, age) as ledger:
        for seconds, waited, event in steps:
            clock.seconds = seconds
            ledger.emit(replace(event, input_wait_seconds=waited) if isinstance(event, Training) else event)
            record = AttemptRecord.model_validate_json(ledger.record().to_json())
    assert math.isfinite(record.wall_seconds)


def test_a_commit_settles_what_was_trained_up_to_its_step(clock: Clock) -> None:
    with ledger_of(clock) as ledger:
        ledger.emit(Phase(cause="train"))
        for step in (10, 20, 30):
            clock.passes(5)
            ledger.emit(trained(step))
        assert ledger.record().uncommitted_seconds == 15.0
        ledger.emit(committed(20))  # training went on while it was under way
        assert ledger.record().uncommitted_seconds == 5.0
        clock.passes(1)
        ledger.emit(Phase(cause="commit"))
        clock.passes(4)
        ledger.emit(committed(30))
        record = ledger.record()
    assert (record.uncommitted_seconds, record.committed_step, record.step) == (0.0, 30, 30)


def test_work_that_is_given_up_stays_lost_after_the_next_commit(clock: Clock) -> None:
    with ledger_of(clock) as ledger:
        ledger.emit(Phase(cause="train"))
        for step, seconds in ((10, 5), (20, 5), (30, 5)):
            clock.passes(seconds)
            ledger.emit(trained(step))
            if step == 10:
                ledger.emit(committed(10))
        clock.passes(2)
        ledger.emit(trained(15))  # taken back to step 10
        assert (ledger.record().discarded_seconds, ledger.record().uncommitted_seconds) == (10.0, 2.0)
        ledger.emit(Phase(cause="commit"))
        ledger.emit(committed(15))
        assert (ledger.record().discarded_seconds, ledger.record().uncommitted_seconds) == (10.0, 0.0)


def test_nothing_is_written_before_it_is_opened(clock: Clock, home: LocalStorage) -> None:
    with ledger_of(clock) as ledger:
        ledger.emit(committed(1))
        ledger.sign()
        ledger.end("complete")
    assert not home.root.exists()


def test_opening_signs_at_once_with_where_the_run_stands(clock: Clock, home: LocalStorage) -> None:
    with ledger_of(clock) as ledger:
        ledger.open(home, head_at(200, evaluated=True), afresh=True)
        record = written(home, ledger.attempt)
        ledger.open(home, head_at(300))  # the first look counts
        ledger.sign()
        assert written(home, ledger.attempt).from_step == 200
    assert (record.mark, record.from_step, record.step, record.committed_step) == ("200 evaluated", 200, 200, 200)
    assert record.afresh
    assert record.ended is None


def test_the_end_is_written_with_its_reason_and_the_first_one_stands(clock: Clock, home: LocalStorage) -> None:
    with suppress(SystemExit), ledger_of(clock) as ledger:
        ledger.open(home, head_at(0))
        ledger.end("max_segments")
        assert written(home, ledger.attempt).ended == "max_segments"
        clock.passes(7)
        raise SystemExit(3)
    record = written(home, ledger.attempt)
    assert (record.ended, record.message) == ("max_segments", None)
    assert record.wall_seconds == 7.0


@pytest.mark.parametrize("fault", [ValueError("no <room>"), KeyboardInterrupt(), MemoryError("x" * 5000)])
def test_an_error_is_recorded_whatever_it_is(fault: BaseException, clock: Clock, home: LocalStorage) -> None:
    ledger = ledger_of(clock)
    with suppress(type(fault)), ledger:
        ledger.open(home, head_at(0))
        ledger.emit(Phase(cause="compile"))
        clock.passes(1)
        raise fault
    record = written(home, ledger.attempt)
    assert record.ended == type(fault).__name__
    assert record.message == (str(fault)[:2000] or None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.foundation.telemetry.ledger._SHORTEST_SECONDS", 0.02)


def until(what: str, met: Iterator[bool]) -> None:
    deadline = time.monotonic() + 120
    for yes in met:
        if yes:
            return
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.usefixtures("quick")
def test_signs_come_by_themselves(home: LocalStorage) -> None:
    with Ledger() as ledger:
        ledger.open(home, head_at(0))
        ledger.emit(Phase(cause="train"))
        until("no sign of life came", iter(lambda: written(home, ledger.attempt).doing == "train", None))
        ledger_thread = next(thread for thread in threading.enumerate() if thread.name == "baton-ledger")
        assert ledger_thread.daemon
    until("the thread stays", iter(lambda: not ledger_thread.is_alive(), None))
    assert written(home, ledger.attempt).ended == "left"


def test_a_commit_is_signed_for_at_once(home: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.foundation.telemetry.ledger._SHORTEST_SECONDS", 3600.0)
    with Ledger() as ledger:
        ledger.open(home, head_at(0))
        ledger.emit(committed(7))
        until("the commit was not signed for", iter(lambda: written(home, ledger.attempt).committed_step == 7, None))


@pytest.mark.usefixtures("quick")
def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Full(tmp_path)
    with caplog.at_level(logging.WARNING), Ledger() as ledger:
        ledger.open(full, head_at(0))
        until("it was tried once only", iter(lambda: full.writes >= 3, None))
        ledger.emit(committed(5))
        ledger.end("complete")
    assert [record.message for record in caplog.records] == [
        "this attempt's sign of life could not be written, training goes on: no space left on the disk"
    ]


def test_a_store_that_hangs_does_not_hold_up_the_end(
    clock: Clock, home: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.foundation.telemetry.ledger._PATIENCE_SECONDS", 0.05)
    with ledger_of(clock) as ledger:
        ledger.open(home, head_at(0))
        ledger._writing.acquire()
        ledger.end("complete")
        ledger._writing.release()


def test_events_from_many_threads_lose_no_second(home: LocalStorage) -> None:
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


@pytest.mark.parametrize(("age", "interval"), [(0, 1), (50, 1), (100, 1), (2000, 20), (10**6, 30)])
def test_intervals_grow_with_age(age: float, interval: float) -> None:
    assert sign_interval(age) == interval


class Heard:
    def __init__(self) -> None:
        self.causes: list[str] = []

    def emit(self, event: Event) -> None:
        assert isinstance(event, Phase)
        self.causes.append(event.cause)


def test_a_stopwatch_announces_its_laps_and_adds_up(clock: Clock) -> None:
    heard = Heard()
    watch = Stopwatch(heard, clock)
    clock.passes(100)
    assert watch.seconds == {}
    for cause in ("build", "train", "train", "stage", "train"):
        watch.begin(cause)
        clock.passes(1)
    assert watch.seconds == {"build": 1.0, "train": 3.0, "stage": 1.0}
    clock.passes(1)
    assert watch.seconds["train"] == 4.0
    assert heard.causes == ["build", "train", "train", "stage", "train"]


def test_the_end_of_waiting_for_a_stage_is_signed_for_at_once(
    home: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who dies just then has not died waiting."""
    monkeypatch.setattr("tasks.foundation.telemetry.ledger._SHORTEST_SECONDS", 3600.0)
    with Ledger() as ledger:
        ledger.emit(Phase(cause=LAUNCH))
        ledger.open(home, head_at(0))
        assert written(home, ledger.attempt).doing == LAUNCH
        ledger.emit(Phase(cause="evaluate"))
        until("it still waits", iter(lambda: written(home, ledger.attempt).doing == "evaluate", None))
