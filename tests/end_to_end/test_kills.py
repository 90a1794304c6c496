"""SIGKILL at random moments, then again to the end: the same bytes. `BATON_TEST_KILLS` sets how many in a row."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import DRIVER, run_file, settings

from tasks.foundation.contracts.log_entry import Commit
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.local import LocalStorage

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("BATON_TEST_KILLS", "3"))
# Long enough that a kill can fall anywhere between the first step and the last.
LONGER = ["train.steps=1500", "train.segment_steps=40", "evaluate.every_steps=250", "checkpoint.keep_every_steps=700"]


def test_killed_at_random_moments(
    plainly: Callable[..., Any],
    stored_bytes: Callable[[str], Any],
    told: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    straight = plainly("digits", tmp_path / "straight", extra=[*LONGER, "train.segment_steps=2000"]).result
    moments = random.Random(20261120)
    home = tmp_path / "killed" / "digits-cnn"
    steps_seen = []
    for _ in range(KILLS):
        command = [sys.executable, str(DRIVER), str(run_file("digits"))]
        command += settings("digits", tmp_path / "killed", extra=LONGER)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        commits_before = _commits(home)
        # Killed during work: after a random number of further commits and a random moment more.
        wanted = commits_before + moments.randrange(4)
        _wait_until(lambda wanted=wanted: _commits(home) >= wanted, process)
        time.sleep(moments.uniform(0, 0.4))
        process.kill()
        process.wait()
        steps_seen.append(_tip_step(home))
    result = plainly("digits", tmp_path / "killed", extra=LONGER).result
    assert steps_seen == sorted(steps_seen)
    assert result["state_digest"] == straight["state_digest"]
    assert stored_bytes(result["checkpoint"]) == stored_bytes(straight["checkpoint"])
    assert told(result["home"]) == told(straight["home"])
    entries = list(RunLog(LocalStorage(home)).entries())
    assert [entry.number for entry in entries] == list(range(len(entries)))


def _commits(home: Path) -> int:
    head = RunLog(LocalStorage(home)).head()
    return 0 if head is None else head.commits


def _tip_step(home: Path) -> int:
    entries = [entry for entry in RunLog(LocalStorage(home)).entries() if isinstance(entry.body, Commit)]
    return entries[-1].body.checkpoint.step if entries else -1


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.02)
