"""Segments on a process worker, with a real Prefect server: whoever is killed, cancelled or left, the run goes on."""

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
from tests.support.homes import entries_of, tip_of
from tests.support.prefect_deployments import ENDED, Prefect
from tests.support.prefect_server import ask
from tests.support.shipped_runs import CHECKOUT, SHORT, run_file
from tests.support.watching import attempts_of, commits_of, wait_until

pytestmark = pytest.mark.slow

# Long enough that every segment but the last ones is met while it trains.
LONG = ["train.steps=6000", "evaluate.every_steps=null", "train.log_every_steps=500"]


class Runs:
    """One training run whose segments a worker trains, and all who try to bring it further."""

    def __init__(self, prefect: Prefect, folder: Path) -> None:
        self.prefect = prefect
        self.home = folder / "worked" / "digits-cnn"
        self.overrides = [
            f"storage={folder / 'worked'}", "accelerator.kind=cpu", *SHORT["digits"], *LONG, "train.segment_steps=3000",
            "stages.train_segment=train-segment/tests",
        ]  # fmt: skip
        self.started = 0

    @contextmanager
    def command(self) -> Iterator[subprocess.Popen[str]]:
        words = [word for override in self.overrides for word in ("--set", override)]
        command = [sys.executable, "-m", "flows.train_run", str(run_file("digits")), *words]
        with (self.prefect.folder / "commands.log").open("a") as log:
            process = subprocess.Popen(
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

    def wait_for_a_new_segment(self) -> AttemptRecord:
        """One more segment trains than at the call before."""

        def new() -> list[AttemptRecord]:
            segments = self.segments() if self.home.exists() else []
            return [each for each in segments[self.started :] if each.doing == "train" and each.step > each.from_step]

        wait_until(lambda: bool(new()))
        found = new()[-1]
        self.started = len(self.segments())
        return found

    def flow_run_of_segment(self) -> str:
        found = ask(
            self.prefect.url,
            "flow_runs/filter",
            {"flow_runs": {"tags": {"all_": ["stage:train-segment"]}}, "sort": "EXPECTED_START_TIME_DESC", "limit": 1},
        )
        return str(found[0]["id"])


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Within, the process stands still: what is done meanwhile comes before its next step."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def deploy(prefect: Prefect) -> str:
    prefect.deploy("flows/launching/stage_flows.py:train_segment", "tests")
    return prefect.deploy("flows/train_run.py:train_run", "parent")


def killed(runs: Runs, parent: str) -> tuple[str, AttemptRecord]:
    """The flow run that has taken over in the end, and its segment."""
    prefect, home = runs.prefect, runs.home
    # A segment is killed: who waits for it asks for another.
    with runs.command() as command:
        os.kill(runs.wait_for_a_new_segment().pid, signal.SIGKILL)
        second = runs.wait_for_a_new_segment()
        assert command.poll() is None
        # Its parent is killed: the segment goes on, until the next one that comes tells it to commit and go.
        command.kill()
        command.wait()
    orphan = runs.flow_run_of_segment()
    assert prefect.state(orphan) == "RUNNING"
    before = commits_of(home)
    with held(second.pid):
        flow_run = prefect.start(parent, run_file=str(run_file("digits")), overrides=runs.overrides)
        wait_until(lambda: prefect.state(orphan) == "CANCELLING")
    third = runs.wait_for_a_new_segment()
    assert prefect.state(orphan) == "CANCELLED"
    assert [reason for _, reason in commits_of(home)[len(before) :]] == ["sigterm"]
    assert third.from_step == commits_of(home)[-1][0] > second.from_step
    return flow_run, third


def cancelled(runs: Runs, flow_run: str, third: AttemptRecord) -> None:
    prefect, home = runs.prefect, runs.home
    # Cancelled from the API, a parent has its segment go, which commits.
    child = runs.flow_run_of_segment()
    before = commits_of(home)
    with held(third.pid):
        prefect.cancel(flow_run)
        wait_until(lambda: prefect.state(child) == "CANCELLING")
    wait_until(lambda: prefect.state(flow_run) in ENDED and prefect.state(child) in ENDED)
    assert (prefect.state(flow_run), prefect.state(child)) == ("CANCELLED", "CANCELLED")
    assert [reason for _, reason in commits_of(home)[len(before) :]] == ["sigterm"]
    # A person cancels the segment: the command stops, resumable.
    with runs.command() as command:
        segment = runs.wait_for_a_new_segment()
        with held(segment.pid):
            prefect.cancel(runs.flow_run_of_segment())
        assert command.wait(timeout=240) == 3


def left_and_taken(runs: Runs) -> None:
    prefect = runs.prefect
    # A segment ends without its parent; then two come at once. It is taken, and one of them ends the run.
    with runs.command() as command:
        runs.wait_for_a_new_segment()
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
def test_whatever_ends_a_segment_or_who_waits_for_it_the_run_goes_on(
    plainly: Callable[..., Any], stored_bytes: Callable[[str], Any], server: str, tmp_path: Path
) -> None:
    straight = plainly("digits", tmp_path / "straight", extra=[*LONG, "train.segment_steps=6000"]).result
    prefect = Prefect(server, tmp_path)
    parent = deploy(prefect)
    runs = Runs(prefect, tmp_path)
    home = runs.home

    with prefect.worker():
        flow_run, segment = killed(runs, parent)
        cancelled(runs, flow_run, segment)
        left_and_taken(runs)
        if tip_of(home).step < 6000:
            with runs.command() as command:
                assert command.wait(timeout=600) == 0

    entries = entries_of(home)
    assert [entry.number for entry in entries] == list(range(len(entries)))
    tip = tip_of(home)
    assert tip.state_digest == straight["state_digest"]
    assert stored_bytes(f"{home}/{tip.path}") == stored_bytes(straight["checkpoint"])
    # Only parents wait.
    assert {record.within is None for record in attempts_of(home) if LAUNCH in record.seconds} == {True}
