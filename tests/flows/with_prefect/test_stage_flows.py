"""A flow of a stage: its last state, and its trainer when a signal stops the flow or a kill ends the trainer."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.logging import disable_run_logger

from baton.flows.supervisor import Outcome, Trainer
from baton.flows.with_prefect import record, stage_flows
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import SegmentResult
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import (
    ErrorReport,
    PrepareDataCall,
    RemoteContext,
    RemoteTrainSegmentCall,
    pack,
)
from baton.tasks.foundation.errors import NonFinite
from baton.tasks.foundation.log.stage_results import take_answer
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Ended, Event, Note, StageBegun, Training
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.fake_run import FakeRun
from tests.support.lab import lab_of, spec_of
from tests.support.sigterm_raises import sigterm_raises
from tests.support.watching import commits_of

MODEL = """
def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
Watch = Callable[[Callable[[Event], object]], None]


class SignalReceived(BaseException):
    pass


class Watched:
    """In place of the task runs: calls a function with each event, in the thread that reads them."""

    on: Callable[[Event], object]

    def __init__(self, _telemetry: object) -> None:
        self.ended = False

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.ended

    def emit(self, event: Event) -> None:
        type(self).on(event)

    def end_all(self) -> None:
        self.ended = True

    def close(self, _seconds: float) -> None:
        """It holds nothing."""


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Makes a function see the events that the flow gets."""
    monkeypatch.setattr(record, "PrefectTasks", Watched)
    return lambda on: monkeypatch.setattr(Watched, "on", staticmethod(on), raising=False)


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers are forks."""
    (python,) = forked.forking_python().values()
    monkeypatch.setattr(sys, "executable", python)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Trainer]:
    """The trainers that the flow has started."""
    found: list[Trainer] = []

    class Kept(Trainer):
        def __init__(self, *given: Any, **named: Any) -> None:
            found.append(self)
            super().__init__(*given, **named)

    monkeypatch.setattr(record, "Trainer", Kept)
    return found


def prepare_call(folder: Path, **changes: Any) -> str:
    run = FakeRun(folder)
    spec = load_run_file(run.run_file()).spec.model_copy(update={"storage": run.root.uri, **changes})
    return pack(PrepareDataCall(spec=spec), RemoteContext(code_folder=str(folder)))


def state_after(monkeypatch: pytest.MonkeyPatch, folder: Path, outcome: Outcome) -> State[Any]:
    """The last state of a flow run whose trainer ends so."""
    process = SimpleNamespace(returncode=outcome.returncode)
    trainer = SimpleNamespace(process=process, send=lambda _: None, outcome=lambda: outcome)
    monkeypatch.setattr(record, "Trainer", lambda *_, **__: trainer)
    with disable_run_logger():
        return stage_flows.prepare_data.fn(prepare_call(folder))


def test_answer_completes_the_flow_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = Ended(exit_code=0, result="step 200 is staged")
    state = state_after(monkeypatch, tmp_path, Outcome(returncode=0, ended=ended))
    assert (state.is_completed(), state.message) == (True, "step 200 is staged")


def test_error_fails_the_flow_run_under_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = ErrorReport.of(NonFinite("the loss is not finite at step 7", step=7))
    state = state_after(monkeypatch, tmp_path, Outcome(returncode=4, ended=Ended(exit_code=4, error=report)))
    assert (state.name, state.message) == ("NonFinite", "the loss is not finite at step 7")
    assert state.is_failed()


def test_error_that_nobody_expects_fails_as_in_prefect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = ErrorReport.of(ZeroDivisionError("division by zero"))
    state = state_after(monkeypatch, tmp_path, Outcome(returncode=1, ended=Ended(exit_code=1, error=report)))
    assert (state.name, state.is_failed()) == ("Failed", True)
    assert "Flow run encountered an exception: ZeroDivisionError: division by zero" in str(state.message)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome(returncode=3, hung="no inner loop ended for 600 s"), "hung: no inner loop ended for 600 s"),
        (Outcome(returncode=-6), "the process of prepare-data of digits was ended by SIGABRT with code -6"),
        (Outcome(returncode=3, ended=Ended(exit_code=3, stopped="sigterm")), "was stopped (sigterm)"),
    ],
)
def test_trainer_without_an_end_crashes_the_flow_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Outcome, words: str
) -> None:
    state = state_after(monkeypatch, tmp_path, outcome)
    assert state.is_crashed()
    assert words in str(state.message)


def test_call_that_is_not_a_json_object_is_refused() -> None:
    state = stage_flows.prepare_data.fn("[]")
    assert (state.name, state.is_failed()) == ("InvalidInput", True)


@pytest.mark.usefixtures("forking")
def test_stage_runs_in_a_trainer_and_answers(tmp_path: Path, watch: Watch) -> None:
    events: list[Event] = []
    watch(events.append)
    with disable_run_logger():
        state = stage_flows.prepare_data.fn(prepare_call(tmp_path))
    assert (state.is_completed(), state.message) == (True, "DatasetRef")
    assert [event.label for event in events if isinstance(event, StageBegun)] == ["prepare-data"]
    answer = take_answer(LocalStorage(tmp_path / "runs" / "digits"), "None", DatasetRef)
    assert answer is not None
    assert answer.already_prepared is False


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_sigterm_lets_the_trainer_commit_and_answer(tmp_path: Path, watch: Watch) -> None:
    lab = lab_of(tmp_path, MODEL)
    storage = str(lab.root / "storage")
    spec: RunSpec = spec_of("build", train__steps=10_000_000, storage=storage)
    head = lab.begin(spec)
    assert head.tip is not None
    request = lab.request(spec, head.tip, 10_000_000, base=head.base)
    call = RemoteTrainSegmentCall(spec=spec, request=request, recorded=head.environment)
    text = pack(call, RemoteContext(code_folder=str(lab.code), attempt="a" * 32))
    handlers, notes = list[Any](), list[str]()

    def on(event: Event) -> None:
        if isinstance(event, Training) and not handlers:
            handlers.append(signal.getsignal(signal.SIGTERM))
            os.kill(os.getpid(), signal.SIGTERM)
        elif isinstance(event, Note):
            notes.append(event.text)

    watch(on)
    with sigterm_raises(SignalReceived), disable_run_logger():
        of_engine = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SignalReceived):
            stage_flows.train_segment.fn(text)
    # Prefect's runner kills a process in which another handler stands in place of Prefect's.
    assert handlers == [of_engine]
    assert any(note.startswith("SIGTERM: finishing the steps in flight") for note in notes)
    answer = take_answer(lab.home(spec), "None", SegmentResult)
    assert answer is not None
    assert (answer.exit_reason, answer.staged) == ("sigterm", None)  # what is trained is committed after a stop
    step, reason = commits_of(lab.root / "storage" / spec.run)[-1]
    assert (step > 0, reason) == (True, "sigterm")


SLEEPS = """
import time


def load():
    time.sleep(600)
"""


@pytest.mark.usefixtures("forking")
def test_killed_trainer_crashes_the_flow_run(tmp_path: Path, watch: Watch, started: list[Trainer]) -> None:
    (tmp_path / "data.py").write_text(SLEEPS)
    text = prepare_call(tmp_path, data=spec_of("build", data__options={}).data)

    def on(event: Event) -> None:
        if isinstance(event, StageBegun):
            os.kill(started[0].process.pid, signal.SIGKILL)

    watch(on)
    with disable_run_logger():
        state = stage_flows.prepare_data.fn(text)
    assert state.is_crashed()
    assert "the process of prepare-data of digits was killed from outside" in str(state.message)


def test_flows_import_no_stage() -> None:
    code = "import sys, baton.flows.with_prefect.stage_flows; print(*{each.split('.')[0] for each in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert not {"tensorflow", "keras", "numpy", "h5py"} & set(done.stdout.split())
