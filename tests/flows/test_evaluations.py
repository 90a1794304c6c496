"""Evaluations in another process: training goes on meanwhile, in order, and none is lost."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.flows.runner import InProcess
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Evaluation, EvaluationOnTest
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import StepFailed
from baton.tasks.foundation.log.appends import overdue_evaluation
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.foundation.telemetry.events import Event, Training, Waiting
from tests.support.lab import Lab, spec_of
from tests.support.watched_relay import LONGEST_SECONDS, HeldSave, command


def spec_evaluated_elsewhere(**changes: Any) -> RunSpec:
    return spec_of("plain", evaluate__every_steps=4, stages__evaluate="evaluate/somewhere", train__steps=12, **changes)


class Elsewhere(InProcess):
    """Evaluates in a thread that stands for another process; `act` is called before it logs the metrics."""

    remote = frozenset({"evaluate"})

    def __init__(self, act: Callable[[CheckpointRef], object] = lambda _: None) -> None:
        self.begun: list[int] = []
        self.at_once = self.most_at_once = 0
        self._act = act

    def run(self, stage: Stage[Any, Any], call: Any, place: Place) -> Any:
        if stage.name != "evaluate":
            return super().run(stage, call, place)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.begun.append(call.checkpoint.step)
        self._act(call.checkpoint)
        body = Evaluation(checkpoint=call.checkpoint, metrics={"loss": 1.0}, examples=1, seconds=0.0, keep_best=None)
        place.log.append(lambda _: body, attempt="e" * 32)
        self.at_once -= 1
        return body


class Passed(HeldSave):
    """Says when training has passed a step, and when it waits for another process."""

    def __init__(self, step: int) -> None:
        super().__init__(-1)
        self._passes, self.passed = step, threading.Event()
        self.waits = threading.Event()

    def emit(self, event: Event) -> None:
        super().emit(event)
        if isinstance(event, Training) and event.step > self._passes:
            self.passed.set()
        if event == Waiting(on="a remote stage"):
            self.waits.set()


class AskedElsewhere(InProcess):
    """Evaluates as if in another process, and notes what it was asked for and what the log had then."""

    remote = frozenset({"evaluate"})

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, int]] = []

    def run(self, stage: Stage[Any, Any], call: Any, place: Place) -> Any:
        if stage.name == "evaluate":
            number = place.log.require_head().number
            self.asked.append((call.checkpoint.step, call.on, number))
        return super().run(stage, call, place)


def evaluated_steps(lab: Lab, spec: RunSpec) -> list[int]:
    return [entry.body.checkpoint.step for entry in lab.log(spec).entries() if isinstance(entry.body, Evaluation)]


def test_training_goes_on_while_another_process_evaluates(tmp_path: Path) -> None:
    lab, spec, passed = Lab(tmp_path), spec_evaluated_elsewhere(), Passed(4)

    def act(checkpoint: CheckpointRef) -> None:
        if checkpoint.step == 4:
            assert passed.passed.wait(LONGEST_SECONDS), "the training waited for the evaluation"
        if checkpoint.step == 12:  # the end of the command; another machine may come late
            assert passed.waits.wait(LONGEST_SECONDS), "the wait is taken for an evaluation in this process"

    runner = Elsewhere(act)
    command(lab, spec, held=passed, runner=runner)
    assert evaluated_steps(lab, spec) == [4, 8, 12]
    assert runner.most_at_once == 1


@pytest.mark.parametrize("step", [8, 12])
def test_error_of_an_evaluation_beside_ends_the_command(tmp_path: Path, step: int) -> None:
    def act(checkpoint: CheckpointRef) -> None:
        if checkpoint.step == step:
            raise StepFailed("test_step failed elsewhere")

    lab, spec = Lab(tmp_path), spec_evaluated_elsewhere()
    with pytest.raises(StepFailed, match="elsewhere"):
        command(lab, spec, runner=Elsewhere(act))
    assert evaluated_steps(lab, spec) == list(range(4, step, 4))


@pytest.mark.slow
def test_killed_evaluation_is_made_up_for_in_order(tmp_path: Path) -> None:
    lab, spec = Lab(tmp_path), spec_evaluated_elsewhere(checkpoint__keep_last=1)
    # What a kill leaves: step 8 is committed, and the evaluation of step 4 was under way.
    head = lab.train_and_commit(spec, 4, 8)
    overdue = overdue_evaluation(head, spec)
    assert overdue is not None
    assert overdue.step == 4
    assert overdue in head.retained, "it was retired before its evaluation"
    runner = Elsewhere()
    command(lab, spec, runner=runner)
    assert runner.begun == [4, 8, 12]
    assert evaluated_steps(lab, spec) == [4, 8, 12]


def test_evaluation_of_a_save_that_fails_never_begins(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    lab, spec, runner = Lab(tmp_path), spec_evaluated_elsewhere(), Elsewhere()
    with pytest.raises(OSError, match="the disk is gone"):
        command(lab, spec, held=HeldSave(8, fail), runner=runner)
    assert runner.begun == [4]


@pytest.mark.slow
def test_test_set_is_evaluated_elsewhere_after_the_rest(tmp_path: Path) -> None:
    lab, runner = Lab(tmp_path), AskedElsewhere()
    spec = spec_evaluated_elsewhere(data__test={"source": "data.py:load", "options": {"examples": 9}})
    command(lab, spec, runner=runner)
    assert [(step, on) for step, on, _ in runner.asked] == [
        (4, "validation"), (8, "validation"), (12, "validation"), (12, "test"),
    ]  # fmt: skip
    entries = list(lab.log(spec).entries())
    assert [type(entry.body) for entry in entries[-2:]] == [Evaluation, EvaluationOnTest]
    assert entries[-1].head.tested == (entries[-1].body.checkpoint.path,)
    command(lab, spec, runner=runner)
    assert len(runner.asked) == 4
