"""What to do before the next inner loop, decided by all hosts together.

Clocks and signals differ between hosts. A host that ran one step more than the others would wait for them forever.
"""

from dataclasses import dataclass

from tasks.foundation.contracts.segment import StopReason
from tasks.foundation.hosts import Hosts
from tasks.foundation.stops.agreement import first_reason, number_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDecision:
    """The decision of one host, or of all hosts once they agree.

    Attributes:
        stop: why to stop now; None to continue.
        grace_left: seconds until this machine may end; infinite if no end is announced.
        segment_is_over: whether the segment's seconds are used up.
        commit_is_due: whether to commit first.
        steps: number of steps of the inner loop.
        save_failed: whether a save beside the training failed.
    """

    stop: StopReason | None
    grace_left: float
    segment_is_over: bool
    commit_is_due: bool
    steps: int
    save_failed: bool = False

    def agreed(self, hosts: Hosts) -> "LoopDecision":
        """The decision of all hosts: a stop of any host, the shortest grace period, otherwise the chief's decision."""
        values = [
            number_of(self.stop),
            self.grace_left,
            self.segment_is_over,
            self.commit_is_due,
            self.steps,
            self.save_failed,
        ]
        of_hosts = hosts.gather_from_hosts(values)
        _, _, over, due, steps, failed = of_hosts[0].tolist()
        return LoopDecision(
            stop=first_reason(of_hosts[:, 0].tolist()),
            grace_left=float(of_hosts[:, 1].min()),
            segment_is_over=bool(over),
            commit_is_due=bool(due),
            steps=int(steps),
            save_failed=bool(failed),
        )
