"""The ledger writes heartbeats and the end, and nothing before it is opened."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from baton.tasks.foundation.contracts.attempt import LAUNCH, MOST_SAMPLES, UsageSample, with_sample
from baton.tasks.foundation.errors import StorageError
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Committed, Phase
from baton.tasks.foundation.telemetry.ledger import Ledger, heartbeat_interval
from tests.support.clock import FakeClock
from tests.support.ledger_records import head_at, ledger_of, written


class Full(LocalStorage):
    """A full disk."""

    writes = 0

    def write(self, path: str, data: bytes) -> None:
        del path, data
        self.writes += 1
        raise StorageError("no space left on the disk")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def home(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "home")


def committed(step: int) -> Committed:
    return Committed(step=step, path="p", size=1, metrics={})


def test_nothing_is_written_before_opening(clock: FakeClock, home: LocalStorage) -> None:
    with ledger_of(clock) as ledger:
        ledger.emit(committed(1))
        ledger.heartbeat()
        ledger.end("complete")
    assert not home.root.exists()


def test_opening_writes_a_heartbeat_with_the_mark(clock: FakeClock, home: LocalStorage) -> None:
    with ledger_of(clock) as ledger:
        ledger.open(home, head_at(200, evaluated=True), afresh=True)
        record = written(home, ledger.attempt)
        ledger.open(home, head_at(300))  # ignored: only the first call counts
        ledger.heartbeat()
        assert written(home, ledger.attempt).from_step == 200
    assert (record.mark, record.from_step, record.step, record.committed_step) == ("200 evaluated", 200, 200, 200)
    assert record.afresh
    assert record.ended is None


def test_end_is_written_with_its_first_reason(clock: FakeClock, home: LocalStorage) -> None:
    with suppress(SystemExit), ledger_of(clock) as ledger:
        ledger.open(home, head_at(0))
        ledger.end("max_segments")
        assert written(home, ledger.attempt).ended == "max_segments"
        clock.advance(7)
        raise SystemExit(3)
    record = written(home, ledger.attempt)
    assert (record.ended, record.message) == ("max_segments", None)
    assert record.wall_seconds == 7.0


@pytest.mark.parametrize("fault", [ValueError("no <room>"), KeyboardInterrupt(), MemoryError("x" * 5000)])
def test_every_kind_of_error_is_recorded(fault: BaseException, clock: FakeClock, home: LocalStorage) -> None:
    ledger = ledger_of(clock)
    with suppress(type(fault)), ledger:
        ledger.open(home, head_at(0))
        ledger.emit(Phase(cause="compile"))
        clock.advance(1)
        raise fault
    record = written(home, ledger.attempt)
    assert record.ended == type(fault).__name__
    assert record.message == (str(fault)[:2000] or None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats without waiting. The interval grows with the age of the process, and that of the tests is old."""
    monkeypatch.setattr("baton.tasks.foundation.telemetry.ledger._MIN_INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr("baton.tasks.foundation.telemetry.ledger._SHARE_OF_AGE", 0.0)


def until(what: str, met: Iterator[bool]) -> None:
    deadline = time.monotonic() + 120
    for yes in met:
        if yes:
            return
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.usefixtures("quick")
def test_heartbeats_are_written_at_intervals(home: LocalStorage) -> None:
    with Ledger() as ledger:
        ledger.open(home, head_at(0))
        ledger.emit(Phase(cause="train"))
        until("no heartbeat was written", iter(lambda: written(home, ledger.attempt).doing == "train", None))
        ledger_thread = next(thread for thread in threading.enumerate() if thread.name == "baton-ledger")
        assert ledger_thread.daemon
    until("the thread stays", iter(lambda: not ledger_thread.is_alive(), None))
    assert written(home, ledger.attempt).ended == "left"


def test_samples_of_a_long_process_are_merged() -> None:
    samples: tuple[UsageSample, ...] = ()
    for number in range(1, 1001):
        newest = UsageSample(seconds=10.0 * number, cpu=float(number % 2), memory_bytes=number)
        samples = with_sample(samples, newest)
        assert len(samples) <= MOST_SAMPLES
        assert samples[-1].seconds == newest.seconds
    began = [0.0, *(each.seconds for each in samples)]
    used = sum(each.cpu * (each.seconds - start) for each, start in zip(samples, began, strict=False))
    assert used == pytest.approx(5000.0)
    assert max(each.memory_bytes for each in samples) == 1000


def test_commit_causes_a_heartbeat(home: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.tasks.foundation.telemetry.ledger._MIN_INTERVAL_SECONDS", 3600.0)
    with Ledger() as ledger:
        ledger.open(home, head_at(0))
        ledger.emit(committed(7))
        until("the commit caused no heartbeat", iter(lambda: written(home, ledger.attempt).committed_step == 7, None))


@pytest.mark.usefixtures("quick")
def test_full_disk_is_logged_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Full(tmp_path)
    with caplog.at_level(logging.WARNING), Ledger() as ledger:
        ledger.open(full, head_at(0))
        until("it was tried only once", iter(lambda: full.writes >= 3, None))
        ledger.emit(committed(5))
        ledger.end("complete")
    [warning] = [record.message for record in caplog.records]
    assert warning.startswith("the attempt's record could not be written, which no training needs; ")
    assert warning.endswith(": no space left on the disk")


def test_hanging_store_does_not_delay_the_end(
    clock: FakeClock, home: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.tasks.foundation.telemetry.ledger._WRITE_SECONDS", 0.05)
    with ledger_of(clock) as ledger:
        ledger.open(home, head_at(0))
        ledger._writing.acquire()
        ledger.end("complete")
        ledger._writing.release()


@pytest.mark.parametrize(("age", "interval"), [(0, 1), (50, 1), (100, 1), (2000, 20), (10**6, 30)])
def test_heartbeat_interval_grows_with_age(age: float, interval: float) -> None:
    assert heartbeat_interval(age) == interval


def test_end_of_waiting_for_a_stage_causes_a_heartbeat(home: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a process that is killed then must not show a wait."""
    monkeypatch.setattr("baton.tasks.foundation.telemetry.ledger._MIN_INTERVAL_SECONDS", 3600.0)
    with Ledger() as ledger:
        ledger.emit(Phase(cause=LAUNCH))
        ledger.open(home, head_at(0))
        assert written(home, ledger.attempt).doing == LAUNCH
        ledger.emit(Phase(cause="evaluate"))
        until("it still waits", iter(lambda: written(home, ledger.attempt).doing == "evaluate", None))
