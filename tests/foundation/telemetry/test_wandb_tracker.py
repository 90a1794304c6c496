"""W&B's offline folder has the curves of the log, each point once, under one id."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.trackers import TrackedRun
from tests.foundation.telemetry.test_trackers import evaluate, go_back, train
from tests.support.small_logs import begin
from tests.support.wandb_folder import in_folder

pytestmark = pytest.mark.slow  # W&B starts a process of its own

ROOT = Path(__file__).parents[3]
# Sends everything, and is gone before it closes the folder.
KILLED = """
import os, sys
from pathlib import Path
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.trackers import TrackedRun
from baton.tasks.foundation.telemetry.trackers import WandbTracker

home = Path(sys.argv[1])
storage = LocalStorage(home)
tracker = WandbTracker(run=sys.argv[2], name="digits", home=storage, folder=home, project="baton")
os._exit(9 if TrackedRun(RunLog(storage), lambda: tracker).update() else 1)
"""


def logged(log: RunLog) -> list[tuple[str, int, float]]:
    history = history_of(log.entries())
    rows = {(f"train/{key}", row.step, value) for row in history.rows for key, value in row.metrics.items()}
    rows |= {("validation/loss", each.checkpoint.step, each.metrics["loss"]) for each in history.evaluations}
    return sorted((name.replace("(1)", "_1_"), step, value) for name, step, value in rows)


def shown(home: Path) -> list[tuple[str, int, float]]:
    besides = {"train/learning_rate", "train/examples_per_second"}
    return [point for point in in_folder(home)[1] if point[0] not in besides]


def test_offline_run_has_each_point_once(tmp_path: Path) -> None:
    from baton.tasks.foundation.telemetry.trackers import WandbTracker

    home = tmp_path / "home"
    storage = LocalStorage(home)
    log, run = begin(storage), uuid.uuid4().hex

    def another_process() -> TrackedRun:
        return TrackedRun(log, lambda: WandbTracker(run=run, name="digits", home=storage, folder=home, project="baton"))

    first = another_process()
    for step in (10, 20):
        train(log, step, step - 5, step)
        evaluate(log, step / 8)
        assert first.update()
    assert first.close()
    assert in_folder(home)[0] == run
    assert shown(home) == logged(log)
    before = sorted(home.glob("wandb/offline-run-*/*"))
    assert another_process().close()  # nothing is new
    assert sorted(home.glob("wandb/offline-run-*/*")) == before

    train(log, 30, 25, 30)
    # A process started by one that has used W&B would share its service, which survives the kill.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(home), run], cwd=ROOT, env=alone, check=False)
    assert killed.returncode == 9
    train(log, 40, 40)
    after = another_process()
    assert after.close()
    assert in_folder(home)[0] == run
    assert shown(home) == logged(log)

    go_back(log, 33)
    train(log, 35, 35, loss=9.0)
    assert another_process().close()
    assert shown(home) == logged(log)
