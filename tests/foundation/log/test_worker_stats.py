"""Statistics of each host, summed along the lineage."""

from dataclasses import dataclass
from typing import Any

import pytest

from tasks.foundation.contracts.log_entry import Commit, WorkerStats
from tasks.foundation.log.fold import workers_of
from tasks.foundation.log.history import History


@dataclass
class Logged:
    """The part of an entry that `workers_of` reads."""

    body: Commit


def history(*commits: list[tuple[float, float]]) -> History:
    """Commits of 10 steps, with (training seconds, seconds of them waiting for input) per host."""
    return History(commits=tuple(Logged(_commit(hosts)) for hosts in commits))  # type: ignore[arg-type]


def _commit(hosts: list[tuple[float, float]]) -> Any:
    stats = tuple(
        WorkerStats(
            host=host,
            replicas=1,
            steps=10,
            examples=40,
            train_seconds=train,
            input_wait_seconds=wait,
            losses=(float(host),),
        )
        for host, (train, wait) in enumerate(hosts)
    )
    return Commit.model_construct(workers=stats)


def test_commits_are_summed() -> None:
    first, second = workers_of(history([(2.0, 0.1), (2.0, 0.2)], [(3.0, 0.1), (3.0, 0.2)]))
    assert (first.host, first.steps, first.examples, first.train_seconds) == (0, 20, 80, 5.0)
    assert first.step_seconds == 0.25
    assert first.input_wait_share == pytest.approx(0.04)
    assert second.losses == (1.0,)
    assert not first.straggles
    assert not second.straggles


def test_only_commits_since_hosts_changed_count() -> None:
    workers = workers_of(history([(9.0, 0.0)] * 2, [(1.0, 0.0)], [(7.0, 0.0)] * 2, [(7.0, 0.0)] * 2))
    assert [worker.train_seconds for worker in workers] == [14.0, 14.0]


def test_straggler_is_marked() -> None:
    workers = workers_of(history([(10.0, 0.2), (10.0, 4.0), (10.0, 0.1)]))
    assert [worker.straggles for worker in workers] == [False, True, False]


def test_log_without_worker_stats_has_no_workers() -> None:
    assert workers_of(history([], [])) == ()
    assert workers_of(history([(1.0, 0.0)], [])) != ()
