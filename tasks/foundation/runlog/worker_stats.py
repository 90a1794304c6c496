"""Statistics of each host along the lineage of the tip, to find a host that slows down the others."""

import statistics
from dataclasses import dataclass, replace
from itertools import takewhile

from tasks.foundation.contracts.segment import WorkerStats
from tasks.foundation.runlog.history import History, commit_of

# A host straggles if the share of its time spent waiting for input exceeds the median host's by this much.
_STRAGGLER_EXCESS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One host, over all commits since the number of hosts last changed.

    Attributes:
        host: number of the host, from 0.
        replicas: number of replicas that it feeds.
        steps: steps that it took.
        examples: examples that its replicas processed.
        train_seconds: seconds in the training loop, including the wait for input.
        input_wait_seconds: the part of it spent waiting for the next batch.
        losses: loss of each of its replicas in the newest commit; empty if the step returns none.
        straggles: whether it waits for input so much longer than the others that it slows them down.
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
        """Seconds of one step, including the wait for input; 0 without steps."""
        return self.train_seconds / self.steps if self.steps else 0.0

    @property
    def input_wait_share(self) -> float:
        """Share of the training loop spent waiting for input, in [0, 1]."""
        return self.input_wait_seconds / self.train_seconds if self.train_seconds > 0 else 0.0


def workers_of(history: History) -> tuple[Worker, ...]:
    """Return the hosts of the newest commit with statistics, in order; empty if no commit has any."""
    recorded = [stats for entry in history.commits if (stats := commit_of(entry).workers)]
    if not recorded:
        return ()
    same = list(takewhile(lambda stats: _hosts(stats) == _hosts(recorded[-1]), reversed(recorded)))[::-1]
    workers = [_total(list(of_host)) for of_host in zip(*same, strict=True)]
    median = statistics.median(worker.input_wait_share for worker in workers)
    return tuple(_with_verdict(worker, median) for worker in workers)


def _hosts(stats: tuple[WorkerStats, ...]) -> list[tuple[int, int]]:
    return [(each.host, each.replicas) for each in stats]


def _total(stats: list[WorkerStats]) -> Worker:
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


def _with_verdict(worker: Worker, median: float) -> Worker:
    return replace(worker, straggles=worker.input_wait_share - median >= _STRAGGLER_EXCESS)
