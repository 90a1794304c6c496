"""Which checkpoint is meant by a step, by best, or by nothing."""

from pathlib import Path

import pytest

from tasks.foundation.checkpoint.selection import choose
from tasks.foundation.errors import InvalidInput
from tests.support.fake_run import FakeRun


def test_the_newest_the_best_or_a_step(tmp_path: Path) -> None:
    run = FakeRun(tmp_path).train(100)
    with pytest.raises(InvalidInput, match="has no best checkpoint"):
        choose(run.home, "best", error=InvalidInput)
    run.evaluate(0.9)
    run.train(200, 300)
    run.evaluate(0.8)
    assert choose(run.home, None, error=InvalidInput) == run.tip
    assert choose(run.home, 200, error=InvalidInput).step == 200
    assert choose(run.home, "best", error=InvalidInput).step == 100
    with pytest.raises(InvalidInput, match=r"retains no checkpoint at step 150; it has: 0, 100, 200, 300"):
        choose(run.home, 150, error=InvalidInput)
    with pytest.raises(InvalidInput, match="no run is there"):
        choose(run.root.at("none"), None, error=InvalidInput)
