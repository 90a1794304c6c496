"""Comparison of two finished trainings."""

from pathlib import Path

import pytest

from baton.flows.proof.choose import training_of
from baton.flows.proof.compare import SavedState, compare
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef, sorted_keys
from baton.tasks.foundation.errors import RunLogError
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.fake_executions import FakeExecutions, small_run_file, state_of


def test_keys_are_sorted_in_the_order_of_computation() -> None:
    keys = ["step", "metrics/0/0/a", "optimizer/10/x", "optimizer/2/x", "host/a", "seeds/s", "model/b_10", "model/b_2"]
    assert sorted_keys(keys) == [
        "model/b_2", "model/b_10", "seeds/s", "optimizer/2/x", "optimizer/10/x", "metrics/0/0/a", "host/a", "step"
    ]  # fmt: skip


def test_variable_in_one_training_only_is_a_difference(tmp_path: Path) -> None:
    run, fakes = small_run_file(tmp_path), FakeExecutions()
    one, other = (
        training_of(run, (), name=name, storage=tmp_path, steps=4, segment_steps=4) for name in ("straight", "cut")
    )
    fakes.run_to_end(one)
    fakes.run_to_end(other)

    def saved(home: LocalStorage, ref: CheckpointRef) -> SavedState:
        values = fakes.read(home, ref)
        return state_of({key: value for key, value in values.items() if home.uri == one.home.uri or key != "step"})

    comparison, *_ = compare(one.home, other.home, 4, saved=saved)
    assert comparison.first is not None
    assert (comparison.first.path, comparison.first.only_in) == ("step", "straight")
    with pytest.raises(RunLogError, match="was to train to step 9 but ended at step 4"):
        compare(one.home, other.home, 9, saved=saved)
