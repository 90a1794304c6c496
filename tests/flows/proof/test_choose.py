"""What is executed: the arguments and segments of a proof, and the stretches of an audit."""

import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from baton.flows.commands.main import main
from baton.flows.proof.choose import (
    Stretch,
    Stretches,
    choose,
    cut_length,
    log_every_steps,
    logged_settings,
    stretches_of,
    training_of,
)
from baton.flows.proof.receipt import environment_differences
from baton.tasks.foundation.contracts.log_entry import Change
from baton.tasks.foundation.contracts.run_file import RunFile, load_run_file
from baton.tasks.foundation.contracts.run_spec import next_border, with_examples
from baton.tasks.foundation.errors import InvalidInput
from tests.support.fake_executions import ENVIRONMENT, small_run_file
from tests.support.fake_run import FakeRun


def test_too_few_retained_checkpoints_are_refused() -> None:
    with pytest.raises(InvalidInput, match="keep_every_steps") as refused:
        choose(Stretches(auditable=(), left_out=("steps 2 to 4: why",)), "all", count=1, seed=0, home="home")
    assert "steps 2 to 4: why" in str(refused.value)
    assert refused.value.exit_code == 2


def test_steps_from_before_an_accepted_change_are_left_out(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(10, 20)
    change = Change(environment=run.head.environment, identity={**run.head.identity, "train.seed": 1}, accepted=())
    run.log.append(lambda _: change, attempt=uuid.uuid4().hex)
    found = stretches_of(run.train(30, 40).log.entries())
    assert [each.start.step for each in found.auditable] == [20, 30]
    assert found.left_out == (
        "steps 0 to 10: a change of the identity was accepted later",
        "steps 10 to 20: a change of the identity was accepted later",
    )


def test_another_environment_is_named_by_key() -> None:
    now = ENVIRONMENT.model_copy(update={"replicas": 2, "versions": {"keras": "3"}})
    assert environment_differences(ENVIRONMENT, now) == (
        "replicas: the log has 1, the audit ran with 2",
        "version of keras: the log has none, the audit ran with 3",
    )
    assert environment_differences(now, now) == ()


def test_run_without_a_log_is_not_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run_file(tmp_path)
    assert main(["audit", str(run.path)]) == 2
    assert "has not been run yet" in capsys.readouterr().err
    assert main(["audit", str(run.path), "--last", "--all"]) == 2
    assert not (tmp_path / "runs").exists()


def stretch_with(run: FakeRun, rows: tuple[int, ...]) -> Stretch:
    (found,) = stretches_of(run.log.entries()).auditable[-1:]
    return Stretch(start=found.start, before=found.before, commits=found.commits, rows=rows)


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ((20, 40), ("train.log_every_steps=20",)),
        ((10, 20, 30, 40), ()),  # as the run file says
        ((20,), ()),  # 20, or the last one before a longer distance: too few rows to tell
        ((), ()),
        ((5, 10, 20), ()),  # it changed on the way
    ],
)
def test_distance_of_rows_is_that_of_the_log(tmp_path: Path, rows: tuple[int, ...], settings: tuple[str, ...]) -> None:
    run = FakeRun(tmp_path).train(40)
    spec = load_run_file(run.run_file(), ["train.log_every_steps=10"]).spec
    assert logged_settings(spec, stretch_with(run, rows)) == settings


@pytest.mark.parametrize(
    ("rows", "target", "settings"),
    [
        ((25,), "train.epochs=4", ()),  # 25 steps an epoch, from step 0 to 40
        ((10, 20, 25, 30, 40), "train.epochs=4", ("train.log_every_steps=10",)),
        ((10, 20, 30, 40), "train.epochs=4", ("train.epochs=null", "train.steps=100", "train.log_every_steps=10")),
        ((), "train.epochs=4", ("train.epochs=null", "train.steps=100", "train.log_every_steps=null")),
        ((25,), "train.steps=90", ("train.steps=null", "train.epochs=4", "train.log_every_steps=null")),
    ],
)
def test_rows_of_epochs_are_those_of_the_log(
    tmp_path: Path, rows: tuple[int, ...], target: str, settings: tuple[str, ...]
) -> None:
    run = FakeRun(tmp_path).train(40)
    unit = ["train.steps=null"] if "epochs" in target else []
    spec = with_examples(load_run_file(run.run_file(), [*unit, target]).spec, 25 * 32)
    kept = [] if len(settings) < 2 else ["evaluate.every=epoch" if "epochs" in target else "evaluate.every=null"]
    assert logged_settings(spec, stretch_with(run, rows)) == (*settings, *kept)


def test_rows_of_a_stretch_come_from_its_commits(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(10, 20)
    assert [each.rows for each in stretches_of(run.log.entries()).auditable] == [(10,), (20,)]


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return small_run_file(tmp_path)


@pytest.mark.parametrize("steps", [*range(4, 70), 1000])
def test_kill_comes_before_the_end_and_cuts_between_metric_rows(steps: int) -> None:
    length, every = cut_length(steps), log_every_steps(steps, cut_length(steps))
    assert length % 2 == 1
    # The kill comes at the second border, before the last step.
    assert 2 * length < steps
    assert steps % every != 0
    assert length % every != 0


def test_straight_training_has_no_cut_and_no_evaluation(run: RunFile, tmp_path: Path) -> None:
    storage = tmp_path / "a: b #c"
    execution = training_of(
        run, ("train.seed=4", "run=other"), name="straight", storage=storage, steps=31, segment_steps=31
    )
    file, *options, until, steps = execution.arguments()
    assert (until, steps) == ("--until-step", "31")
    spec = load_run_file(Path(file), [word for word in options if word != "--set"]).spec
    assert (spec.run, spec.storage, spec.train.seed) == ("straight", str(storage), 4)
    assert spec.train.steps > 31  # so that no final evaluation is due
    assert next_border(spec, 0, 31) == 31
    assert (spec.evaluate.every_steps, spec.train.segment_seconds) == (None, None)


@pytest.mark.parametrize(("every", "wanted"), [(100, 15), (None, None)])
def test_callbacks_of_evaluations_run_in_a_proof(
    run: RunFile, tmp_path: Path, every: int | None, wanted: int | None
) -> None:
    callbacks = run.spec.train.model_copy(update={"callbacks": "callbacks.py:make"})
    evaluate = run.spec.evaluate.model_copy(update={"every_steps": every})
    with_callbacks = replace(run, spec=run.spec.model_copy(update={"train": callbacks, "evaluate": evaluate}))
    for run_file, steps in ((with_callbacks, wanted), (run, None)):
        execution = training_of(run_file, (), name="cut", storage=tmp_path, steps=31, segment_steps=7)
        file, *options, _, _ = execution.arguments()
        spec = load_run_file(Path(file), [word for word in options if word != "--set"]).spec
        assert spec.evaluate.every_steps == steps
