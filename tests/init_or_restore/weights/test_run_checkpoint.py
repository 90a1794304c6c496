"""Weights from a checkpoint of another run."""

import shutil
from pathlib import Path

import pytest

from baton.tasks.foundation.contracts.log_entry import Rewind
from baton.tasks.foundation.errors import WeightsError
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.init_or_restore.weights.weight_files import read_run_weights
from tests.support.lab import Lab, restored
from tests.support.weights_lab import (
    SOURCE,
    load,
    refusal,
    same,
    values_of,
)


def test_run_gives_its_newest_or_the_named_checkpoint(lab: Lab) -> None:
    head = lab.log(SOURCE).head()
    assert head is not None
    home = "../storage/source"
    for step, ref in ((None, head.retained[-1]), (0, head.retained[0]), (3, head.retained[-1])):
        state, report = load(lab, {"source": home, "step": step} if step is not None else home)
        assert same(values_of(state), values_of(restored(lab, SOURCE, ref)))
        assert (report.sources[0].step, report.sources[0].kind) == (ref.step, "a Baton run")
        assert report.sources[0].place == f"{lab.root}/storage/source/{ref.path}"
        assert state.step == 0
    assert "retains no checkpoint at step 2; it has: 0, 3" in refusal(lab, {"source": home, "step": 2})
    assert "has no best checkpoint" in refusal(lab, {"source": home, "step": "best"})


class Retires(LocalStorage):
    """A run's home; while a checkpoint is read, the run is rewound to step 0 and deletes it."""

    def read(self, path: str) -> bytes:
        if path.endswith("manifest.json") and self.exists(path):
            head = RunLog(LocalStorage(self.root)).require_head()
            first, newest = head.retained[0], head.retained[-1]
            body = Rewind(to=first, blown_up_at=3, reason="loss", skip_batches=1)
            if path.startswith(newest.path) and newest != first:
                RunLog(LocalStorage(self.root)).append(lambda _: body, attempt="a")
                self.delete(newest.path)
        return super().read(path)


@pytest.mark.parametrize("step", [None, 3])
def test_checkpoint_retired_while_reading(lab: Lab, tmp_path: Path, step: int | None) -> None:
    shutil.copytree(lab.root / "storage" / "source", tmp_path / "live")
    live = Retires(tmp_path / "live")
    into = tmp_path / "here"
    if step is not None:
        with pytest.raises(WeightsError, match=r"step 3 was retired while it was being read.*it now has: 0"):
            read_run_weights(live, step, into)
        return
    found = read_run_weights(live, step, into)
    assert found.step == 0
    assert found.variables
