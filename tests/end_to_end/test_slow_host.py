"""Of two real hosts the slow one is named, whatever makes it slow, and of equal ones none is."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.tasks.foundation.contracts.log_entry import WorkerStats
from baton.tasks.foundation.log.host_history import slow_hosts
from tests.support.homes import entries_of
from tests.support.training_child import Child
from tests.support.worker_processes import Workers

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

LONG = [
    "train.steps=10000000", "train.segment_steps=5000000", "evaluate.every_steps=null", "train.log_every_steps=1000",
    "model.options.width=32", "checkpoint.every_seconds=10",
]  # fmt: skip
MANY_INTERVALS = 8
STOPPED_SECONDS = 0.05


def committed_stats(home: Path) -> tuple[WorkerStats, ...]:
    newest = entries_of(home)[-1] if (home / "log").is_dir() else None
    return () if newest is None or newest.totals is None else newest.totals.workers


@contextmanager
def two_hosts(folder: Path, env: Mapping[str, str] = {}) -> Iterator[tuple[Child, Child]]:
    """Two hosts that train; `env` is of the second one."""
    workers = Workers(2, folder / "runs", extra=LONG, notes=folder, last={"env": dict(env)})
    try:
        chief, other = workers.children
        assert chief.until_printed("started in")
        yield chief, other
    finally:
        workers.end()


@contextmanager
def stopped_half_of_the_time(child: Child) -> Iterator[None]:
    ended = threading.Event()

    def stop_and_resume() -> None:
        while not ended.is_set() and child.alive:
            child.process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_SECONDS)
            child.process.send_signal(signal.SIGCONT)
            time.sleep(STOPPED_SECONDS)

    thread = threading.Thread(target=stop_and_resume)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def assert_other_is_named(chief: Child, cause: str) -> None:
    assert chief.until_printed("median of the others")
    assert "host 1 needs" in chief.stderr
    assert f"times the median of the others ({cause}), since step" in chief.stderr
    assert "host 0 needs" not in chief.stderr
    assert chief.until(lambda: [each.host for each in slow_hosts(committed_stats(chief.home))] == [1])


def test_host_whose_input_comes_late_is_named(tmp_path: Path) -> None:
    with two_hosts(tmp_path, {"BATON_TEST_BATCH_SECONDS": "0.2"}) as (chief, _):
        assert_other_is_named(chief, "input wait")


def test_host_that_is_stopped_half_of_the_time_is_named(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (chief, other), stopped_half_of_the_time(other):
        assert_other_is_named(chief, "processor time")


def test_of_equal_hosts_none_is_named(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (chief, _):
        assert chief.until(lambda: any(len(of.intervals) >= MANY_INTERVALS for of in committed_stats(chief.home)))
        assert "median of the others" not in chief.stderr
