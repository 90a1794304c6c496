"""Whatever Prefect does, a stage runs exactly once, at once, and its answer or its error is kept."""

import contextvars
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import Task
from prefect.client.schemas.objects import State

from baton.flows.runner import InProcess
from baton.flows.with_prefect.task_runs import PrefectStatus, PrefectTasks
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall
from baton.tasks.foundation.errors import StaleWriter
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.telemetry.events import Event, Note, StageBegun
from tests.support import forked
from tests.support.clock import FakeClock
from tests.support.fake_prefect_api import DATASET
from tests.support.lab import spec_of
from tests.support.prefect_server import environment_with

A_LONG_TIME = 60.0
REFUSED = ConnectionError("refused")
ABSENT = "Prefect is not responding and does not record what is done; the run continues"
CALL = PrepareDataCall(spec=spec_of("plain"))
NUMBER = contextvars.ContextVar[int]("number")


class WarningRecorder:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def emit(self, event: Event) -> None:
        assert isinstance(event, Note)
        assert event.warning
        self.texts.append(event.text)


class CountingStage:
    """A stage that counts its runs."""

    def __init__(self, fault: BaseException | None = None, work: Callable[[], object] = lambda: None) -> None:
        self.runs = 0
        self.fault = fault
        self.inner = work
        self.stage = Stage(
            name="prepare_data",
            call=PrepareDataCall,
            answer=DatasetRef,
            load=lambda: self.work,
            subject=lambda call: call.spec.run,
        )

    def work(self, _call: PrepareDataCall, _place: Place) -> DatasetRef:
        self.runs += 1
        self.inner()
        if self.fault is not None:
            raise self.fault
        return DATASET

    def run(self, tasks: PrefectTasks) -> DatasetRef:
        place = Place.of(MemoryStorage("tests"), "run", code_folder=Path(), telemetry=tasks)
        return InProcess().run(self.stage, CALL, place)


class FakeEngine:
    """In place of Prefect's engine: can hang or fail before a task's body, and fail after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: Exception | None = None
        self.after: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.names: list[str] = []
        self.states: list[State[Any]] = []
        self.on_call: Callable[[], None] = lambda: None
        monkeypatch.setattr(Task, "__call__", lambda task, wait_for: self.call(task))  # noqa: ARG005 - a method of the task

    def call(self, task: Task[..., Any]) -> None:
        assert callable(task.task_run_name)
        self.names.append(task.task_run_name())
        assert self.answers.wait(A_LONG_TIME)
        self.on_call()
        if self.before is not None:
            raise self.before
        self.states.append(task.fn())
        if self.after is not None:
            raise self.after


def recording_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "baton-prepare-data"]


@pytest.fixture
def warnings() -> WarningRecorder:
    return WarningRecorder()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    return FakeEngine(monkeypatch)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("responds", [True, False])
def test_stage_runs_once_when_prefect_fails(
    when: str, responds: bool, engine: FakeEngine, warnings: WarningRecorder
) -> None:
    work = CountingStage()
    setattr(engine, when, REFUSED)
    tasks = PrefectTasks(warnings, PrefectStatus(lambda: responds))
    assert work.run(tasks) == DATASET
    tasks.close(A_LONG_TIME)
    assert work.runs == 1
    unrecorded = "Prefect could not record prepare-data (ConnectionError: refused); the run continues"
    assert warnings.texts == [unrecorded if responds else ABSENT]


@pytest.mark.parametrize("after", [None, REFUSED])
@pytest.mark.parametrize(("fault", "state"), [(StaleWriter("another"), "FAILED"), (SystemExit(1), "CRASHED")])
def test_error_of_the_stage_is_raised(
    fault: BaseException, state: str, after: Exception | None, engine: FakeEngine, warnings: WarningRecorder
) -> None:
    work = CountingStage(fault)
    engine.after = after
    tasks = PrefectTasks(warnings, PrefectStatus(lambda: True))
    with pytest.raises(type(fault)) as raised:
        work.run(tasks)
    tasks.close(A_LONG_TIME)
    assert raised.value is fault
    assert work.runs == 1
    assert [each.type for each in engine.states] == [state]
    assert str(engine.states[0].message).startswith(type(fault).__name__)


def test_stage_that_a_signal_stopped_has_not_crashed(engine: FakeEngine, warnings: WarningRecorder) -> None:
    work = CountingStage(KeyboardInterrupt())
    tasks = PrefectTasks(warnings, PrefectStatus(lambda: True))
    with pytest.raises(KeyboardInterrupt):
        work.run(tasks)
    tasks.close(A_LONG_TIME)
    assert [(state.name, state.is_completed()) for state in engine.states] == [("Stopped", True)]


def test_absence_is_reported_once_until_prefect_is_back(engine: FakeEngine, warnings: WarningRecorder) -> None:
    work = CountingStage()
    tasks = PrefectTasks(warnings, PrefectStatus(lambda: False))
    for before in (REFUSED, REFUSED, None, REFUSED):
        engine.before = before
        work.run(tasks)
        for thread in recording_threads():
            thread.join(A_LONG_TIME)
    assert warnings.texts == [ABSENT, ABSENT]
    assert work.runs == 4


def test_stages_run_while_a_slow_server_does_not_answer(engine: FakeEngine, warnings: WarningRecorder) -> None:
    engine.answers.clear()
    clock, work = FakeClock(0.0), CountingStage()
    tasks = PrefectTasks(warnings, PrefectStatus(lambda: True, clock=clock))
    for _ in range(100):
        assert work.run(tasks) == DATASET
    threads = recording_threads()
    assert len(threads) == 16
    assert warnings.texts == []
    clock.seconds = 21.0
    assert work.run(tasks) == DATASET
    assert warnings.texts == [ABSENT]
    engine.answers.set()
    for thread in threads:
        thread.join(A_LONG_TIME)
    assert work.runs == 101
    assert len(engine.states) == 16


def test_close_waits_only_for_stages_that_ended(engine: FakeEngine, warnings: WarningRecorder) -> None:
    tasks = PrefectTasks(warnings, PrefectStatus(lambda: True))
    CountingStage().run(tasks)
    tasks.emit(StageBegun(number=-1, label="evaluate", name="evaluate"))
    tasks.close(A_LONG_TIME)
    assert [each.type for each in engine.states] == ["COMPLETED"]
    tasks.end_all()


def test_close_lets_a_server_record_that_is_back(engine: FakeEngine, warnings: WarningRecorder) -> None:
    """It stood still for so long that its absence was reported, and all task runs wait."""
    engine.answers.clear()
    status = PrefectStatus(lambda: engine.answers.set() is None)
    status.absent(warnings)
    tasks, work = PrefectTasks(warnings, status), CountingStage()
    for _ in range(10):
        work.run(tasks)
    tasks.close(0.0)
    assert [each.type for each in engine.states] == 10 * ["COMPLETED"]
    assert warnings.texts == [ABSENT]


def test_what_close_gives_up_begins_no_more_and_logs_nothing(engine: FakeEngine, warnings: WarningRecorder) -> None:
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("prefect.task_runs")
    logger.addHandler(handler)
    engine.answers.clear()
    engine.on_call = lambda: logger.error("of the thread")
    tasks, work = PrefectTasks(warnings, PrefectStatus(lambda: False)), CountingStage()
    work.run(tasks)
    work.run(tasks)
    tasks.close(0.0)
    assert warnings.texts == [ABSENT]
    logger.error("of the flow")
    engine.answers.set()
    for thread in recording_threads():
        thread.join(A_LONG_TIME)
    logger.removeHandler(handler)
    assert (shown, len(engine.states), warnings.texts) == (["of the flow"], 1, [ABSENT])


def test_task_runs_begin_in_the_order_of_their_stages(engine: FakeEngine, warnings: WarningRecorder) -> None:
    tasks, work = PrefectTasks(warnings, PrefectStatus(lambda: True)), CountingStage()
    begun: list[int] = []
    engine.answers.clear()
    for number in range(10):
        context = contextvars.copy_context()
        context.run(NUMBER.set, number)
        context.run(work.run, tasks)
    engine.on_call = lambda: begun.append(NUMBER.get())
    engine.answers.set()
    tasks.close(A_LONG_TIME)
    assert begun == list(range(10))


def test_stage_runs_in_the_thread_that_calls(engine: FakeEngine, warnings: WarningRecorder) -> None:
    seen: list[threading.Thread] = []
    CountingStage(work=lambda: seen.append(threading.current_thread())).run(
        PrefectTasks(warnings, PrefectStatus(lambda: True))
    )
    assert seen == [threading.current_thread()]
    assert engine.before is None


def test_server_that_does_not_answer_delays_no_stage(tmp_path: Path) -> None:
    """Prefect's own engine; the server accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        arguments = ["tests.support.recorded_stages", "run_without_answers", "{}"]
        done = forked.run(
            [sys.executable, "-m", "tests.support.call_function", *arguments],
            env=environment_with(tmp_path, PREFECT_API_URL=url, PREFECT_CLIENT_MAX_RETRIES="0"),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("result: "))
    assert result == {"answers": 3, "warnings": [ABSENT]}
