"""Statistics of each host, summed along the lineage, and which hosts they show to be slow."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from baton.tasks.foundation.contracts.log_entry import Commit, HostSteps, WorkerStats
from baton.tasks.foundation.log.history import History
from baton.tasks.foundation.log.host_history import slow_hosts, summed_stats
from tests.support.host_intervals import Cost, stats_of


@dataclass
class Logged:
    """The part of an entry that `summed_stats` reads."""

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
    first, second = summed_stats(history([(2.0, 0.1), (2.0, 0.2)], [(3.0, 0.1), (3.0, 0.2)]))
    assert (first.host, first.steps, first.examples, first.train_seconds) == (0, 20, 80, 5.0)
    assert first.step_seconds == 0.25
    assert first.input_wait_share == pytest.approx(0.04)
    assert second.losses == (1.0,)


def test_only_commits_since_hosts_changed_count() -> None:
    workers = summed_stats(history([(9.0, 0.0)] * 2, [(1.0, 0.0)], [(7.0, 0.0)] * 2, [(7.0, 0.0)] * 2))
    assert [worker.train_seconds for worker in workers] == [14.0, 14.0]


def test_log_without_worker_stats_has_no_workers() -> None:
    assert summed_stats(history([], [])) == ()
    assert summed_stats(history([(1.0, 0.0)], [])) != ()


def names(hosts: Sequence[Sequence[Cost]]) -> list[int]:
    """The hosts that are named."""
    return [each.host for each in slow_hosts(stats_of(hosts))]


# Of hosts that are alike: an interval of one differs from that of another by up to a fifth.
ALIKE = some.tuples(some.floats(0.5, 1.5), some.floats(10.0, 12.0))
OF_EQUAL_HOSTS = some.integers(2, 4).flatmap(
    lambda hosts: some.integers(6, 8).flatmap(
        lambda intervals: some.lists(some.lists(ALIKE, min_size=intervals, max_size=intervals),
                                     min_size=hosts, max_size=hosts)
    )
)  # fmt: skip


@given(hosts=OF_EQUAL_HOSTS, factor=some.floats(2.0, 20.0), of=some.integers(0, 5))
def test_a_steady_factor_names_exactly_that_host(hosts: list[list[Cost]], factor: float, of: int) -> None:
    assert names(hosts) == []
    of %= len(hosts)
    slower = [(wait, (used or 0) * factor) for wait, used in hosts[of]]
    (found,) = slow_hosts(stats_of([*hosts[:of], slower, *hosts[of + 1 :]]))
    assert (found.host, found.cause, found.since_step) == (of, "processor time", 0)
    assert factor / 1.25 <= found.factor <= factor * 1.25
    waiting = [(9.0, used) for _, used in hosts[of]]
    (found,) = slow_hosts(stats_of([*hosts[:of], waiting, *hosts[of + 1 :]]))
    assert (found.host, found.cause) == (of, "input wait")
    assert 3.9 <= found.factor <= 7


@given(hosts=OF_EQUAL_HOSTS, place=some.integers(0, 11), of=some.integers(0, 5), wait=some.floats(0, 10))
def test_one_interval_that_stands_out_names_nobody(hosts: list[list[Cost]], place: int, of: int, wait: float) -> None:
    costs = hosts[of % len(hosts)]
    costs[place % len(costs)] = (wait, 1000.0)
    assert names(hosts) == []


@given(
    hosts=some.lists(
        some.lists(some.tuples(some.floats(0, 10), some.none() | some.floats(0, 40)), min_size=7, max_size=7),
        min_size=2, max_size=5,
    ),
    order=some.randoms(use_true_random=False),
)  # fmt: skip
def test_numbers_of_hosts_decide_nothing(hosts: list[list[Cost]], order: Any) -> None:
    places = list(range(len(hosts)))
    order.shuffle(places)
    assert sorted(places[each] for each in names([hosts[place] for place in places])) == names(hosts)


def test_the_step_since_which_a_host_is_slow_is_named() -> None:
    usual, slow = [(0.0, 10.0)], [(0.0, 19.0)]
    found = slow_hosts(stats_of([usual * 9, usual * 3 + slow * 4 + usual + slow, usual * 9]))
    assert [each.words for each in found] == [
        "host 1 needs 1.9 times the median of the others (processor time), since step 300"
    ]
    assert names([usual * 9, usual + slow * 6 + usual * 2, usual * 9]) == [], "it is not slow now"


def test_hosts_that_only_wait_are_not_named() -> None:
    assert names([[(0.1, 0.2)] * 9, [(0.1, 0.5)] * 9]) == [], "2.5 times, but next to nothing of a step"
    assert names([[(0.0, None)] * 9, [(0.0, 30.0)] * 9]) == [], "nothing to compare with"
    assert names([[(9.0, 30.0)] * 9]) == [], "one host alone"


# Of real runs on one machine: of each host [step, steps, seconds of a step, input wait, processor time] by interval.
RECORDED = json.loads(Path(__file__).with_name("equal_hosts.json").read_bytes())


@pytest.mark.parametrize("recorded", RECORDED)
def test_no_host_of_recorded_equal_hosts_is_named(recorded: list[list[list[float]]]) -> None:
    """In whatever order hosts and intervals come."""
    for seed in range(100):
        chance = random.Random(seed)
        hosts = chance.sample(recorded, len(recorded))
        order = chance.choices(range(len(recorded[0])), k=12)
        stats = [
            each.model_copy(update={"intervals": tuple(_recorded(steps[place]) for place in order)})
            for each, steps in zip(stats_of([[]] * len(hosts)), hosts, strict=True)
        ]
        assert slow_hosts(stats) == ()


def _recorded(values: list[float]) -> HostSteps:
    step, steps, seconds, wait, used = values
    return HostSteps(
        step=int(step), steps=int(steps), step_seconds=seconds, input_wait_seconds=wait, processor_seconds=used
    )
