"""Several hosts, as local processes, train one run together, with the same bits whatever interrupts them."""

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.log_entry import Commit
from tests.support.homes import entries_of, head_of, read_history, tip_of
from tests.support.moments import hold_at
from tests.support.worker_processes import THREADS, Workers

pytestmark = pytest.mark.slow

WHOLE, SHORT = "train.segment_steps=1000", "train.segment_steps=2"


class Run:
    """The digits, trained on several hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(
        self, name: str, *extra: str, hosts: int = 2, env: Mapping[int, Mapping[str, str]] | None = None
    ) -> Workers:
        """Start all hosts; `env` are more environment variables, by host."""
        storage = self.folder / name
        return Workers(hosts, storage, extra=extra, notes=self.folder, env=env)

    def straight(self, name: str, hosts: int, *extra: str) -> Any:
        """The chief's result of a run that nothing interrupts."""
        chief, *others = self.start(name, WHOLE, *extra, hosts=hosts).finish()
        for other in others:
            assert other.result["state_digest"] == chief.result["state_digest"]
            assert other.result["report"] is None
        assert_hosts_share_every_batch(Path(chief.result["home"]), hosts)
        return chief.result


def test_two_hosts_continue_whatever_ends_one_of_them(
    train_without_prefect: Callable[..., Any], stored_bytes: Callable[[str], Any], tmp_path: Path
) -> None:
    run = Run(tmp_path)
    expected = run.straight("straight", 2)

    kill_worker(run)
    kill_chief(run)
    terminate_chief_in_an_evaluation(run)
    resumed = run.start("cut", SHORT).finish()[0].result
    assert resumed["state_digest"] == expected["state_digest"]
    assert stored_bytes(resumed["checkpoint"]) == stored_bytes(expected["checkpoint"])
    assert read_history(resumed["home"]) == read_history(expected["home"])

    alone = train_without_prefect("digits", tmp_path / "cut", extra=["train.steps=63", *THREADS])
    assert alone.result["step"] == 63
    assert "replicas: 2 -> 1" in alone.stderr


def kill_worker(run: Run) -> None:
    """The chief exits with work left and reports the reason."""
    chief, other = run.start("cut", SHORT).children
    assert chief.until_commits(3)
    assert other.kill()
    left = chief.finish(3)
    assert "another of the 2 workers is gone (UnavailableError)" in left.stderr
    assert "run the same command again on all of them" in left.stderr


def kill_chief(run: Run) -> None:
    """The worker exits as well."""
    workers = run.start("cut", SHORT)
    chief, other = workers.children
    done = head_of(workers.home)
    assert done is not None
    assert chief.until_commits(done.commits + 2)
    assert chief.kill()
    assert "another of the 2 workers is gone" in other.finish(3).stderr


def terminate_chief_in_an_evaluation(run: Run) -> None:
    """The others learn of it at the next agreement; a chief that left at once would look lost to them."""
    held = run.folder / "held-evaluation"
    workers = run.start("cut", WHOLE, env={0: hold_at("evaluation", "before", 1, held)})
    chief, _ = workers.children
    assert chief.until(held.exists)
    chief.process.send_signal(signal.SIGTERM)
    held.unlink()
    stopped, other = workers.finish(3)
    assert stopped.stderr.endswith("stopped: sigterm\n")
    assert "error: " not in other.stderr
    assert other.result["exit_reason"] == "sigterm"
    assert tip_of(workers.home).step == 25


@pytest.mark.nightly
def test_three_hosts_share_every_batch(tmp_path: Path) -> None:
    Run(tmp_path).straight("three", 3, "train.global_batch_size=96")


def assert_hosts_share_every_batch(home: Path, hosts: int) -> None:
    """Each host trains on 32 examples of each step of a straight run, and all of them count."""
    assert len(list((home / "attempts").iterdir())) == 1
    commits = [entry.body for entry in entries_of(home) if isinstance(entry.body, Commit)]
    assert [commit.checkpoint.step for commit in commits] == [0, 25, 50, 60]
    for commit in commits[1:]:
        assert [worker.host for worker in commit.workers] == list(range(hosts))
        for worker in commit.workers:
            assert worker.examples == worker.steps * 32
            assert 0 <= worker.input_wait_seconds <= worker.train_seconds
            assert len(worker.losses) == 1
        assert sum(worker.examples for worker in commit.workers) == commit.examples
    assert len({worker.losses for worker in commits[1].workers}) == hosts
    rows, evaluations = read_history(str(home))
    assert [step for step, _ in rows] == list(range(7, 61, 7))
    assert [step for step, _ in evaluations] == [25, 50, 60]
    (file,) = home.glob("confusion/*.json")
    counts = json.loads(file.read_bytes())["counts"]
    last = dict(evaluations)[60]
    right, total = sum(counts[each][each] for each in range(10)), sum(map(sum, counts))
    assert right / total == pytest.approx(last["accuracy"])
