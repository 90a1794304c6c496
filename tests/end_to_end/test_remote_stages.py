"""Segments on a process worker with a real Prefect server: the run continues after kills and cancellations."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.contracts.attempt import LAUNCH, AttemptRecord
from tasks.foundation.contracts.log_entry import Commit
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.homes import entries_of, tip_of
from tests.support.prefect_deployments import ENDED, Prefect
from tests.support.prefect_server import post
from tests.support.shipped_runs import NO_PAUSES, SLOW, slow_digits
from tests.support.watching import attempts_of, commits_of, wait_until

pytestmark = pytest.mark.slow

# Long enough to interrupt every segment but the last ones during training.
STEPS = [*SLOW, "train.steps=1200"]


class Runs:
    """A training run whose segments a worker trains, and the commands that continue it."""

    def __init__(self, prefect: Prefect, folder: Path) -> None:
        self.prefect = prefect
        self.file = slow_digits(folder / "slow")
        self.home = folder / "worked" / "digits-cnn"
        self.overrides = [
            f"storage={folder / 'worked'}", "accelerator.kind=cpu", *STEPS, "train.segment_steps=600",
            "stages.train_segment=train-segment/tests",
        ]  # fmt: skip
        self.started = 0

    @contextmanager
    def command(self) -> Iterator[subprocess.Popen[str]]:
        """Run `baton run` during the block."""
        words = [word for override in self.overrides for word in ("--set", override)]
        command = [sys.executable, "-m", "flows.commands.main", "run", str(self.file), *words]
        with (self.prefect.folder / "commands.log").open("a") as log:
            process = forked.Popen(
                command, cwd=CHECKOUT, env=self.prefect.environment, stdout=log, stderr=subprocess.STDOUT, text=True
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()

    def segments(self) -> list[AttemptRecord]:
        return [record for record in attempts_of(self.home) if record.within is not None]

    def wait_for_segment(self) -> AttemptRecord:
        """Wait until a segment trains that has started since the last call; returns its attempt."""

        def new() -> list[AttemptRecord]:
            segments = self.segments() if self.home.exists() else []
            return [each for each in segments[self.started :] if each.doing == "train" and each.step > each.from_step]

        wait_until(lambda: bool(new()))
        found = new()[-1]
        self.started = len(self.segments())
        return found

    def flow_run_of_segment(self) -> str:
        found = post(
            self.prefect.url,
            "flow_runs/filter",
            {"flow_runs": {"tags": {"all_": ["stage:train-segment"]}}, "sort": "EXPECTED_START_TIME_DESC", "limit": 1},
        )
        return str(found[0]["id"])


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop the process during the block, so that it cannot train meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def deploy(prefect: Prefect) -> str:
    prefect.deploy("flows/with_prefect/stage_flows.py:train_segment", "tests")
    return prefect.deploy("flows/with_prefect/run_flows.py:train_run", "parent")


def kill_segment_and_parent(runs: Runs, parent: str) -> tuple[str, AttemptRecord]:
    """Kill a segment and its parent; returns the flow run that took over and its segment."""
    prefect, home = runs.prefect, runs.home
    # After a segment is killed, the waiting command starts another.
    with runs.command() as command:
        os.kill(runs.wait_for_segment().pid, signal.SIGKILL)
        second = runs.wait_for_segment()
        assert command.poll() is None
        # After a parent is killed, its segment continues until the next parent cancels it, and then commits.
        command.kill()
        command.wait()
    orphan = runs.flow_run_of_segment()
    assert prefect.state(orphan) == "RUNNING"
    before = commits_of(home)
    with stopped(second.pid):
        flow_run = prefect.start(parent, run_file=str(runs.file), overrides=runs.overrides)
        wait_until(lambda: prefect.state(orphan) == "CANCELLING")
    third = runs.wait_for_segment()
    assert prefect.state(orphan) == "CANCELLED"
    assert [reason for _, reason in commits_of(home)[len(before) :]] == ["sigterm"]
    assert third.from_step == commits_of(home)[-1][0] > second.from_step
    return flow_run, third


def cancel_parent_and_segment(runs: Runs, flow_run: str, third: AttemptRecord) -> None:
    """Cancel a parent, and later a segment whose parent waits; each time the segment commits."""
    prefect, home = runs.prefect, runs.home
    # A parent that is cancelled through the API cancels its segment, which commits.
    child = runs.flow_run_of_segment()
    before = commits_of(home)
    with stopped(third.pid):
        prefect.cancel(flow_run)
        wait_until(lambda: prefect.state(child) == "CANCELLING")
    wait_until(lambda: prefect.state(flow_run) in ENDED and prefect.state(child) in ENDED)
    assert (prefect.state(flow_run), prefect.state(child)) == ("CANCELLED", "CANCELLED")
    assert [reason for _, reason in commits_of(home)[len(before) :]] == ["sigterm"]
    # If a user cancels the segment, the command stops with work left.
    with runs.command() as command:
        segment = runs.wait_for_segment()
        with stopped(segment.pid):
            prefect.cancel(runs.flow_run_of_segment())
        assert command.wait(timeout=240) == 3


def finish_segment_without_parent(runs: Runs) -> None:
    """Let a segment end after its parent was killed; assert that the next commands commit its checkpoint."""
    prefect = runs.prefect
    # Two commands start at once. One commits the checkpoint of the segment, one finishes the run.
    with runs.command() as command:
        runs.wait_for_segment()
        command.kill()
        command.wait()
    orphan = runs.flow_run_of_segment()
    wait_until(lambda: prefect.state(orphan) == "COMPLETED")
    left = runs.segments()[-1].staged
    with runs.command() as one, runs.command() as another:
        codes = [one.wait(timeout=600), another.wait(timeout=600)]
    assert 0 in codes
    assert set(codes) <= {0, 1, 3}
    assert left in {entry.body.checkpoint.path for entry in entries_of(runs.home) if isinstance(entry.body, Commit)}


@pytest.mark.timeout(1500)
def test_run_continues_when_segment_or_parent_ends(
    train_without_prefect: Callable[..., Any], stored_bytes: Callable[[str], Any], server: str, tmp_path: Path
) -> None:
    prefect = Prefect(server, tmp_path)
    parent = deploy(prefect)
    runs = Runs(prefect, tmp_path)
    one_segment = [*STEPS, "train.segment_steps=1200"]
    straight = train_without_prefect(
        "digits", tmp_path / "straight", extra=one_segment, file=runs.file, environment=NO_PAUSES
    ).result
    home = runs.home

    with prefect.worker():
        flow_run, segment = kill_segment_and_parent(runs, parent)
        cancel_parent_and_segment(runs, flow_run, segment)
        finish_segment_without_parent(runs)
        if tip_of(home).step < 1200:
            with runs.command() as command:
                assert command.wait(timeout=600) == 0

    entries = entries_of(home)
    assert [entry.number for entry in entries] == list(range(len(entries)))
    tip = tip_of(home)
    assert tip.state_digest == straight["state_digest"]
    assert stored_bytes(f"{home}/{tip.path}") == stored_bytes(straight["checkpoint"])
    # Only parents wait for stages.
    assert {record.within is None for record in attempts_of(home) if LAUNCH in record.seconds} == {True}
