"""Where a run's time went: every second of every attempt by cause, lost work included. They add up."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from datetime import datetime

from tasks.foundation.contracts.attempt import LAUNCH, UNATTRIBUTED, AttemptRecord, utc_time
from tasks.foundation.contracts.log_entry import Commit, Entry
from tasks.foundation.process import is_gone
from tasks.foundation.runlog.attempts import Attempts, Gone, is_alive
from tasks.foundation.runlog.history import History, commit_of

GOOD = "train"
# Training whose result is not part of the run: never committed, or committed and not built upon.
LOST = "lost work"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt and what became of its work."""

    record: AttemptRecord
    alive: bool
    lost_seconds: float  # of training that no commit holds

    @property
    def silent(self) -> bool:
        """Whether it died without a word; its time is counted up to its last sign of life."""
        return self.record.ended is None and not self.alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The time that processes spent on a run. Two at work side by side count twice: each is paid for.

    One that waits for a stage elsewhere is not at work; its wait counts as far as no attempt of the stage tells of it.
    """

    seconds: dict[str, float]  # by cause, largest first
    attempts: tuple[Attempt, ...]  # by when they began
    away_seconds: float  # between the first and the last sign of life, while no process was there; not in `seconds`
    unrecorded_seconds: float  # of committed segments from before attempts were recorded; not in `seconds`
    unreadable: int  # files below attempts/ that could not be read

    @property
    def total_seconds(self) -> float:
        """All causes together: what the attempts lived."""
        return sum(self.seconds.values())

    @property
    def good_seconds(self) -> float:
        """Training whose result is part of the run, or may yet be."""
        return self.seconds.get(GOOD, 0.0)

    @property
    def bad_seconds(self) -> dict[str, float]:
        """All the rest by cause, largest first."""
        return {cause: amount for cause, amount in self.seconds.items() if cause != GOOD}

    @property
    def unattributed_seconds(self) -> float:
        """Time that nothing claimed."""
        return self.seconds.get(UNATTRIBUTED, 0.0)

    def share(self, seconds: float) -> float:
        """A part of the total, 0 to 1."""
        return seconds / self.total_seconds if self.total_seconds > 0 else 0.0


def account_of(
    attempts: Attempts, entries: Sequence[Entry], history: History, *, now: datetime, gone: Gone = is_gone
) -> Account | None:
    """Add up all attempts.

    Args:
        attempts: what lies below `attempts/`.
        entries: the whole log.
        history: what `history_of` makes of it.
        now: the time of day, UTC; it tells the living from the dead.
        gone: whether the process of a name is known to have ended.

    Returns:
        None where no attempt is recorded, as in runs of earlier versions.
    """
    if not attempts.records:
        return None
    committed = {entry.body.checkpoint.path for entry in entries if isinstance(entry.body, Commit)}
    tried = tuple(_attempt(record, committed, now=now, gone=gone) for record in attempts.records)
    seconds: dict[str, float] = {GOOD: 0.0, LOST: 0.0, UNATTRIBUTED: 0.0}
    for record in attempts.records:
        for cause, amount in _own_seconds(record, attempts.records).items():
            seconds[cause] = seconds.get(cause, 0.0) + amount
    first = utc_time(attempts.records[0].began)
    recorded = [entry for entry in entries if _written(entry, first) >= first.replace(microsecond=0)]
    lost = sum(each.lost_seconds for each in tried) + _not_built_upon(recorded, history)
    # Moved, not added: each second is in one place. Attempts whose records are lost may have trained what is undone.
    lost = min(lost, seconds[GOOD])
    seconds[GOOD] -= lost
    seconds[LOST] += lost
    numbers = {entry.number for entry in recorded}
    return Account(
        seconds=dict(sorted(seconds.items(), key=lambda item: (-item[1], item[0]))),
        attempts=tried,
        away_seconds=_away_seconds(attempts.records),
        unrecorded_seconds=sum(
            sum(commit_of(entry).seconds.values()) for entry in history.commits if entry.number not in numbers
        ),
        unreadable=attempts.unreadable,
    )


def seconds_in_log(history: History) -> dict[str, float]:
    """Seconds of the lineage by cause, largest first; evaluations are a cause of their own.

    All that is known of a run whose attempts are not recorded: start-ups and lost work are not in it.
    """
    amounts = dict(history.seconds)
    evaluating = sum(evaluation.seconds for evaluation in history.evaluations)
    if evaluating:
        amounts["evaluate"] = amounts.get("evaluate", 0.0) + evaluating
    return dict(sorted(amounts.items(), key=lambda item: (-item[1], item[0])))


def _own_seconds(record: AttemptRecord, records: Sequence[AttemptRecord]) -> dict[str, float]:
    """An attempt's seconds by cause, without the wait for stages whose own attempts tell where it went.

    What is left of the wait is what it took to get them going, and to hear of their end.
    """
    if LAUNCH not in record.seconds:
        return record.seconds
    told = sum(stage.wall_seconds for stage in records if stage.within == record.attempt)
    return {**record.seconds, LAUNCH: max(record.seconds[LAUNCH] - told, 0.0)}


def _attempt(record: AttemptRecord, committed: Set[str], *, now: datetime, gone: Gone) -> Attempt:
    alive = is_alive(record, now=now, gone=gone)
    # What a living process has not committed yet, it may still commit; and what was handed on, another.
    kept = alive or record.staged in committed
    lost = record.discarded_seconds + (0.0 if kept else record.uncommitted_seconds)
    return Attempt(record=record, alive=alive, lost_seconds=min(lost, record.seconds.get(GOOD, 0.0)))


def _written(entry: Entry, otherwise: datetime) -> datetime:
    """When an entry was written; its time is for people, so an odd one is no fault."""
    try:
        return utc_time(entry.time)
    except ValueError:
        return otherwise


def _not_built_upon(entries: Iterable[Entry], history: History) -> float:
    """Seconds of training that was committed, and is rewound or quarantined."""
    lineage = {commit_of(entry).checkpoint.path for entry in history.commits}
    return sum(
        entry.body.seconds.get(GOOD, 0.0)
        for entry in entries
        if isinstance(entry.body, Commit) and entry.body.checkpoint.path not in lineage
    )


def _away_seconds(records: Sequence[AttemptRecord]) -> float:
    """Time between attempts. Each is placed by its last sign of life: a clock set during it shifts it, no more."""
    spans = sorted(
        (end - record.wall_seconds, end) for record in records for end in [utc_time(record.alive).timestamp()]
    )
    away, until = 0.0, spans[0][1]
    for begin, end in spans:
        away += max(begin - until, 0.0)
        until = max(until, end)
    return away
