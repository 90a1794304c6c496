"""A real Prefect server and process worker: runs, and single segments, continue after a cancel, a kill or SIGTERM."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.attempt import LAUNCH, AttemptRecord
from baton.tasks.foundation.contracts.log_entry import Commit
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.homes import entries_of, read_history, tip_of
from tests.support.prefect_deployments import ENDED, Prefect
from tests.support.prefect_server import post
from tests.support.shipped_runs import NO_PAUSES, SLOW, slow_digits
from tests.support.watching import attempts_of, commits_of, trains, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# Long enough to interrupt every flow run but the last during training.
STEPS = [*SLOW, "train.steps=1800"]


@pytest.fixture(scope="module")
def prefect(server: str, tmp_path_factory: pytest.TempPathFactory) -> Prefect:
    return Prefect(server, tmp_path_factory.mktemp("prefect"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_digits(tmp_path_factory.mktemp("code") / "slow")


@pytest.fixture(scope="module")
def straight(
    train_without_prefect: Callable[..., Any], file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The result of the run in one segment."""
    one_segment = [*STEPS, "train.segment_steps=1800"]
    folder = tmp_path_factory.mktemp("straight")
    done = train_without_prefect("digits", folder, extra=one_segment, file=file, environment=NO_PAUSES)
    return dict(done.result)


def assert_same(home: Path, straight: dict[str, Any], stored_bytes: Callable[[str], Any]) -> None:
    """Assert that a run has ended with what the straight one has, and that its log has no gaps."""
    numbers = [entry.number for entry in entries_of(home)]
    assert numbers == list(range(len(numbers)))
    tip = tip_of(home)
    assert tip.state_digest == straight["state_digest"]
    assert stored_bytes(f"{home}/{tip.path}") == stored_bytes(straight["checkpoint"])
    assert read_history(str(home)) == read_history(straight["home"])


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


def test_next_flow_run_continues_after_any_end(
    prefect: Prefect, file: Path, straight: dict[str, Any], stored_bytes: Callable[[str], Any], tmp_path: Path
) -> None:
    deployment = prefect.deploy("flows/with_prefect/run_flows.py:train_run", "tests")
    home = tmp_path / "digits-cnn"
    overrides = [f"storage={tmp_path}", "accelerator.kind=cpu", *STEPS, "train.segment_steps=800"]

    def trained_by(number: int) -> int:
        """Wait until an attempt trains; returns its process id."""
        wait_until(lambda: len(attempts_of(home)) == number and trains(home, number - 1))
        return attempts_of(home)[-1].pid

    def started(number: int) -> tuple[str, int]:
        """Start a flow run and wait until it trains; returns its id and process id."""
        flow_run = prefect.start(deployment, run_file=str(file), overrides=overrides)
        return flow_run, trained_by(number)

    def wait_for_end(flow_run: str) -> str:
        wait_until(lambda: prefect.state(flow_run) in ENDED)
        return prefect.state(flow_run)

    # As in a container on a spot machine: SIGTERM reschedules the flow run, and a worker picks it up.
    killed = prefect.start(deployment, run_file=str(file), overrides=overrides)
    with prefect.executing(killed) as execution:
        pid = trained_by(1)
        execution.terminate()
        assert execution.wait(timeout=120) == 0
        wait_until(lambda: is_over(pid))
    assert prefect.state(killed) == "SCHEDULED"
    assert_nothing_is_lost(home)

    with prefect.worker() as worker:
        os.kill(trained_by(2), signal.SIGKILL)
        assert wait_for_end(killed) == "CRASHED"
        assert "was killed from outside" in prefect.run(killed)["state"]["message"]
        before = commits_of(home)

        orphaned, pid = started(3)
        assert commits_of(home)[: len(before)] == before
        worker.terminate()
        worker.wait(timeout=120)
        wait_until(lambda: is_over(pid))
        assert prefect.state(orphaned) != "COMPLETED"

    with prefect.worker() as worker:
        cancelled, pid = started(4)
        worker.kill()  # it would tell the process of the cancellation
        worker.wait(timeout=120)
        prefect.cancel(cancelled)
        assert wait_for_end(cancelled) == "CANCELLED"
        assert is_over(pid)
    assert attempts_of(home)[-1].ended == "Terminated"
    assert_nothing_is_lost(home)
    assert tip_of(home).step < 1800

    with prefect.worker(**NO_PAUSES) as worker:
        refused = prefect.start(deployment, run_file=str(file), overrides=["train.stepz=1"])
        last = prefect.start(deployment, run_file=str(file), overrides=overrides)
        assert (wait_for_end(refused), wait_for_end(last)) == ("FAILED", "COMPLETED")
        # The deployment has none.
        assert {"baton", "run:digits-cnn"} <= set(prefect.run(last)["tags"])
    assert_same(home, straight, stored_bytes)
    printed = (prefect.folder / "worker.log").read_text()
    (line,) = [line for line in printed.splitlines() if "train.stepz (here 1) is not a known key" in line]
    assert "\\n" not in line
    assert "Traceback" not in printed


class Runs:
    """A training run whose segments a worker trains, and the commands that continue it."""

    def __init__(self, prefect: Prefect, file: Path, storage: Path) -> None:
        self.prefect = prefect
        self.file = file
        self.home = storage / "digits-cnn"
        self.overrides = [
            f"storage={storage}", "accelerator.kind=cpu", *STEPS, "train.segment_steps=900",
            "stages.train_segment=train-segment/tests",
        ]  # fmt: skip
        self.started = 0

    @contextmanager
    def command(self, *more: str) -> Iterator[subprocess.Popen[str]]:
        """Run `baton run` during the block, with more overrides."""
        words = [word for override in (*self.overrides, *more) for word in ("--set", override)]
        command = [sys.executable, "-m", "baton.flows.commands.main", "run", str(self.file), *words]
        with (self.prefect.folder / "commands.log").open("a") as log:
            process = forked.Popen(
                command, cwd=CHECKOUT, env=self.prefect.environment, stdout=log, stderr=subprocess.STDOUT, text=True
            )
            with forked.killed_at_end(process):
                yield process

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


def kill_parent(runs: Runs, parent: str, *, segment_first: bool) -> tuple[str, AttemptRecord]:
    """Kill a parent: its segment continues until the next parent cancels it, and then commits.

    Args:
        runs: the run.
        parent: the deployment that takes over.
        segment_first: kill a segment before that: the waiting parent starts another one.

    Returns:
        The flow run that took over, and its segment.
    """
    prefect, home = runs.prefect, runs.home
    with runs.command() as command:
        if segment_first:
            os.kill(runs.wait_for_segment().pid, signal.SIGKILL)
        first = runs.wait_for_segment()
        assert command.poll() is None
        command.kill()
        command.wait()
    orphan = runs.flow_run_of_segment()
    assert prefect.state(orphan) == "RUNNING"
    before = commits_of(home)
    with stopped(first.pid):
        flow_run = prefect.start(parent, run_file=str(runs.file), overrides=runs.overrides)
        wait_until(lambda: prefect.state(orphan) == "CANCELLING")
    second = runs.wait_for_segment()
    assert prefect.state(orphan) == "CANCELLED"
    assert [reason for _, reason in commits_of(home)[len(before) :]] == ["sigterm"]
    assert second.from_step == commits_of(home)[-1][0] > first.from_step
    return flow_run, second


def cancel_parent(runs: Runs, flow_run: str, segment: AttemptRecord) -> None:
    """Cancel a parent through the API: it cancels its segment, which commits."""
    prefect, home = runs.prefect, runs.home
    child = runs.flow_run_of_segment()
    before = commits_of(home)
    with stopped(segment.pid):
        prefect.cancel(flow_run)
        wait_until(lambda: prefect.state(child) == "CANCELLING")
    wait_until(lambda: prefect.state(flow_run) in ENDED and prefect.state(child) in ENDED)
    assert (prefect.state(flow_run), prefect.state(child)) == ("CANCELLED", "CANCELLED")
    assert [reason for _, reason in commits_of(home)[len(before) :]] == ["sigterm"]


def cancel_segment(runs: Runs) -> None:
    """If a user cancels the segment, the command stops with work left."""
    with runs.command() as command:
        segment = runs.wait_for_segment()
        with stopped(segment.pid):
            runs.prefect.cancel(runs.flow_run_of_segment())
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


@pytest.mark.parametrize("at_length", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_run_continues_when_segment_or_parent_ends(
    prefect: Prefect,
    file: Path,
    straight: dict[str, Any],
    stored_bytes: Callable[[str], Any],
    tmp_path: Path,
    *,
    at_length: bool,
) -> None:
    prefect.deploy("flows/with_prefect/stage_flows.py:train_segment", "tests")
    parent = prefect.deploy("flows/with_prefect/run_flows.py:train_run", "parent")
    runs = Runs(prefect, file, tmp_path)
    with prefect.worker():
        cancel_parent(runs, *kill_parent(runs, parent, segment_first=at_length))
        if at_length:
            cancel_segment(runs)
            finish_segment_without_parent(runs)
        with runs.command("train.segment_steps=1800") as command:
            assert command.wait(timeout=600) == 0
    assert_same(runs.home, straight, stored_bytes)
    last = {"flow_runs": {"id": {"any_": [runs.flow_run_of_segment()]}}}
    wait_until(lambda: bool(post(prefect.url, "task_runs/filter", last)))
    assert [each["name"] for each in post(prefect.url, "task_runs/filter", last)] == ["train-segment to step 1800"]
    # Only parents wait for stages.
    assert {record.within is None for record in attempts_of(runs.home) if LAUNCH in record.seconds} == {True}
