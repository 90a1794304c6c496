"""Looks into a run's home from outside, while a process works there."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tasks.foundation.contracts.attempt import AttemptRecord
from tasks.foundation.contracts.log_entry import Commit
from tasks.foundation.runlog.attempts import read_attempts
from tasks.foundation.storage.local import LocalStorage
from tests.support.homes import entries_of

# Several processes may have to start one after another first, each with TensorFlow, beside others that do the same.
_PATIENCE_SECONDS = 600


def commits_of(home: Path) -> list[tuple[int, str]]:
    """Step and exit reason of every commit."""
    bodies = [entry.body for entry in entries_of(home)]
    return [(body.checkpoint.step, body.exit_reason) for body in bodies if isinstance(body, Commit)]


def attempts_of(home: Path) -> tuple[AttemptRecord, ...]:
    return read_attempts(LocalStorage(home)).records


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait, with patience; not for a process that has ended."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert process is None or process.poll() is None, f"the process ended with code {process.returncode}"
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.05)


def trains(home: Path, after: int) -> bool:
    """Whether an attempt, besides the first `after` ones, has taken steps that are not committed yet."""
    new = attempts_of(home)[after:]
    return any(record.doing == "train" and record.step > record.committed_step for record in new)
