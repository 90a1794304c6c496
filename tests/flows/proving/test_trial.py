"""The arguments of a trial, and the lengths of its segments."""

from dataclasses import replace
from pathlib import Path

import pytest

from flows.proving.trial import cut_length, log_every_steps, trial_of
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.contracts.schedule import next_border
from tests.support.fake_trials import small_run_file


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


def test_straight_trial_has_no_cut_and_no_evaluation(run: RunFile, tmp_path: Path) -> None:
    storage = tmp_path / "a: b #c"
    trial = trial_of(run, ("train.seed=4", "run=other"), name="straight", storage=storage, steps=31, segment_steps=31)
    file, *options, until, steps = trial.arguments()
    assert (until, steps) == ("--until-step", "31")
    spec = load_run_file(Path(file), [word for word in options if word != "--set"]).spec
    assert (spec.run, spec.storage, spec.train.seed) == ("straight", str(storage), 4)
    assert spec.train.steps > 31  # so that no final evaluation is due
    assert next_border(spec, 0, 31) == 31
    assert (spec.evaluate.every_steps, spec.train.segment_seconds) == (None, None)


@pytest.mark.parametrize(("every", "wanted"), [(100, 15), (None, None)])
def test_callbacks_of_evaluations_run_in_a_trial(
    run: RunFile, tmp_path: Path, every: int | None, wanted: int | None
) -> None:
    callbacks = run.spec.train.model_copy(update={"callbacks": "callbacks.py:make"})
    evaluate = run.spec.evaluate.model_copy(update={"every_steps": every})
    with_callbacks = replace(run, spec=run.spec.model_copy(update={"train": callbacks, "evaluate": evaluate}))
    for run_file, steps in ((with_callbacks, wanted), (run, None)):
        trial = trial_of(run_file, (), name="cut", storage=tmp_path, steps=31, segment_steps=7)
        file, *options, _, _ = trial.arguments()
        spec = load_run_file(Path(file), [word for word in options if word != "--set"]).spec
        assert spec.evaluate.every_steps == steps
