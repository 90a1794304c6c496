"""A real Prefect server and a real process worker: cancelled, killed and told to go, the next flow run continues."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.homes import entries_of, tip_of
from tests.support.prefect_deployments import ENDED, Prefect
from tests.support.shipped_runs import SHORT, run_file
from tests.support.watching import attempts_of, commits_of, trains, wait_until

pytestmark = pytest.mark.slow

# Long enough that every flow run but the last is met while it trains.
LONG = ["train.steps=9000", "train.segment_steps=4000", "evaluate.every_steps=null"]


def assert_nothing_is_lost(home: Path) -> None:
    last = attempts_of(home)[-1]
    assert commits_of(home)[-1] == (last.step, "sigterm")
    assert last.step > last.from_step
    assert last.uncommitted_seconds == 0


def is_over(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"


@pytest.mark.timeout(1500)
def test_whatever_ends_a_flow_run_the_next_one_continues(
    plainly: Callable[..., Any],
    stored_bytes: Callable[[str], Any],
    told: Callable[[str], Any],
    server: str,
    tmp_path: Path,
) -> None:
    straight = plainly("digits", tmp_path / "straight", extra=[*LONG, "train.segment_steps=9000"]).result
    prefect = Prefect(server, tmp_path)
    deployment = prefect.deploy("flows/train_run.py:train_run", "tests")
    home = tmp_path / "worked" / "digits-cnn"
    overrides = [f"storage={tmp_path / 'worked'}", "accelerator.kind=cpu", *SHORT["digits"], *LONG]

    def trained_by(number: int) -> int:
        """The process of an attempt that trains."""
        wait_until(lambda: len(attempts_of(home)) == number and trains(home, number - 1))
        return attempts_of(home)[-1].pid

    def started(number: int) -> tuple[str, int]:
        """A flow run that trains: its id, and its process."""
        flow_run = prefect.start(deployment, run_file=str(run_file("digits")), overrides=overrides)
        return flow_run, trained_by(number)

    # As a container on a spot machine has it: SIGTERM schedules the same flow run again, and a worker takes it up.
    cancelled = prefect.start(deployment, run_file=str(run_file("digits")), overrides=overrides)
    with prefect.executing(cancelled) as execution:
        pid = trained_by(1)
        execution.terminate()
        assert execution.wait(timeout=120) == 0
        wait_until(lambda: is_over(pid))
    assert prefect.state(cancelled) == "SCHEDULED"
    assert_nothing_is_lost(home)

    with prefect.worker() as worker:
        pid = trained_by(2)
        prefect.cancel(cancelled)
        wait_until(lambda: is_over(pid))
        wait_until(lambda: prefect.state(cancelled) in ENDED)
        assert prefect.state(cancelled) == "CANCELLED"
        assert_nothing_is_lost(home)

        killed, pid = started(3)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: prefect.state(killed) in ENDED)
        assert prefect.state(killed) == "CRASHED"
        before = commits_of(home)

        orphaned, pid = started(4)
        assert commits_of(home)[: len(before)] == before
        worker.terminate()
        worker.wait(timeout=120)
        wait_until(lambda: is_over(pid))
        assert prefect.state(orphaned) != "COMPLETED"

    with prefect.worker():
        last = prefect.start(deployment, run_file=str(run_file("digits")), overrides=overrides)
        wait_until(lambda: prefect.state(last) in ENDED)
        assert prefect.state(last) == "COMPLETED"

    numbers = [entry.number for entry in entries_of(home)]
    assert numbers == list(range(len(numbers)))
    tip = tip_of(home)
    assert tip.state_digest == straight["state_digest"]
    assert stored_bytes(f"{home}/{tip.path}") == stored_bytes(straight["checkpoint"])
    assert told(str(home)) == told(straight["home"])
