"""What happens while a save is in flight: nothing wrong is committed, nothing is lost, and the bits stay the same."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.runner import InProcess
from tasks.foundation.checkpoint import snapshot, write
from tasks.foundation.checkpoint.save import AsyncSaves
from tasks.foundation.contracts.log_entry import Body, Change, Commit, Head, Rewind
from tasks.foundation.errors import BatonError, NonFinite, StaleWriter, StorageError, StoreUnreachable
from tasks.foundation.stage import Place, Stage
from tasks.foundation.state.warm_state import PROCESS_STATE
from tasks.foundation.telemetry.events import Event, Training
from tests.support.homes import entries_of
from tests.support.lab import Lab
from tests.support.watched_relay import (
    LONGEST_SECONDS,
    HeldSave,
    InLine,
    assert_same_run,
    command,
    committed,
    home_of,
    run_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr("flows.relay.leaves_time", lambda _: False)  # no report
    PROCESS_STATE.forget()
    return Lab(tmp_path)


def test_saves_in_flight_change_no_bit(lab: Lab) -> None:
    beside, in_line = run_of("beside"), run_of("in-line")
    held = HeldSave(3)
    result = command(lab, beside, held=held)
    assert (held.acted, held.trained_to > 3) == (True, True)
    assert (result.exit_reason, result.step, result.segments) == ("complete", 12, 4)
    PROCESS_STATE.forget()
    command(lab, in_line, runner=InLine())
    assert_same_run(lab, beside, in_line)
    kinds = [[entry.body.kind for entry in entries_of(home_of(lab, spec))] for spec in (beside, in_line)]
    assert kinds[0] == kinds[1]


def fails(fault: BatonError) -> Callable[[], None]:
    def action() -> None:
        raise fault

    return action


@pytest.mark.parametrize(
    ("fault", "step"), [(StorageError("no space left"), 3), (StoreUnreachable("the store does not answer"), 12)]
)
def test_failed_save_ends_the_run_where_it_was(lab: Lab, fault: BatonError, step: int) -> None:
    spec, straight = run_of("failed"), run_of("straight")
    held = HeldSave(step, fails(fault))
    with pytest.raises(type(fault), match=str(fault)):
        command(lab, spec, held=held)
    assert held.acted
    assert held.trained_to == 12 if step == 12 else held.trained_to > step
    assert committed(lab, spec) == [at for at in (0, 3, 6, 9, 12) if at < step]
    assert command(lab, spec).exit_reason == "complete"
    PROCESS_STATE.forget()
    command(lab, straight)
    assert_same_run(lab, spec, straight)


class WaitingForFailure:
    """Holds the training at the first step after a save until the save has failed."""

    def __init__(self, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._step = step
        self._failed = threading.Event()
        join = AsyncSaves._run

        def run(saves: AsyncSaves, *arguments: Any) -> None:
            join(saves, *arguments)
            if saves.failed:
                self._failed.set()

        monkeypatch.setattr(AsyncSaves, "_run", run)

    def emit(self, event: Event) -> None:
        if isinstance(event, Training) and event.step > self._step:
            assert self._failed.wait(LONGEST_SECONDS)


def test_failure_is_raised_at_the_end_of_the_inner_loop(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the end of the segment, which may be hours away."""
    spec = run_of("failed")
    held = HeldSave(3, fails(StorageError("no space left")))
    held.after.append(WaitingForFailure(3, monkeypatch))
    with pytest.raises(StorageError, match="no space left"):
        command(lab, spec, held=held)
    assert held.latest == 4


def test_rival_meanwhile_makes_the_save_stale(lab: Lab) -> None:
    spec, straight = run_of("overtaken"), run_of("straight")

    def overtake() -> None:
        def decide(head: Head | None) -> Body | None:
            assert head is not None
            return Change(environment=head.environment, identity=head.identity)

        lab.log(spec).append(decide, attempt="f" * 32)

    held = HeldSave(6, overtake)
    with pytest.raises(StaleWriter, match="step 6 was trained on top of log entry"):
        command(lab, spec, held=held)
    assert held.trained_to > 6
    assert committed(lab, spec) == [0, 3]
    assert not list((home_of(lab, spec) / "checkpoints").glob("00000006-*"))
    command(lab, spec)
    PROCESS_STATE.forget()
    command(lab, straight)
    assert_same_run(lab, spec, straight)


class NotFinite:
    """Finds weights that are not finite in the first snapshot of a step."""

    def __init__(self, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = False

        def require_finite(snapshot: Any) -> None:
            if snapshot.step == step and not self.found:
                self.found = True
                raise NonFinite(f"step {step} holds NaN", step=step)

        monkeypatch.setattr(write, "require_finite", require_finite)


@pytest.mark.parametrize("step", [3, 12])
def test_weights_that_are_not_finite_are_not_committed(lab: Lab, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    spec = run_of("not-finite")
    NotFinite(step, monkeypatch)
    with pytest.raises(NonFinite, match=f"step {step} holds NaN") as raised:
        command(lab, spec)
    assert raised.value.step == step
    assert committed(lab, spec) == [at for at in (0, 3, 6, 9, 12) if at < step]


class BlowsUp:
    """The training blows up after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def emit(self, event: Event) -> None:
        if isinstance(event, Training) and event.step > self._step:
            raise NonFinite(f"the loss of step {event.step} is NaN", step=event.step)


def test_blow_up_in_flight_comes_before_that_of_the_training(lab: Lab) -> None:
    spec = run_of("twice")
    held = HeldSave(6, fails(NonFinite("step 6 holds NaN", step=6)))
    held.after.append(BlowsUp(6))
    with pytest.raises(NonFinite, match="step 6 holds NaN"):
        command(lab, spec, held=held)
    assert committed(lab, spec) == [0, 3]


@pytest.mark.parametrize(("step", "max_segments"), [(6, 2), (9, None), (12, None)])
def test_rewind_after_a_save_is_that_of_a_save_in_line(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, step: int, max_segments: int | None
) -> None:
    """The run is a function of its log, so what is rewound must not depend on when a save was written."""
    logs, results = [], []
    for runner in (None, InLine()):
        spec = run_of("in-line" if runner else "beside", train__on_blowup="rewind", train__rewind_skip_batches=2)
        NotFinite(step, monkeypatch)
        PROCESS_STATE.forget()
        result = command(lab, spec, runner=runner, max_segments=max_segments)
        results.append((result.exit_reason, result.step, result.segments, result.state_digest, result.metrics))
        bodies = [entry.body for entry in entries_of(home_of(lab, spec))]
        logs.append(
            [(body.blown_up_at, body.to.step, body.skip_batches) for body in bodies if isinstance(body, Rewind)]
            + [(body.checkpoint.step, body.exit_reason) for body in bodies if isinstance(body, Commit)]
        )
    assert logs[0] == logs[1]
    assert results[0] == results[1]


class Forgetful(InProcess):
    """Drops the model in memory before a stage, which then waits for the save in flight, and restores it."""

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def run(self, stage: Stage[Any, Any], call: Any, place: Place) -> Any:
        if stage.name == self._stage:
            PROCESS_STATE.forget()
        return super().run(stage, call, place)


@pytest.mark.parametrize("stage", ["evaluate", "train_segment"])
def test_state_that_is_not_in_memory_is_restored_once_it_landed(lab: Lab, stage: str) -> None:
    spec, straight = run_of("forgetful", evaluate__every_steps=6), run_of("straight", evaluate__every_steps=6)
    command(lab, spec, runner=Forgetful(stage))
    PROCESS_STATE.forget()
    command(lab, straight)
    assert_same_run(lab, spec, straight)


@pytest.mark.parametrize("stage", ["evaluate", "train_segment"])
def test_rewind_where_a_stage_waits_for_the_save(lab: Lab, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    spec = run_of("forgetful", train__on_blowup="rewind", train__rewind_skip_batches=2, evaluate__every_steps=6)
    NotFinite(6, monkeypatch)
    result = command(lab, spec, runner=Forgetful(stage))
    assert (result.exit_reason, result.step) == ("complete", 12)
    rewinds = [entry.body for entry in entries_of(home_of(lab, spec)) if isinstance(entry.body, Rewind)]
    assert [(body.blown_up_at, body.to.step) for body in rewinds] == [(6, 3)]


def test_short_memory_makes_every_save_in_line(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, straight = run_of("short-of-memory", checkpoint__every_seconds=1e-9), run_of("straight")
    monkeypatch.setattr(snapshot, "enough_memory_for_snapshot", lambda _: False)
    begun: list[object] = []
    monkeypatch.setattr(AsyncSaves, "begin", lambda _self, write: begun.append(write))
    command(lab, spec)
    assert begun == []
    assert len(committed(lab, spec)) > 5
    assert [warning for warning in lab.recorder.warnings if "training waits for each commit" in warning] == [
        "a copy of the train state takes 248 bytes of memory, and less is free: training waits for each commit"
    ]
    monkeypatch.undo()
    monkeypatch.setattr("flows.relay.leaves_time", lambda _: False)
    PROCESS_STATE.forget()
    command(lab, straight)
    assert_same_run(lab, spec, straight)
