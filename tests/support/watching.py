"""Watch a run's home while another process trains in it."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from baton.tasks.foundation.contracts.attempt import AttemptRecord
from baton.tasks.foundation.contracts.log_entry import Commit
from baton.tasks.foundation.log.attempts import read_attempts
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.homes import entries_of

# Several processes may have to start first, each with TensorFlow, on a busy machine.
_LONGEST_SECONDS = 600
# Conditions may ask a Prefect server, which then works for the whole time.
_POLL_SECONDS = 0.2


def commits_of(home: Path) -> list[tuple[int, str]]:
    """Step and exit reason of every commit."""
    bodies = [entry.body for entry in entries_of(home)]
    return [(body.checkpoint.step, body.exit_reason) for body in bodies if isinstance(body, Commit)]


def attempts_of(home: Path) -> tuple[AttemptRecord, ...]:
    return read_attempts(LocalStorage(home)).records


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait for a condition; fails after ten minutes, or when the process ends first."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    while not condition():
        assert process is None or process.poll() is None, f"the process ended with code {process.returncode}"
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(_POLL_SECONDS)


def trains(home: Path, after: int) -> bool:
    """Whether an attempt after the first `after` ones has trained steps that are not committed yet."""
    new = attempts_of(home)[after:]
    return any(record.doing == "train" and record.step > record.committed_step for record in new)
