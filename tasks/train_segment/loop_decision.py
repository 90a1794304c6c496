"""What the next inner loop is to be, decided by all hosts together.

Clocks and signals differ from host to host, and a host that did one step more than the others would wait for them for
ever.
"""

from dataclasses import dataclass

from tasks.foundation.contracts.segment import StopReason
from tasks.foundation.stops.agreement import Together, first_reason, number_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDecision:
    """One host's view, or, once agreed, everybody's.

    Attributes:
        stop: why to stop now, if so.
        grace_left: seconds until this machine may go; infinite if nobody is about to take it.
        segment_is_over: its seconds are used up.
        commit_is_due: commit before going on.
        steps: steps of the inner loop.
    """

    stop: StopReason | None
    grace_left: float
    segment_is_over: bool
    commit_is_due: bool
    steps: int

    def agreed(self, hosts: Together) -> "LoopDecision":
        """What all hosts do: a stop that any of them was asked for, the shortest grace, else what the chief says."""
        mine = [number_of(self.stop), self.grace_left, self.segment_is_over, self.commit_is_due, self.steps]
        said = hosts.of_all_hosts(mine)
        _, _, over, due, steps = said[0].tolist()
        return LoopDecision(
            stop=first_reason(said[:, 0].tolist()),
            grace_left=float(said[:, 1].min()),
            segment_is_over=bool(over),
            commit_is_due=bool(due),
            steps=int(steps),
        )
