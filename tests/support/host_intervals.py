"""Statistics of hosts as an entry of the log has them, with given intervals."""

from collections.abc import Sequence

from baton.tasks.foundation.contracts.log_entry import HostSteps, WorkerStats

# Input wait, and processor time of an interval, in ms per step; a step takes 10 ms.
Cost = tuple[float, float | None]


def stats_of(hosts: Sequence[Sequence[Cost]], *, after_step: int = 0) -> tuple[WorkerStats, ...]:
    """Statistics with an interval of 100 steps for each cost of a host."""
    return tuple(
        WorkerStats(
            host=host,
            replicas=1,
            steps=100 * len(costs),
            examples=100,
            train_seconds=len(costs),
            input_wait_seconds=0.0,
            intervals=tuple(
                HostSteps(
                    step=after_step + 100 * (place + 1),
                    steps=100,
                    step_seconds=0.01,
                    input_wait_seconds=wait / 1000,
                    processor_seconds=None if used is None else used / 1000,
                )
                for place, (wait, used) in enumerate(costs)
            ),
        )
        for host, costs in enumerate(hosts)
    )
