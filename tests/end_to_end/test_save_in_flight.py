"""What happens while a save is in flight: nothing wrong is committed, nothing is lost, and the bits stay the same."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from baton.flows.runner import InProcess
from baton.tasks.foundation.checkpoint import snapshot, write
from baton.tasks.foundation.checkpoint.save import AsyncSaves
from baton.tasks.foundation.contracts.log_entry import Body, Change, Commit, Head, Rewind
from baton.tasks.foundation.errors import BatonError, NonFinite, StaleWriter, StorageError, StoreUnreachable
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.telemetry.events import Event, Training
from tests.support.homes import entries_of
from tests.support.lab import Lab
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


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return compared_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def lab(compared: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """All tests share the storage; their runs have names of their own."""
    monkeypatch.setattr("baton.flows.relay.leaves_time", lambda _: False)  # no report
    PROCESS_STATE.forget()
    return Lab(compared.root)


def test_saves_in_flight_change_no_bit(lab: Lab) -> None:
    spec, held = run_of("beside"), HeldSave(3)
    result = command(lab, spec, held=held)
    assert (held.acted, held.trained_to > 3) == (True, True)
    assert (result.exit_reason, result.step, result.segments) == ("complete", 12, 4)
    assert_same_run(lab, spec, STRAIGHT)
    kinds = [[entry.body.kind for entry in entries_of(home_of(lab, each))] for each in (spec, STRAIGHT)]
    assert kinds[0] == kinds[1]


def fails(fault: BatonError) -> Callable[[], None]:
    def action() -> None:
        raise fault

    return action


@pytest.mark.parametrize(
    ("fault", "step"), [(StorageError("no space left"), 3), (StoreUnreachable("the store does not answer"), 12)]
)
def test_failed_save_ends_the_run_where_it_was(lab: Lab, fault: BatonError, step: int) -> None:
    spec, held = run_of(f"failed-{step}"), HeldSave(step, fails(fault))
    with pytest.raises(type(fault), match=str(fault)):
        command(lab, spec, held=held)
    assert held.acted
    assert held.trained_to == 12 if step == 12 else held.trained_to > step
    assert committed(lab, spec) == [at for at in (0, 3, 6, 9, 12) if at < step]
    assert command(lab, spec).exit_reason == "complete"
    assert_same_run(lab, spec, STRAIGHT)


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
    spec = run_of("failed-at-once")
    held = HeldSave(3, fails(StorageError("no space left")))
    held.after.append(WaitingForFailure(3, monkeypatch))
    with pytest.raises(StorageError, match="no space left"):
        command(lab, spec, held=held)
    assert held.latest == 4


def test_rival_meanwhile_makes_the_save_stale(lab: Lab) -> None:
    spec = run_of("overtaken")

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
    assert_same_run(lab, spec, STRAIGHT)


def not_finite(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Find weights that are not finite in the first snapshot of each of these steps."""
    left = set(steps)

    def require_finite(snapshot: Any) -> None:
        if snapshot.step in left:
            left.remove(snapshot.step)
            raise NonFinite(f"step {snapshot.step} holds NaN", step=snapshot.step)

    monkeypatch.setattr(write, "require_finite", require_finite)


def test_weights_that_are_not_finite_are_not_committed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = run_of("not-finite")
    not_finite(monkeypatch, 3)
    with pytest.raises(NonFinite, match="step 3 holds NaN") as raised:
        command(lab, spec)
    assert raised.value.step == 3
    assert committed(lab, spec) == [0]


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


@pytest.mark.parametrize(("step", "max_segments"), [(6, 2), (12, None)])
def test_rewind_after_a_save_is_that_of_a_save_in_line(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, step: int, max_segments: int | None
) -> None:
    """The run is a function of its log, so what is rewound must not depend on when a save was written."""
    logs, results = [], []
    for runner in (None, InLine()):
        name = f"rewound-{step}-{'in-line' if runner else 'beside'}"
        spec = run_of(name, train__on_blowup="rewind", train__rewind_skip_batches=2)
        not_finite(monkeypatch, step)
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
    """Drops the model in memory before each stage, which then waits for the save in flight, and restores it."""

    def run(self, stage: Stage[Any, Any], call: Any, place: Place) -> Any:
        if stage.name in {"evaluate", "train_segment"}:
            PROCESS_STATE.forget()
        return super().run(stage, call, place)


def test_state_that_is_not_in_memory_is_restored_once_it_landed(lab: Lab) -> None:
    spec, straight = run_of("forgetful", evaluate__every_steps=6), run_of("evaluated", evaluate__every_steps=6)
    command(lab, spec, runner=Forgetful())
    PROCESS_STATE.forget()
    command(lab, straight)
    assert_same_run(lab, spec, straight)


def test_rewind_where_a_stage_waits_for_the_save(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation of step 6 waits, and the training after step 9."""
    rewinding = {"train__on_blowup": "rewind", "train__rewind_skip_batches": 2}
    spec = run_of("rewound-forgetful", **rewinding, evaluate__every_steps=6)
    not_finite(monkeypatch, 6, 9)
    result = command(lab, spec, runner=Forgetful())
    assert (result.exit_reason, result.step) == ("complete", 12)
    rewinds = [entry.body for entry in entries_of(home_of(lab, spec)) if isinstance(entry.body, Rewind)]
    assert [(body.blown_up_at, body.to.step) for body in rewinds] == [(6, 3), (9, 6)]


def test_short_memory_makes_every_save_in_line(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = run_of("short-of-memory", checkpoint__every_seconds=1e-9)
    monkeypatch.setattr(snapshot, "enough_memory_for_snapshot", lambda _: False)
    begun: list[object] = []
    monkeypatch.setattr(AsyncSaves, "begin", lambda _self, write: begun.append(write))
    command(lab, spec)
    assert begun == []
    assert len(committed(lab, spec)) > 5
    assert [warning for warning in lab.recorder.warnings if "training waits for each commit" in warning] == [
        "a copy of the train state takes 248 bytes of memory, and less is free: training waits for each commit"
    ]
    assert_same_run(lab, spec, STRAIGHT)
