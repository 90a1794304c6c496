"""The thread that saves beside the training: order, failures, signals, and the end of a command."""

import contextvars
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tasks.foundation.checkpoint.save import AsyncSaves
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Commit, Entry
from baton.tasks.foundation.errors import NonFinite, StaleWriter, StorageError
from baton.tasks.foundation.log.fold import fold
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE
from tests.support.clock import FakeClock
from tests.support.small_logs import origin, ref

LONGEST_SECONDS = 60.0


@pytest.fixture
def saves() -> Iterator[AsyncSaves]:
    with AsyncSaves() as made:
        yield made


@pytest.fixture
def deadline() -> Iterator[None]:
    PROCESS_DEADLINE.clear()
    yield
    PROCESS_DEADLINE.clear()


def entry_of(staged: CheckpointRef) -> Entry:
    body = Commit(checkpoint=staged, parent=None, exit_reason="interval")
    return Entry(number=staged.step, time="", attempt=staged.attempt, body=body, head=fold(fold(None, origin()), body))


def save(saves: AsyncSaves, step: int, write: Callable[[], object] = lambda: None) -> None:
    """Begin a save of a step and its commit; `write` runs while it is written."""

    def stage() -> CheckpointRef:
        write()
        return ref(step)

    saves.begin(stage)
    saves.commit(entry_of)


def fail(fault: BaseException) -> Callable[..., Any]:
    def raise_it(*_: object) -> Any:
        raise fault

    return raise_it


class Gate:
    """Work that waits in the thread that saves until the test lets it go."""

    def __init__(self) -> None:
        self._entered, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._entered.set()
        assert self._open.wait(LONGEST_SECONDS)

    def wait_until_entered(self) -> None:
        assert self._entered.wait(LONGEST_SECONDS)

    def open(self) -> None:
        self._open.set()


def test_training_goes_on_while_a_save_is_in_flight(saves: AsyncSaves) -> None:
    gate = Gate()
    save(saves, 1, gate)
    gate.wait_until_entered()
    assert (saves.busy, saves.failed, saves.newest) == (True, False, None)
    gate.open()
    landed = saves.wait()
    assert landed is not None
    assert (landed.number, saves.newest, saves.busy) == (1, landed, False)


def test_second_save_begins_after_the_first_has_landed(saves: AsyncSaves) -> None:
    events: list[object] = []
    gate = Gate()
    save(saves, 1, gate)
    saves.then(lambda entry: events.append(("after", entry.number)))
    opener = threading.Thread(target=lambda: (gate.wait_until_entered(), events.append("opened"), gate.open()))
    opener.start()
    save(saves, 2, lambda: events.append("writing 2"))
    saves.wait()
    opener.join()
    assert events == ["opened", ("after", 1), "writing 2"]


@pytest.mark.parametrize("step", ["write", "commit", "then"])
def test_failure_is_raised_once_and_stops_what_follows(saves: AsyncSaves, step: str) -> None:
    fault, ran = StorageError("no room"), []
    saves.begin(fail(fault) if step == "write" else lambda: ref(1))
    saves.commit(fail(fault) if step == "commit" else entry_of)
    saves.then(fail(fault) if step == "then" else lambda _: ran.append("first"))
    saves.then(lambda _: ran.append("second"))
    with pytest.raises(StorageError, match="no room"):
        saves.wait()
    assert ran == []
    assert (saves.failed, saves.busy) == (False, False)
    assert (saves.newest is None) == (step != "then")
    save(saves, 2)
    landed = saves.wait()
    assert landed is not None
    assert landed.number == 2


def test_begin_raises_the_failure_of_the_save_before(saves: AsyncSaves) -> None:
    saves.begin(fail(StaleWriter("another writer moved the tip")))
    saves.commit(entry_of)
    written = []
    with pytest.raises(StaleWriter, match="another writer"):
        save(saves, 2, lambda: written.append(2))
    assert written == []


Steps = st.lists(st.sampled_from(["save", "bad write", "bad commit", "then", "bad then", "wait"]), max_size=30)


@settings(max_examples=60)
@given(Steps)
def test_any_order_of_calls_loses_no_failure(steps: list[str]) -> None:
    """The model: jobs run in order until one fails; then none until the failure is raised, which happens once."""
    ran: list[str] = []
    failures = raised = 0
    with AsyncSaves() as saves:
        for number, step in enumerate(steps, start=1):
            fault = StorageError(str(number))
            try:
                if step in {"save", "bad write", "bad commit"}:
                    saves.begin(fail(fault) if step == "bad write" else lambda number=number: ref(number))
                    saves.commit(fail(fault) if step == "bad commit" else entry_of)
                    failures += step != "save"
                elif "then" in step:
                    if saves.wait() is None:
                        continue
                    saves.then(fail(fault) if step == "bad then" else lambda _, name=str(number): ran.append(name))
                    failures += step != "then"
                    if step == "then":
                        saves.wait()
                        assert ran[-1] == str(number)
                else:
                    saves.wait()
                    assert not saves.busy
            except StorageError:
                raised += 1
        try:
            saves.wait()
        except StorageError:
            raised += 1
    assert raised == failures


def test_work_sees_the_context_of_its_caller(saves: AsyncSaves) -> None:
    variable = contextvars.ContextVar("variable", default="nothing")
    token = variable.set("flow run")
    seen = []
    saves.begin(lambda: seen.append(variable.get()) or ref(1))
    variable.reset(token)
    saves.wait()
    assert seen == ["flow run"]


def test_thread_that_saves_has_a_lower_priority(saves: AsyncSaves) -> None:
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    there = []
    save(saves, 1, lambda: there.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    saves.wait()
    assert there[0] > here
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == here


def test_refused_priority_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "setpriority", fail(PermissionError("not here")))
    with AsyncSaves() as saves:
        save(saves, 1)
        assert saves.wait() is not None


def test_next_save_takes_the_rest_of_this_one_and_as_long_as_the_last() -> None:
    clock, gate = FakeClock(), Gate()
    with AsyncSaves(clock=clock) as saves:
        assert saves.seconds_of_save() == 0.0
        save(saves, 1, lambda: clock.advance(8.0))
        saves.wait()
        assert saves.seconds_of_save() == 8.0
        save(saves, 2, gate)
        gate.wait_until_entered()
        clock.advance(3.0)
        assert saves.seconds_of_save() == 5.0 + 8.0
        clock.advance(30.0)
        assert saves.seconds_of_save() == 8.0
        gate.open()


def test_first_save_takes_at_least_as_long_as_it_has_taken() -> None:
    clock, gate = FakeClock(), Gate()
    with AsyncSaves(clock=clock) as saves:
        save(saves, 1, gate)
        gate.wait_until_entered()
        clock.advance(4.0)
        assert saves.seconds_of_save() == 4.0
        gate.open()


class GoneError(BaseException):
    """What a signal's handler raises."""


def test_signal_interrupts_waiting_and_breaks_nothing() -> None:
    """A lock that the interrupted thread held would stop the saves forever."""
    gate = Gate()
    before = signal.signal(signal.SIGALRM, fail(GoneError()))
    try:
        with AsyncSaves() as saves:
            save(saves, 1, gate)
            gate.wait_until_entered()
            for _ in range(20):
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                with pytest.raises(GoneError):
                    saves.wait()
            gate.open()
            landed = saves.wait()
            assert landed is not None
            assert landed.number == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_end_of_a_command_waits_for_the_save() -> None:
    gate, landed = Gate(), []
    with AsyncSaves() as saves:
        save(saves, 1, gate)
        saves.then(lambda entry: landed.append(entry.number))
        gate.open()
    assert landed == [1]


def command(body: Callable[[AsyncSaves], None], *, grace_seconds: float = LONGEST_SECONDS) -> None:
    """What the relay does around a command."""
    with AsyncSaves() as saves, PROCESS_DEADLINE.start_on_interrupt(grace_seconds):
        body(saves)


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("fault", [ValueError("a step failed"), GoneError()])
def test_interrupted_command_waits_for_the_save(fault: BaseException) -> None:
    landed: list[int] = []

    def body(saves: AsyncSaves) -> None:
        save(saves, 1)
        saves.then(lambda entry: landed.append(entry.number))
        raise fault

    with pytest.raises(type(fault)):
        command(body)
    assert landed == [1]


def test_failed_save_comes_before_an_error_of_the_training() -> None:
    """The save is of an earlier step. In line, training would not have gone on."""

    def body(saves: AsyncSaves) -> None:
        saves.begin(fail(NonFinite("step 1 holds NaN", step=1)))
        saves.commit(entry_of)
        raise ValueError("a step failed")

    with pytest.raises(NonFinite, match="step 1") as raised:
        command(body)
    assert str(raised.value.__cause__) == "a step failed"


@pytest.mark.usefixtures("deadline")
def test_stop_does_not_wait_longer_than_the_grace_period() -> None:
    gate, all_saves = Gate(), []

    def body(saves: AsyncSaves) -> None:
        all_saves.append(saves)
        save(saves, 1, gate)
        gate.wait_until_entered()
        raise GoneError

    with pytest.raises(GoneError):
        command(body, grace_seconds=0.01)
    assert all_saves[0].busy
    gate.open()


@pytest.mark.usefixtures("deadline")
def test_stop_reports_a_failed_save_and_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    def body(saves: AsyncSaves) -> None:
        saves.begin(fail(StorageError("no room")))
        raise GoneError

    with pytest.raises(GoneError):
        command(body)
    assert "the save in flight was not committed: no room" in caplog.text


def test_no_save_begins_after_the_end() -> None:
    with AsyncSaves() as saves:
        pass
    with pytest.raises(AssertionError, match="after the end of the command"):
        save(saves, 1)


def test_thread_keeps_no_reference_to_a_finished_save(saves: AsyncSaves) -> None:
    """A snapshot is as large as the state."""
    gone: queue.SimpleQueue[None] = queue.SimpleQueue()

    class Snapshot:
        def __del__(self) -> None:
            gone.put(None)

    def begin() -> None:
        snapshot = Snapshot()
        saves.begin(lambda: (snapshot, ref(1))[1])
        saves.commit(entry_of)

    begin()
    saves.wait()
    gone.get(timeout=LONGEST_SECONDS)
