"""A stop, an end by callbacks, a blow-up or another process, while a save is in flight: it lands first."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from baton.flows.runner import InProcess
from baton.tasks.foundation.checkpoint.verify import find_damage
from baton.tasks.foundation.contracts.log_entry import Commit, Evaluation, Rewind
from baton.tasks.foundation.contracts.stage_calls import EvaluateCall
from baton.tasks.foundation.machine.stops import PROCESS_STOP
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.telemetry.events import Event, Training
from tests.support.homes import entries_of
from tests.support.lab import Lab, lab_of
from tests.support.sigterm_raises import sigterm_raises
from tests.support.watched_relay import (
    LONGEST_SECONDS,
    STRAIGHT,
    HeldSave,
    InLine,
    assert_same_run,
    command,
    committed,
    compared_lab,
    home_of,
    run_of,
)

pytestmark = pytest.mark.slow

SQUARING = """
def plain():
    # 1e30 becomes infinite, 1 stays 1.
    model = keras.Sequential([keras.Input((6,)), keras.layers.Lambda(lambda x: x * x), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
STOPPING = """
import keras


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 2


def stopping():
    return [Stop()]
"""

KEEPING = """
import keras


class Keep(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append([epoch, logs["val_loss"], logs["loss"]])


def keeping():
    return [Keep()]
"""


class GoneError(BaseException):
    """What the signal handler of the test raises."""


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.flows.relay.leaves_time", lambda _: False)
    PROCESS_STATE.forget()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return compared_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def lab(compared: Lab) -> Lab:
    """All tests share the storage; their runs have names of their own."""
    return Lab(compared.root)


def assert_nothing_trained_is_lost(lab: Lab, held: HeldSave, name: str) -> None:
    """Everything that was trained is committed, and the run continues to the same end."""
    spec = run_of(name)
    assert held.acted
    assert committed(lab, spec)[-1] == held.latest >= held.trained_to > 6
    assert 6 in committed(lab, spec)
    command(lab, spec)
    assert_same_run(lab, spec, STRAIGHT)


def test_stop_lands_the_save_and_commits_what_came_since(lab: Lab) -> None:
    def stop() -> None:
        assert PROCESS_STOP.current is not None
        PROCESS_STOP.current.request_stop("preempted")

    held = HeldSave(6, stop)
    result = command(lab, run_of("stopped"), held=held)
    assert result.exit_reason == "preempted"
    assert_nothing_trained_is_lost(lab, held, "stopped")


def test_signal_is_raised_after_the_save_has_landed(lab: Lab) -> None:
    held = HeldSave(6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with sigterm_raises(GoneError), pytest.raises(GoneError):
        command(lab, run_of("signalled"), held=held)
    assert_nothing_trained_is_lost(lab, held, "signalled")


def test_stop_without_time_for_another_save_lands_the_one_in_flight(lab: Lab) -> None:
    """Saves take more than a millisecond, which the saves before have shown."""
    spec = run_of("hurried", stop__grace_seconds=1e-3)
    recorder, stopped = lab.recorder, threading.Event()

    def stop() -> None:
        assert PROCESS_STOP.current is not None
        PROCESS_STOP.current.request_stop("sigterm")
        stopped.set()

    class Waiting:
        """Holds the training at step 7 until the stop, so that it does not reach the end of the segment."""

        def emit(self, event: Event) -> None:
            assert not isinstance(event, Training) or event.step <= 6 or stopped.wait(LONGEST_SECONDS)

    held = HeldSave(6, stop)
    held.others.append(recorder)
    held.after.append(Waiting())
    result = command(lab, spec, held=held)
    assert (result.exit_reason, result.step, committed(lab, spec)) == ("sigterm", 6, [0, 3, 6])
    assert any(f"steps 7 to {held.latest} are not committed" in warning for warning in recorder.warnings)


def test_last_segment_of_a_command_lands(lab: Lab) -> None:
    held = HeldSave(6)
    result = command(lab, run_of("short"), held=held, max_segments=2)
    assert (result.exit_reason, result.step, result.segments) == ("max_segments", 6, 2)
    assert committed(lab, run_of("short")) == [0, 3, 6]


def test_end_by_callbacks_names_the_committed_checkpoint(tmp_path: Path) -> None:
    lab = Lab(tmp_path).copy_of_code("code")
    (lab.code / "callbacks.py").write_text(STOPPING, encoding="utf-8")
    outcomes = []
    for runner in (None, InLine()):
        spec = run_of(
            "in-line" if runner else "beside",
            train__callbacks="callbacks.py:stopping",
            train__log_every_steps=3,
            data__validation_fraction=0.0,
        )
        PROCESS_STATE.forget()
        result = command(lab, spec, held=None if runner else HeldSave(9), runner=runner)
        finish = [entry.body for entry in entries_of(home_of(lab, spec)) if entry.body.kind == "finish"]
        outcomes.append((result.exit_reason, result.step, result.state_digest, len(finish)))
        assert not finish[0].checkpoint.is_in_flight
    assert outcomes[0][:2] == ("finished_early", 9)
    assert outcomes[0] == outcomes[1]


def test_callbacks_get_an_evaluation_before_it_is_logged(tmp_path: Path) -> None:
    """The callbacks take it from memory, so the training goes on while the checkpoint of the same step is written."""
    lab = Lab(tmp_path).copy_of_code("code")
    (lab.code / "callbacks.py").write_text(KEEPING, encoding="utf-8")
    outcomes = []
    for runner in (None, InLine()):
        spec = run_of(
            "in-line" if runner else "beside", train__callbacks="callbacks.py:keeping", evaluate__every_steps=6
        )
        PROCESS_STATE.forget()
        held = HeldSave(6)
        result = command(lab, spec, held=None if runner else held, runner=runner)
        assert runner or held.trained_to > 6
        outcomes.append((result.exit_reason, result.step, result.state_digest, result.metrics))
    assert outcomes[0] == outcomes[1]


def test_blow_up_rewinds_as_with_saves_in_line(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, SQUARING)
    logs = []
    for runner in (None, InLine()):
        spec = run_of(
            "in-line" if runner else "beside",
            data__options={"form": "divergent", "examples": 120},
            data__validation_fraction=0.0,
            train__on_blowup="rewind",
            train__rewind_skip_batches=6,
            train__steps=18,
        )
        PROCESS_STATE.forget()
        command(lab, spec, runner=runner)
        bodies = [entry.body for entry in entries_of(home_of(lab, spec))]
        rewinds = [(body.blown_up_at, body.to.step, body.skip_batches) for body in bodies if isinstance(body, Rewind)]
        commits = [(body.checkpoint.step, body.checkpoint.state_digest) for body in bodies if isinstance(body, Commit)]
        logs.append((rewinds, commits))
    assert logs[0][0]
    assert logs[0] == logs[1]


class EvaluatesElsewhere(InProcess):
    """Answers an evaluation as another process does, which reads the checkpoint in the store."""

    remote = frozenset({"evaluate"})

    def __init__(self) -> None:
        self.steps: list[int] = []

    def run(self, stage: Stage[Any, Any], call: Any, place: Place) -> Any:
        if not isinstance(call, EvaluateCall):
            return super().run(stage, call, place)
        assert call.checkpoint in place.log.require_head().retained
        assert find_damage(place.home, call.checkpoint) is None
        self.steps.append(call.checkpoint.step)
        body = Evaluation(
            checkpoint=call.checkpoint, metrics={"accuracy": 0.5}, examples=1, seconds=0.0, keep_best=None
        )
        place.log.append(lambda _: body, attempt="e" * 32)
        return body


def test_evaluation_elsewhere_gets_a_committed_checkpoint(lab: Lab) -> None:
    spec = run_of("elsewhere", evaluate__every_steps=6)
    runner = EvaluatesElsewhere()
    result = command(lab, spec, held=HeldSave(6), runner=runner)
    assert runner.steps == [6, 12]
    tip = lab.log(STRAIGHT).require_head().tip
    assert tip is not None
    assert result.state_digest == tip.state_digest
