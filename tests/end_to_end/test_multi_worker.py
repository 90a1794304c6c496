"""Several hosts, as local processes, train one run with one log and the same bits however it is cut."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.contracts.log_entry import Commit
from tests.support.homes import commit_count, entries_of, head_of, read_history
from tests.support.shipped_runs import slow_digits
from tests.support.watching import attempts_of
from tests.support.worker_processes import THREADS, Workers

pytestmark = pytest.mark.slow

Read = Callable[[str], Any]


def straight(storage: Path, hosts: int, notes: Path, *extra: str) -> Any:
    workers = Workers(hosts, storage, extra=["train.segment_steps=1000", *extra], notes=notes)
    chief, *others = workers.finish()
    for other in others:
        assert other.result["state_digest"] == chief.result["state_digest"]
        assert other.result["report"] is None
    return chief.result


def test_two_workers_continue_after_kills_and_stops(
    train_without_prefect: Callable[..., Any], stored_bytes: Read, tmp_path: Path
) -> None:
    expected = straight(tmp_path / "straight", 2, tmp_path)
    assert_hosts_share_every_batch(Path(expected["home"]), 2)
    rows = read_history(expected["home"])
    short = ["train.segment_steps=2"]

    # The worker is killed during training: the chief exits with work left and reports the reason.
    workers = Workers(2, tmp_path / "cut", extra=short, notes=tmp_path)
    chief, other = workers.children
    assert chief.until_commits(3)
    assert other.kill()
    left = chief.finish(3)
    assert "another of the 2 workers is gone (UnavailableError)" in left.stderr
    assert "run the same command again on all of them" in left.stderr
    # The chief is killed: the worker does the same.
    workers = Workers(2, tmp_path / "cut", extra=short, notes=tmp_path)
    chief, other = workers.children
    done = head_of(workers.home)
    assert done is not None
    assert chief.until_commits(done.commits + 2)
    assert chief.kill()
    assert "another of the 2 workers is gone" in other.finish(3).stderr
    # All start again and reach the result of the straight run.
    resumed = Workers(2, tmp_path / "cut", extra=short, notes=tmp_path).finish()[0].result
    assert resumed["state_digest"] == expected["state_digest"]
    assert stored_bytes(resumed["checkpoint"]) == stored_bytes(expected["checkpoint"])
    assert read_history(resumed["home"]) == rows

    # The worker gets SIGTERM: both stop at the same step, with a commit.
    longer = ["train.steps=100000", "train.segment_steps=50000", "evaluate.every_steps=50000"]
    workers = Workers(2, tmp_path / "cut", extra=longer, notes=tmp_path)
    chief, other = workers.children
    assert chief.until_printed("/100000  epoch")
    other.process.send_signal(signal.SIGTERM)
    stopped = chief.finish(3).result
    assert other.finish(None).code in {3, -signal.SIGTERM}
    assert stopped["exit_reason"] == "sigterm"
    assert stopped["step"] > 60
    # A single process continues with the same state.
    until = str(stopped["step"] + 3)
    alone = train_without_prefect("digits", tmp_path / "cut", "--until-step", until, extra=[*longer, *THREADS])
    assert alone.result["step"] == stopped["step"] + 3
    assert "replicas: 2 -> 1" in alone.stderr


_SLOW_EVALUATION = """
import tensorflow as tf


def slowly(example, *, seed):
    x, y = example
    ones = tf.linalg.diag(tf.ones(300) + 0 * x[0, 0, 0])
    _, ones = tf.while_loop(lambda i, m: i < 12, lambda i, m: (i + 1, m @ m), [0, ones])
    return x * ones[0, 0], y
"""


def test_sigterm_in_an_evaluation_stops_all_hosts(tmp_path: Path) -> None:
    """The others learn of it at the next agreement; a chief that left at once would look lost to them."""
    file = slow_digits(tmp_path / "run")
    (tmp_path / "run" / "slow.py").write_text(_SLOW_EVALUATION, encoding="utf-8")
    extra = ["train.steps=100000", "train.segment_steps=5", "evaluate.every_steps=5", "stop.grace_seconds=300"]
    extra.append("data.validation_transform=slow.py:slowly")
    workers = Workers(2, tmp_path / "runs", extra=extra, notes=tmp_path, file=file)
    chief, _ = workers.children
    assert chief.until(lambda: commit_count(workers.home) > 1 and attempts_of(workers.home)[-1].doing == "evaluate")
    chief.process.send_signal(signal.SIGTERM)
    stopped, other = workers.finish(3)
    assert stopped.stderr.endswith("stopped: sigterm\n")
    assert "error: " not in other.stderr
    assert other.result["exit_reason"] == "sigterm"


@pytest.mark.nightly
def test_three_workers_share_every_batch(tmp_path: Path) -> None:
    result = straight(tmp_path / "three", 3, tmp_path, "train.global_batch_size=96")
    assert_hosts_share_every_batch(Path(result["home"]), 3)


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
