"""A real Prefect server and process worker: after a cancel, a kill or SIGTERM the next flow run continues."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.homes import entries_of, read_history, tip_of
from tests.support.prefect_deployments import ENDED, Prefect
from tests.support.prefect_server import post
from tests.support.shipped_runs import NO_PAUSES, SLOW, run_file, slow_digits
from tests.support.watching import attempts_of, commits_of, trains, wait_until

pytestmark = pytest.mark.slow

# Long enough to interrupt every flow run but the last during training.
STEPS = [*SLOW, "train.steps=1800"]


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
def test_next_flow_run_continues_after_any_end(
    train_without_prefect: Callable[..., Any],
    stored_bytes: Callable[[str], Any],
    server: str,
    tmp_path: Path,
) -> None:
    file = slow_digits(tmp_path / "slow")
    one_segment = [*STEPS, "train.segment_steps=1800"]
    straight = train_without_prefect(
        "digits", tmp_path / "straight", extra=one_segment, file=file, environment=NO_PAUSES
    ).result
    prefect = Prefect(server, tmp_path)
    deployment = prefect.deploy("flows/with_prefect/run_flows.py:train_run", "tests")
    home = tmp_path / "worked" / "digits-cnn"
    overrides = [f"storage={tmp_path / 'worked'}", "accelerator.kind=cpu", *STEPS, "train.segment_steps=800"]

    def trained_by(number: int) -> int:
        """Wait until an attempt trains; returns its process id."""
        wait_until(lambda: len(attempts_of(home)) == number and trains(home, number - 1))
        return attempts_of(home)[-1].pid

    def started(number: int) -> tuple[str, int]:
        """Start a flow run and wait until it trains; returns its id and process id."""
        flow_run = prefect.start(deployment, run_file=str(file), overrides=overrides)
        return flow_run, trained_by(number)

    # As in a container on a spot machine: SIGTERM reschedules the flow run, and a worker picks it up.
    cancelled = prefect.start(deployment, run_file=str(file), overrides=overrides)
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
        last = prefect.start(deployment, run_file=str(file), overrides=overrides)
        wait_until(lambda: prefect.state(last) in ENDED)
        assert prefect.state(last) == "COMPLETED"
        # The deployment has none.
        assert {"baton", "run:digits-cnn"} <= set(
            post(server, "flow_runs/filter", {"flow_runs": {"id": {"any_": [last]}}})[0]["tags"]
        )

    numbers = [entry.number for entry in entries_of(home)]
    assert numbers == list(range(len(numbers)))
    tip = tip_of(home)
    assert tip.state_digest == straight["state_digest"]
    assert stored_bytes(f"{home}/{tip.path}") == stored_bytes(straight["checkpoint"])
    assert read_history(str(home)) == read_history(straight["home"])


def test_cancelled_flow_run_ends_if_its_worker_is_gone(server: str, tmp_path: Path) -> None:
    file = slow_digits(tmp_path / "slow")
    prefect = Prefect(server, tmp_path)
    deployment = prefect.deploy("flows/with_prefect/run_flows.py:train_run", "left-alone")
    home = tmp_path / "worked" / "digits-cnn"
    overrides = [f"storage={tmp_path / 'worked'}", "accelerator.kind=cpu", *STEPS, "train.segment_steps=40"]
    with prefect.worker() as worker:
        flow_run = prefect.start(deployment, run_file=str(file), overrides=overrides)
        wait_until(lambda: len(attempts_of(home)) == 1 and trains(home, 0))
        worker.kill()  # it would tell the process of the cancellation
        worker.wait(timeout=120)
        prefect.cancel(flow_run)
        pid = attempts_of(home)[0].pid
        wait_until(lambda: is_over(pid))
    assert prefect.state(flow_run) == "CANCELLED"
    (attempt,) = attempts_of(home)
    assert (attempt.ended, attempt.uncommitted_seconds) == ("TerminationSignal", 0)
    assert commits_of(home)[-1][0] == attempt.step < 1800


def test_refused_flow_run_says_its_error_once(server: str, tmp_path: Path) -> None:
    prefect = Prefect(server, tmp_path)
    deployment = prefect.deploy("flows/with_prefect/run_flows.py:train_run", "refused")
    refused = prefect.start(deployment, run_file=str(run_file("digits")), overrides=["train.stepz=1"])
    with prefect.executing(refused) as execution:
        execution.wait(timeout=300)
    assert prefect.state(refused) == "FAILED"
    printed = (tmp_path / "execute.log").read_text(encoding="utf-8")
    assert printed.count("train.stepz (here 1) is not a known key") == 1
    assert "Traceback" not in printed
    assert "\\n" not in printed
