"""Statistics of each host between two commits; they show a slow host."""

from dataclasses import dataclass

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.segment import WorkerStats
from tasks.foundation.telemetry.events import Sink
from tasks.foundation.telemetry.measurements import measured


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerLoop:
    """What one inner loop did on this host.

    Attributes:
        steps: number of steps.
        input_wait_seconds: seconds that it waited for batches.
        losses: of each replica of this host, since metrics were last reset; empty if the step returns none.
    """

    steps: int
    input_wait_seconds: float
    losses: tuple[float, ...]


class HostStats:
    """Sums over this host's inner loops."""

    def __init__(self) -> None:
        self._steps = 0
        self._train_seconds = 0.0
        self._input_wait_seconds = 0.0
        self._losses: tuple[float, ...] = ()

    def add(self, loop: InnerLoop, seconds: float) -> None:
        """Add an inner loop that took `seconds`, including the wait for input."""
        self._steps += loop.steps
        self._train_seconds += seconds
        self._input_wait_seconds += min(loop.input_wait_seconds, seconds)
        self._losses = loop.losses

    def gather_from_hosts(
        self, accelerator: Accelerator, global_batch_size: int, *, telemetry: Sink
    ) -> tuple[WorkerStats, ...]:
        """The statistics of all hosts, in their order; empty if a value of any host is invalid.

        This is a collective: all hosts call it at the same step.
        """
        if not self._steps:
            return ()
        numbers = [self._steps, self._train_seconds, self._input_wait_seconds, *self._losses]
        local_replicas = accelerator.replicas // accelerator.hosts
        examples_per_step = global_batch_size // accelerator.hosts
        of_hosts = accelerator.gather_from_hosts(numbers).tolist()

        def build() -> tuple[WorkerStats, ...]:
            return tuple(
                WorkerStats(
                    host=host,
                    replicas=local_replicas,
                    steps=int(steps),
                    examples=int(steps) * examples_per_step,
                    train_seconds=train,
                    input_wait_seconds=wait,
                    losses=tuple(losses),
                )
                for host, (steps, train, wait, *losses) in enumerate(of_hosts)
            )

        return measured(build, (), what="statistics of the hosts", telemetry=telemetry)
