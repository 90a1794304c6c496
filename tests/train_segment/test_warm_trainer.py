"""A trainer that is kept between segments continues from memory, but only if its state is the requested one."""

import shutil
from pathlib import Path

import pytest

from baton.tasks.foundation.checkpoint.write import stage_checkpoint
from baton.tasks.foundation.errors import DamagedCheckpoint
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.lab import Lab, differing, restored, spec_of


@pytest.mark.slow
def test_warm_trainer_continues_from_memory(tmp_path: Path) -> None:
    lab, spec = Lab(tmp_path), spec_of("functional")
    first = lab.train_and_commit(spec, 5).tip
    assert first is not None
    away = lab.folder(spec, first).rename(tmp_path / "away")
    warm = lab.train(spec, first, 11)
    away.rename(lab.folder(spec, first))
    # A second command evaluates where it starts, and trains what it has restored for that.
    PROCESS_STATE.forget()
    lab.begin(spec)
    lab.evaluate(spec, first)
    shutil.rmtree(lab.folder(spec, first))
    again = lab.train(spec, first, 11)
    assert differing(lab.tensors(spec, warm.staged), lab.tensors(spec, again.staged)) == []
    PROCESS_STATE.forget()
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is missing"):
        lab.train(spec, first, 11)


def test_warm_trainer_restores_another_checkpoint(tmp_path: Path) -> None:
    lab, spec = Lab(tmp_path), spec_of("plain")
    start = lab.begin(spec).tip
    assert start is not None
    held = lab.train(spec, start, 5).staged
    state = restored(lab, spec, held)
    state.model.trainable_variables[0].assign_add([[1.0] * 5] * 6)
    other = stage_checkpoint(state, lab.home(spec), base=held.base, attempt="other")
    assert other.step == held.step
    warm = lab.train(spec, other, 11)
    PROCESS_STATE.forget()
    cold = lab.train(spec, other, 11)
    assert warm.staged.state_digest == cold.staged.state_digest
    assert warm.staged.state_digest != lab.train(spec, held, 11).staged.state_digest


@pytest.mark.slow
def test_trainer_of_another_run_is_not_used(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    one, other = spec_of("plain", run="one"), spec_of("plain", run="other", train__seed=1)
    results = []
    for spec in (one, other, one):
        start = lab.begin(spec).tip
        assert start is not None
        results.append(lab.tensors(spec, lab.train(spec, start, 5).staged))
    assert differing(results[0], results[2]) == []
    assert differing(results[0], results[1]) != []
