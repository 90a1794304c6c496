"""A home that an earlier version made says what is different now, and goes on."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.foundation.contracts.log_entry import Change, Commit, Entry
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.local import LocalStorage
from tests.support.shipped_runs import CHECKOUT, DRIVER

pytestmark = pytest.mark.slow

HOME = CHECKOUT / "tests" / "older_homes" / "0032a4b"


def go_on(folder: Path, *settings: str) -> tuple[str, list[Entry]]:
    """Take a copy of the home to its end; what was said, and the log."""
    shutil.copytree(HOME, folder)
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, str(DRIVER), str(folder / "run" / "run.yaml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 40
    return done.stderr, list(RunLog(LocalStorage(folder / "storage" / "small")).entries())


def test_it_goes_on_with_deterministic_operations_and_says_so(tmp_path: Path) -> None:
    said, entries = go_on(tmp_path / "copy")
    assert "the environment changed" in said
    assert "TensorFlow uses deterministic operations only from here on, which it did not before" in said
    (change,) = [entry.body for entry in entries if isinstance(entry.body, Change)]
    assert change.environment.deterministic
    assert change.identity is None
    tip = entries[-1].head.tip
    assert tip is not None
    assert tip.step == 40


def test_it_goes_on_as_before_where_that_is_asked_for(tmp_path: Path) -> None:
    said, entries = go_on(tmp_path / "copy", "train.deterministic=false")
    assert "train.deterministic is false: operations that are not deterministic are allowed" in said
    assert "the environment changed" not in said
    assert not any(isinstance(entry.body, Change) for entry in entries)
    last = [entry.body for entry in entries if isinstance(entry.body, Commit)][-1]
    assert last.checkpoint.step == 40
