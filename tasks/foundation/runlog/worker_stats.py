"""Statistics of each host along the lineage of the tip, to find a host that slows down the others."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.foundation.contracts.log_entry import WorkerStats
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
    return workers_from(summed_stats(history))


def workers_from(stats: Sequence[WorkerStats]) -> tuple[Worker, ...]:
    """Return the hosts of summed statistics, in order, each compared with the others."""
    if not stats:
        return ()
    workers = [_worker(each) for each in stats]
    median = statistics.median(worker.input_wait_share for worker in workers)
    return tuple(_with_verdict(worker, median) for worker in workers)


def summed_stats(history: History) -> tuple[WorkerStats, ...]:
    """Return the sums of each host over all commits since the number of hosts last changed."""
    total: tuple[WorkerStats, ...] = ()
    for entry in history.commits:
        total = added_stats(total, commit_of(entry).workers)
    return total


def added_stats(total: tuple[WorkerStats, ...], stats: tuple[WorkerStats, ...]) -> tuple[WorkerStats, ...]:
    """Return sums with the statistics of one more commit; those alone if the hosts are others."""
    if not stats:
        return total
    if _hosts(total) != _hosts(stats):
        return stats
    return tuple(_sum(before, newest) for before, newest in zip(total, stats, strict=True))


def _hosts(stats: tuple[WorkerStats, ...]) -> list[tuple[int, int]]:
    return [(each.host, each.replicas) for each in stats]


def _sum(before: WorkerStats, newest: WorkerStats) -> WorkerStats:
    return newest.model_copy(
        update={
            "steps": before.steps + newest.steps,
            "examples": before.examples + newest.examples,
            "train_seconds": before.train_seconds + newest.train_seconds,
            "input_wait_seconds": before.input_wait_seconds + newest.input_wait_seconds,
        }
    )


def _worker(stats: WorkerStats) -> Worker:
    return Worker(
        host=stats.host,
        replicas=stats.replicas,
        steps=stats.steps,
        examples=stats.examples,
        train_seconds=stats.train_seconds,
        input_wait_seconds=stats.input_wait_seconds,
        losses=stats.losses,
    )


def _with_verdict(worker: Worker, median: float) -> Worker:
    return replace(worker, straggles=worker.input_wait_share - median >= _STRAGGLER_EXCESS)
