"""Selecting the newest checkpoint, the best, or one by its step."""

from pathlib import Path

import pytest

from baton.tasks.foundation.checkpoint.selection import select_checkpoint
from baton.tasks.foundation.errors import InvalidInput
from tests.support.fake_run import FakeRun


def test_newest_best_and_step_are_selected(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(100)
    with pytest.raises(InvalidInput, match="has no best checkpoint"):
        select_checkpoint(run.home, "best", error=InvalidInput)
    run.evaluate(0.9)
    run.train(200, 300)
    run.evaluate(0.8)
    assert select_checkpoint(run.home, None, error=InvalidInput) == run.tip
    assert select_checkpoint(run.home, 200, error=InvalidInput).step == 200
    assert select_checkpoint(run.home, "best", error=InvalidInput).step == 100
    with pytest.raises(InvalidInput, match=r"retains no checkpoint at step 150; it has: 0, 100, 200, 300"):
        select_checkpoint(run.home, 150, error=InvalidInput)
    with pytest.raises(InvalidInput, match="no run is there"):
        select_checkpoint(run.root.at("none"), None, error=InvalidInput)
