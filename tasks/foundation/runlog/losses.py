"""How often attempts at a run lost work, from their records."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from tasks.foundation.contracts.attempt import AttemptRecord
from tasks.foundation.machine.processes import is_gone
from tasks.foundation.runlog.attempts import IsGone, is_alive
from tasks.foundation.runlog.progress import DELIBERATE_ENDS

# What is assumed before anything is known: one loss in this time. Spot machines are often taken after some hours.
PRIOR_SECONDS: Final = 4 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What the records say.

    Attributes:
        count: attempts that were killed, crashed, or were stopped before their work was committed.
        seconds: time of all attempts.
    """

    count: int
    seconds: float

    @property
    def mean_seconds(self) -> float:
        """Mean time between losses: the mean of a gamma distribution whose prior is one loss in `PRIOR_SECONDS`."""
        return (self.seconds + PRIOR_SECONDS) / (self.count + 1)


def losses_of(records: Iterable[AttemptRecord], *, now: datetime, gone: IsGone = is_gone) -> Losses:
    """Count the losses among the attempts that trained.

    Args:
        records: of the run.
        now: current time in UTC.
        gone: whether the named process is known to have ended.
    """
    trained = [record for record in records if record.seconds.get("train", 0.0) > 0]
    lost = [record for record in trained if _lost_work(record, now=now, gone=gone)]
    return Losses(count=len(lost), seconds=sum(record.wall_seconds for record in trained))


def _lost_work(record: AttemptRecord, *, now: datetime, gone: IsGone) -> bool:
    if record.ended is None:
        return not is_alive(record, now=now, gone=gone)
    return record.ended not in DELIBERATE_ENDS and record.uncommitted_seconds > 0
