"""Runs with an own validation set and a test set: any cut gives the same metrics, and the test set decides nothing."""

import os
import runpy
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.flows.admit import Admitted
from baton.flows.opened_run import OpenedRun
from baton.flows.relay import relay
from baton.flows.result import Goal, RelayResult
from baton.flows.runner import InProcess
from baton.flows.verification import verify_home
from baton.tasks.foundation.contracts.identity import accepted_keys
from baton.tasks.foundation.contracts.log_entry import Evaluation, EvaluationOnTest
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import IdentityChanged
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.event_recorder import EventRecorder
from tests.support.fake_run import flip_a_byte
from tests.support.homes import entries_of, head_of
from tests.support.lab import ZOO, Lab, in_fresh_process, spec_of
from tests.support.watched_relay import assert_same_run, command, home_of

pytestmark = pytest.mark.slow

CALLBACKS = """
from pathlib import Path

import keras


class NoteAndStop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        with Path(__file__).with_name("seen.txt").open("a") as file:
            file.write(f"{logs['val_loss']!r}\\n")
        self.model.stop_training = epoch == 1


def stopping():
    return [NoteAndStop()]
"""


def own(examples: int, form: str = "plain") -> dict[str, Any]:
    return {"source": "data.py:load", "options": {"form": form, "examples": examples}}


def spec_with_sets(name: str, *, test: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    settings: dict[str, Any] = {
        "data__validation_fraction": 0.0,
        "data__validation": own(21),
        "data__test": own(13) if test is None else test,
        "train__steps": 12,
        "train__segment_steps": 4,
        "evaluate__every_steps": 4,
        "checkpoint__keep_best": {"metric": "loss", "mode": "max"},  # the first evaluated one, as training goes on
        "checkpoint__keep_last": 1,
    }
    return spec_of("plain", run=name, **(settings | changes))


def logged_tests(lab: Lab, spec: RunSpec) -> list[tuple[int, dict[str, float], int]]:
    bodies = [entry.body for entry in entries_of(home_of(lab, spec))]
    return [
        (each.checkpoint.step, each.metrics, each.examples) for each in bodies if isinstance(each, EvaluationOnTest)
    ]


def evaluated_in(lab: Lab, spec: RunSpec) -> list[tuple[int, int]]:
    bodies = [entry.body for entry in entries_of(home_of(lab, spec))]
    return [(each.checkpoint.step, each.examples) for each in bodies if isinstance(each, Evaluation)]


class DiesBeforeTest(InProcess):
    """Kills the process when the test set would be evaluated."""

    def run(self, stage: Stage[Any, Any], call: Any, place: Place) -> Any:
        if stage.name == "evaluate" and call.on == "test":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(stage, call, place)


def train_until_the_test(folder: str) -> None:
    command(Lab(Path(folder)), spec_with_sets("killed"), runner=DiesBeforeTest())


def truth(lab: Lab, spec: RunSpec, examples: int) -> dict[str, float]:
    """Metrics of the tip on an own set, computed with NumPy."""
    rows = list(runpy.run_path(str(ZOO / "data.py"))["load"](examples=examples))
    x, y = np.stack([row[0] for row in rows]), np.array([row[1] for row in rows])
    head = head_of(home_of(lab, spec))
    assert head is not None
    assert head.tip is not None
    saved = lab.tensors(spec, head.tip).items()
    found = [np.frombuffer(data, dtype).reshape(shape) for key, (dtype, shape, data) in saved if key[:6] == "model/"]
    by_shape = {value.shape: value for value in found}
    logits = np.tanh(x @ by_shape[6, 5] + by_shape[5,]) @ by_shape[5, 3] + by_shape[3,]
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    loss, accuracy = -np.log(shares[np.arange(len(y)), y]).mean(), (shares.argmax(1) == y).mean()
    return {"loss": float(loss), "accuracy": float(accuracy)}


STRAIGHT = spec_with_sets("straight")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lab, RelayResult]:
    """A run in one piece, and where it is."""
    lab = Lab(tmp_path_factory.mktemp("sets"))
    return lab, command(lab, STRAIGHT)


def test_any_cut_gives_the_same_metrics_on_both_sets(straight: tuple[Lab, RelayResult]) -> None:
    (lab, result), cut = straight, spec_with_sets("cut")
    while command(lab, cut, max_segments=1).stopped:
        PROCESS_STATE.forget()
    assert_same_run(lab, cut, STRAIGHT)
    assert logged_tests(lab, cut) == logged_tests(lab, STRAIGHT)
    assert [(step, examples) for step, _, examples in logged_tests(lab, cut)] == [(12, 13)]
    assert evaluated_in(lab, cut) == [(4, 21), (8, 21), (12, 21)]
    wanted = truth(lab, STRAIGHT, 13)
    assert logged_tests(lab, STRAIGHT)[0][1] == pytest.approx(wanted, rel=1e-5)
    assert result.metrics["test_accuracy"] == pytest.approx(wanted["accuracy"])
    assert result.metrics["validation_loss"] == pytest.approx(truth(lab, STRAIGHT, 21)["loss"], rel=1e-5)
    before = len(entries_of(home_of(lab, cut)))
    assert command(lab, cut).exit_reason == "complete"
    assert len(entries_of(home_of(lab, cut))) == before


def test_kill_before_the_test_evaluation_is_made_up_for_once(straight: tuple[Lab, RelayResult]) -> None:
    (lab, _), killed = straight, spec_with_sets("killed")
    with pytest.raises(AssertionError, match="in a fresh process failed"):
        in_fresh_process(train_until_the_test, folder=str(lab.root))
    assert logged_tests(lab, killed) == []
    head = head_of(home_of(lab, killed))
    assert not Goal.of(killed).reached(head, killed)
    command(lab, killed)
    assert_same_run(lab, killed, STRAIGHT)
    assert logged_tests(lab, killed) == logged_tests(lab, STRAIGHT)
    assert len(logged_tests(lab, killed)) == 1


def test_callbacks_get_the_validation_metrics_only(tmp_path: Path) -> None:
    """Also at the end, where the test set was evaluated before."""
    lab = Lab(tmp_path).copy_of_code("code")
    (lab.code / "callbacks.py").write_text(CALLBACKS)
    spec = spec_with_sets("tested", train__callbacks="callbacks.py:stopping")
    for _ in range(2):
        assert command(lab, spec).exit_reason == "finished_early"
        ((step, metrics, _),) = logged_tests(lab, spec)
        assert step == 8
    bodies = [entry.body for entry in entries_of(home_of(lab, spec))]
    wanted = [each.metrics["loss"] for each in bodies if isinstance(each, Evaluation)]
    assert [float(line) for line in (lab.code / "seen.txt").read_text().split()] == wanted
    assert metrics["loss"] not in wanted


def test_test_set_may_change_and_the_validation_set_may_not(straight: tuple[Lab, RelayResult]) -> None:
    (lab, _), spec = straight, spec_with_sets("changed", data__test=None)
    command(lab, spec)
    assert logged_tests(lab, spec) == []
    # The test set has decided nothing.
    assert_same_run(lab, spec, STRAIGHT)
    heads = [head_of(home_of(lab, each)) for each in (spec, STRAIGHT)]
    bests = [head.best for head in heads if head is not None]
    assert len({(best.checkpoint.step, best.value) for best in bests if best is not None}) == 1
    assert evaluated_in(lab, spec) == evaluated_in(lab, STRAIGHT)
    added = spec_with_sets("changed", test=own(5))
    command(lab, added)  # a test set that is named later is still evaluated
    assert [(step, examples) for step, _, examples in logged_tests(lab, added)] == [(12, 5)]
    other = spec_with_sets("changed", test=own(5), data__validation=own(9), train__steps=16)
    with pytest.raises(IdentityChanged, match=r"data.validation: "):
        command(lab, other)
    run = OpenedRun.of(other, lab.code, root=lab.storage)
    accepted = Admitted(
        run=run, goal=Goal.of(other), accept=accepted_keys("validation"), try_again=False, take_over=False,
        head=run.log.head(), notes=(),
    )  # fmt: skip
    relay(accepted, InProcess(), telemetry=EventRecorder())
    head = head_of(home_of(lab, other))
    assert head is not None
    assert head.best is not None
    assert head.best.checkpoint.step == 16  # the only one that was evaluated on the new set
    assert evaluated_in(lab, other)[-1] == (16, 9)
    assert [step for step, _, _ in logged_tests(lab, other)] == [12, 16]


def test_run_without_validation_can_have_a_test_set(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    spec = spec_with_sets(
        "alone", data__validation=None, checkpoint__keep_best=None, evaluate__every_steps=None, train__steps=4
    )
    result = command(lab, spec)
    assert [(step, examples) for step, _, examples in logged_tests(lab, spec)] == [(4, 13)]
    assert not any(name.startswith("validation_") for name in result.metrics)
    run = OpenedRun.of(spec, lab.code, root=lab.storage)
    assert verify_home(run).damages == []
    test = lab.prepare(spec).own_set("test")
    assert test is not None
    flip_a_byte(next((lab.storage.root / test.folder).glob("*.tfrecord")))
    assert [damage.file.rpartition("/")[0] for damage in verify_home(run).damages] == [test.folder]
