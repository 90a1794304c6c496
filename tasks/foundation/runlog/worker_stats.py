"""What each host did for a run, added up along the lineage of its tip, so that a straggler is seen."""

import statistics
from dataclasses import dataclass, replace
from itertools import takewhile

from tasks.foundation.contracts.segment import WorkerStats
from tasks.foundation.runlog.history import History, commit_of

# So much more of its time than the middle host a host waits for its input before it is said to hold up the others.
_STRAGGLES_FROM = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One host, over the commits since the number of hosts last changed.

    Attributes:
        host: its number, from 0.
        replicas: that it feeds.
        steps: that it took.
        examples: that went through its replicas.
        train_seconds: in the training loop, waiting for input included.
        input_wait_seconds: of these, waiting for the next batch.
        losses: of each of its replicas, as of the newest commit; empty if the step tells none.
        straggles: its replicas wait for input so much longer than others' that all wait for it.
    """

    host: int
    replicas: int
    steps: int
    examples: int
    train_seconds: float
    input_wait_seconds: float
    losses: tuple[float, ...]
    straggles: bool = False

    @property
    def step_seconds(self) -> float:
        """Of one step, waiting for input included; 0 if there was none."""
        return self.train_seconds / self.steps if self.steps else 0.0

    @property
    def input_wait_share(self) -> float:
        """Of the time in the training loop, 0 to 1."""
        return self.input_wait_seconds / self.train_seconds if self.train_seconds > 0 else 0.0


def workers_of(history: History) -> tuple[Worker, ...]:
    """The hosts of the newest commit that tells of any, in their order; empty if none does."""
    told = [commit_of(entry).workers for entry in history.commits]
    told = [stats for stats in told if stats]
    if not told:
        return ()
    same = list(takewhile(lambda stats: _hosts(stats) == _hosts(told[-1]), reversed(told)))[::-1]
    workers = [_added_up(list(of_host)) for of_host in zip(*same, strict=True)]
    middle = statistics.median(worker.input_wait_share for worker in workers)
    return tuple(_judged(worker, middle) for worker in workers)


def _hosts(stats: tuple[WorkerStats, ...]) -> list[tuple[int, int]]:
    return [(each.host, each.replicas) for each in stats]


def _added_up(stats: list[WorkerStats]) -> Worker:
    newest = stats[-1]
    return Worker(
        host=newest.host,
        replicas=newest.replicas,
        steps=sum(each.steps for each in stats),
        examples=sum(each.examples for each in stats),
        train_seconds=sum(each.train_seconds for each in stats),
        input_wait_seconds=sum(each.input_wait_seconds for each in stats),
        losses=newest.losses,
    )


def _judged(worker: Worker, middle: float) -> Worker:
    return replace(worker, straggles=worker.input_wait_share - middle >= _STRAGGLES_FROM)
