"""Account for the time of a run: every second of every attempt has one cause, and lost work is one of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from baton.tasks.foundation.contracts.attempt import HUNG, LAUNCH, UNATTRIBUTED, AttemptRecord, utc_time
from baton.tasks.foundation.contracts.checkpoint import base_in_folder_name
from baton.tasks.foundation.contracts.log_entry import Commit, Entry
from baton.tasks.foundation.log.attempts import Attempts, is_alive
from baton.tasks.foundation.log.history import History
from baton.tasks.foundation.log.log import RunLog

GOOD = "train"
# Training that is not part of the run: never committed, or committed and later rewound or quarantined.
LOST = "lost work"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt, and how much of its work was lost."""

    record: AttemptRecord
    alive: bool
    lost_seconds: float  # training that no commit contains

    @property
    def silent(self) -> bool:
        """Whether it died without recording why it ended; its time counts up to its last heartbeat."""
        return self.record.ended is None and not self.alive

    @property
    def hung(self) -> bool:
        """Whether it ended itself because it hung, see `stop.hang_seconds`."""
        return self.record.ended == HUNG


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The time that processes spent on a run.

    Two processes that work at the same time count twice, because both are paid for. A process that waits for a remote
    stage is not working; its wait counts only where no attempt of that stage accounts for the time.

    Attributes:
        seconds: seconds by cause, largest first.
        attempts: all attempts by start time.
        away_seconds: time between the first and the last heartbeat without any process; not part of `seconds`.
        unreadable: number of files below `attempts/` that could not be read.
    """

    seconds: dict[str, float]
    attempts: tuple[Attempt, ...]
    away_seconds: float
    unreadable: int

    @property
    def total_seconds(self) -> float:
        """The sum over all causes: the time that all attempts ran."""
        return sum(self.seconds.values())

    @property
    def good_seconds(self) -> float:
        """Training that is part of the run or can still be committed."""
        return self.seconds.get(GOOD, 0.0)

    @property
    def bad_seconds(self) -> dict[str, float]:
        """All other causes, largest first."""
        return {cause: amount for cause, amount in self.seconds.items() if cause != GOOD}

    @property
    def unattributed_seconds(self) -> float:
        """Time without a recorded cause."""
        return self.seconds.get(UNATTRIBUTED, 0.0)

    def share(self, seconds: float) -> float:
        """Return `seconds` as a share of the total, in [0, 1]."""
        return seconds / self.total_seconds if self.total_seconds > 0 else 0.0


def account_of(attempts: Attempts, log: RunLog, newest: Entry, *, now: datetime) -> Account | None:
    """Add up the seconds of all attempts; reads next to nothing of the log.

    Args:
        attempts: the records below `attempts/`.
        now: current time in UTC; an attempt without a recent heartbeat is dead.

    Returns:
        None if no attempt is recorded: the run was forked and not trained since.
    """
    if not attempts.records:
        return None

    def committed(path: str) -> bool:
        return _is_committed(log, newest, path)

    judged = tuple(_attempt(record, committed, now=now) for record in attempts.records)
    seconds: dict[str, float] = {GOOD: 0.0, LOST: 0.0, UNATTRIBUTED: 0.0}
    for record in attempts.records:
        for cause, amount in _own_seconds(record, attempts.records).items():
            seconds[cause] = seconds.get(cause, 0.0) + amount
    lost = sum(each.lost_seconds for each in judged) + log.totals(newest).undone_seconds
    # The seconds move from one cause to another, so the total stays. The attempts that trained the undone steps may
    # have no record, so the amount is limited.
    lost = min(lost, seconds[GOOD])
    seconds[GOOD] -= lost
    seconds[LOST] += lost
    return Account(
        seconds=dict(sorted(seconds.items(), key=lambda item: (-item[1], item[0]))),
        attempts=judged,
        away_seconds=_away_seconds(attempts.records),
        unreadable=attempts.unreadable,
    )


def seconds_in_log(history: History) -> dict[str, float]:
    """Return the seconds of the tip's lineage by cause, largest first, with evaluation as a cause.

    For runs without attempt records. Start-up time and lost work are missing.
    """
    amounts = dict(history.seconds)
    evaluating = sum(each.seconds for each in history.evaluations) + sum(each.seconds for each in history.tests)
    if evaluating:
        amounts["evaluate"] = amounts.get("evaluate", 0.0) + evaluating
    return dict(sorted(amounts.items(), key=lambda item: (-item[1], item[0])))


def _own_seconds(record: AttemptRecord, records: Sequence[AttemptRecord]) -> dict[str, float]:
    """Return an attempt's seconds by cause, without waiting time that the remote stages' own attempts account for.

    The remaining waiting time is the time to launch these stages and to notice that they ended.
    """
    if LAUNCH not in record.seconds:
        return record.seconds
    accounted = sum(stage.wall_seconds for stage in records if stage.within == record.attempt)
    return {**record.seconds, LAUNCH: max(record.seconds[LAUNCH] - accounted, 0.0)}


def _attempt(record: AttemptRecord, committed: Callable[[str], bool], *, now: datetime) -> Attempt:
    alive = is_alive(record, now=now)
    # A process that is alive can still commit its work; a checkpoint that it staged may be committed by another one.
    kept = alive or not record.uncommitted_seconds or (record.staged is not None and committed(record.staged))
    lost = record.discarded_seconds + (0.0 if kept else record.uncommitted_seconds)
    return Attempt(record=record, alive=alive, lost_seconds=min(lost, record.seconds.get(GOOD, 0.0)))


def _is_committed(log: RunLog, newest: Entry, path: str) -> bool:
    """Whether a staged checkpoint is committed: only one can be on its base, so a few entries after it tell."""
    base = base_in_folder_name(path)
    for number in range(newest.number + 1 if base is None else base + 1, newest.number + 1):
        entry = log.entry(number)
        if isinstance(entry.body, Commit) and entry.body.checkpoint.path == path:
            return True
        if entry.head.base == number:
            return False
    return False


def _away_seconds(records: Sequence[AttemptRecord]) -> float:
    """Return the time between attempts, each placed by its last heartbeat, so that a changed clock only shifts it."""
    spans = sorted(
        (end - record.wall_seconds, end) for record in records for end in [utc_time(record.alive).timestamp()]
    )
    away, until = 0.0, spans[0][1]
    for begin, end in spans:
        away += max(begin - until, 0.0)
        until = max(until, end)
    return away
