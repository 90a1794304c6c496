"""The work does not wait for Prefect, which records how it ended, or one note says why it does not."""

import logging
import signal
import threading
from collections.abc import Callable

import pytest
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Completed

from flows.process import Terminated
from flows.with_prefect.artifacts import FlowRunCancelled
from flows.with_prefect.record import BeginsWithTraining, FlowRunBeside, Log, PrefectRunLogger, failed
from tasks.foundation.errors import ModelError, NonFinite, PrefectUnavailable, StoreUnreachable
from tasks.foundation.telemetry.events import Committed, Note, Training
from tests.support.event_recorder import EventRecorder

A_LONG_TIME = 60.0
REFUSED = PrefectUnavailable("no server")


class FakeEngine:
    """In place of Prefect's engine: records how the flow ends, and can fail before and after it."""

    def __init__(self, *, before: Exception | None = None, after: Exception | None = None) -> None:
        self.before, self.after = before, after
        self.begun = False
        self.states: list[State[None]] = []
        self.faults: list[BaseException] = []

    def __call__(self, body: Callable[[], State[None]]) -> None:
        self.begun = True
        if self.before is not None:
            raise self.before
        try:
            self.states.append(body())
        except BaseException as fault:
            self.faults.append(fault)
            raise
        if self.after is not None:
            raise self.after


def wait_for_recording() -> None:
    for thread in threading.enumerate():
        if thread.name == "baton-flow-run":
            thread.join(A_LONG_TIME)
            assert not thread.is_alive()


def refuse() -> None:
    raise REFUSED


def respond() -> None:
    pass


def waits_for(event: threading.Event) -> Callable[[], None]:
    def wait() -> None:
        event.wait()

    return wait


def beside(
    connect: Callable[[], None],
    engine: FakeEngine,
    *,
    recorder: EventRecorder | None = None,
    required: bool = False,
    latest_seconds: float = A_LONG_TIME,
    last_seconds: float = A_LONG_TIME,
) -> FlowRunBeside[None]:
    return FlowRunBeside(
        connect, engine, notes=recorder or EventRecorder(), required=required,
        latest_seconds=latest_seconds, last_seconds=last_seconds,
    )  # fmt: skip


def notes_of(recorder: EventRecorder) -> list[str]:
    return [event.text for event in recorder.events if isinstance(event, Note)]


def test_work_does_not_wait_for_the_server() -> None:
    server, engine = threading.Event(), FakeEngine()
    with beside(waits_for(server), engine) as flow_run:
        assert not engine.begun
        server.set()
        flow_run.wait_at_end()
        assert engine.begun
        flow_run.end(lambda: Completed(message="done"))
    assert [state.message for state in engine.states] == ["done"]


def test_flow_run_begins_with_the_first_steps() -> None:
    asked = threading.Event()
    with beside(asked.set, FakeEngine(), latest_seconds=A_LONG_TIME) as flow_run:
        sink = BeginsWithTraining(flow_run)
        sink.emit(Note(text="building"))
        assert not asked.is_set()
        sink.emit(Training(step=1, target=2, examples_per_second=1.0))
        assert asked.wait(A_LONG_TIME)
        flow_run.end(Completed)


def test_flow_run_is_not_held_back_for_long() -> None:
    asked, engine = threading.Event(), FakeEngine()
    with beside(asked.set, engine, latest_seconds=0.01) as flow_run:
        assert asked.wait(A_LONG_TIME)
        flow_run.end(Completed)
    assert [state.name for state in engine.states] == ["Completed"]


def test_a_context_is_given_to_every_thread_that_asks() -> None:
    with beside(respond, FakeEngine(), latest_seconds=0.0) as flow_run:
        outer = flow_run.context()
        assert outer.run(lambda: flow_run.context().run(lambda: "within")) == "within"
        flow_run.end(Completed)


def wait_and_raise(flow_run: FlowRunBeside[None], fault: BaseException) -> None:
    with flow_run:
        flow_run.wait_at_end()
        raise fault


@pytest.mark.parametrize("where", ["server", "flow run"])
def test_work_without_a_flow_run_goes_on_and_one_note_says_why(where: str) -> None:
    engine, recorder = FakeEngine(before=REFUSED), EventRecorder()
    connect = refuse if where == "server" else respond
    with beside(connect, engine, recorder=recorder, latest_seconds=0.0) as flow_run:
        with pytest.raises(PrefectUnavailable):
            flow_run.context()  # what records stages and artifacts ends with it
        flow_run.wait_at_end()
        flow_run.end(Completed)
    assert engine.begun == (where == "flow run")
    assert notes_of(recorder) == ["this run is not recorded in Prefect: no server"]


def test_server_that_never_answers_is_given_up_after_the_work() -> None:
    answers, recorder = threading.Event(), EventRecorder()

    def engine(_body: Callable[[], State[None]]) -> None:
        answers.wait()

    with FlowRunBeside[None](respond, engine, notes=recorder, last_seconds=0.1) as flow_run:
        flow_run.wait_at_end()
        flow_run.end(Completed)
    assert notes_of(recorder) == ["this run is not recorded in Prefect: TimeoutError: no response within 0.1 s"]
    answers.set()


def test_end_that_is_not_recorded_in_time_is_a_note() -> None:
    answers, recorder = threading.Event(), EventRecorder()

    def engine(body: Callable[[], State[None]]) -> None:
        body()
        answers.wait()

    with FlowRunBeside[None](respond, engine, notes=recorder, latest_seconds=0.0, last_seconds=0.1) as flow_run:
        flow_run.context()
        flow_run.end(Completed)
    assert notes_of(recorder) == ["Prefect did not record the result: TimeoutError: no response within 0.1 s"]
    answers.set()


def test_work_that_needs_its_flow_run_learns_why_there_is_none() -> None:
    recorder = EventRecorder()
    with (
        pytest.raises(PrefectUnavailable, match="no server"),
        beside(refuse, FakeEngine(), recorder=recorder, required=True) as flow_run,
    ):
        flow_run.context()
    assert notes_of(recorder) == []


@pytest.mark.parametrize("when", [0.0, A_LONG_TIME])
@pytest.mark.parametrize("stop", [Terminated, KeyboardInterrupt])
def test_a_stop_before_the_server_responds_waits_for_nothing(stop: type[BaseException], when: float) -> None:
    server, engine, recorder = threading.Event(), FakeEngine(), EventRecorder()
    with pytest.raises(stop), beside(waits_for(server), engine, recorder=recorder, latest_seconds=when):
        raise stop
    server.set()
    wait_for_recording()
    assert not engine.begun
    (note,) = notes_of(recorder)
    assert note.startswith("this run is not recorded in Prefect: it was stopped before")


def failed_while_stopping(stop: BaseException) -> BaseException:
    stop.__context__ = StoreUnreachable("gs://bucket: no response")
    return stop


@pytest.mark.parametrize(
    ("fault", "recorded"),
    [
        (ValueError("a bug"), ValueError),
        (failed_while_stopping(Terminated()), TerminationSignal),
        (failed_while_stopping(KeyboardInterrupt()), KeyboardInterrupt),
    ],
)
def test_error_that_nobody_expects_is_the_engines(fault: BaseException, recorded: type[BaseException]) -> None:
    engine = FakeEngine()
    with pytest.raises(type(fault)) as raised:
        wait_and_raise(beside(respond, engine), fault)
    assert raised.value is fault
    assert [type(each) for each in engine.faults] == [recorded]


def test_refused_flow_run_has_its_error_on_one_line() -> None:
    engine, fault = FakeEngine(), ModelError("wrong\nhint: correct it")
    with pytest.raises(ModelError):
        wait_and_raise(beside(respond, engine), fault)
    assert engine.faults == []
    assert [(state.is_failed(), state.message, state.data) for state in engine.states] == [
        (True, "ModelError: wrong; hint: correct it", fault)
    ]
    assert [failed(fault).name, failed(NonFinite("NaN", step=7)).name] == ["Failed", "BlewUp"]


def test_flow_run_that_was_cancelled_stays_cancelled() -> None:
    engine = FakeEngine()
    with pytest.raises(FlowRunCancelled):
        wait_and_raise(beside(respond, engine), FlowRunCancelled())
    assert [state.is_cancelled() for state in engine.states] == [True]


@pytest.mark.parametrize(("stop", "reason"), [(Terminated(), "sigterm"), (KeyboardInterrupt(), "sigint")])
def test_flow_run_of_stopped_work_has_not_crashed(stop: BaseException, reason: str) -> None:
    engine = FakeEngine()
    with pytest.raises(type(stop)):
        wait_and_raise(beside(respond, engine), stop)
    assert [(state.name, state.is_completed()) for state in engine.states] == [("Stopped", True)]
    assert str(engine.states[0].message).startswith(f"{reason}: ")


def test_a_result_that_prefect_does_not_record_is_a_note() -> None:
    recorder = EventRecorder()
    with beside(
        respond, FakeEngine(after=ConnectionError("refused")), recorder=recorder, latest_seconds=0.0
    ) as flow_run:
        flow_run.context()
        flow_run.end(Completed)
    assert notes_of(recorder) == ["Prefect did not record the result: ConnectionError: refused"]


def test_a_machine_that_is_going_is_no_failure_to_record() -> None:
    def crash() -> State[None]:
        raise TerminationSignal(signal.SIGTERM)

    engine = FakeEngine()
    with beside(respond, engine) as flow_run:
        flow_run.end(crash)
    assert [type(each) for each in engine.faults] == [TerminationSignal]


def test_what_comes_before_the_flow_run_is_logged_in_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    begun: list[Log] = []
    sink = PrefectRunLogger(flow_logger=lambda: begun[0] if begun else None)
    sink.emit(Note(text="first 100 %"))
    sink.emit(Note(text="second", warning=True))
    assert caplog.messages == []
    begun.append(logging.getLogger("tests.run_logger"))
    sink.emit(Committed(step=3, path="checkpoints/x", size=1, metrics={"loss": 0.5}))
    sink.flush()
    assert caplog.messages == ["first 100 %", "second", "step 3 committed as checkpoints/x loss 0.5"]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
