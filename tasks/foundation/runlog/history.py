"""What the whole log tells: the curve of a run along the lineage of its tip, without duplicates."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tasks.foundation.contracts.log_entry import Commit, Entry, Evaluation, Head
from tasks.foundation.contracts.segment import MetricRow
from tasks.foundation.errors import RunLogError
from tasks.foundation.runlog.log import RunLog


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A run as a function of its log. Work that was not built upon is left out."""

    commits: tuple[Entry, ...] = ()
    rows: tuple[MetricRow, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    head: Head | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def segments(self) -> int:
        """Number of committed segments, or parts of one that was stopped, on the way to the tip."""
        return sum(commit_of(entry).ends_a_segment for entry in self.commits)


def commit_of(entry: Entry) -> Commit:
    """The body of an entry that is known to be a commit."""
    if not isinstance(entry.body, Commit):
        raise TypeError(f"entry {entry.number} is a {entry.body.kind}, not a checkpoint")
    return entry.body


def recent_rows(log: RunLog, head: Head, count: int) -> list[MetricRow]:
    """The last `count` metric rows on the way to the tip, oldest first; reads no more of the log than it needs."""
    rows: list[MetricRow] = []
    path = None if head.tip is None else head.tip.path
    number = head.base
    while path is not None and number >= 0 and len(rows) < count:
        body = log.entry(number).body
        if isinstance(body, Commit) and body.checkpoint.path == path:
            rows = [*body.history, *rows]
            path = body.parent
        number -= 1
    return rows[-count:]


def evaluation_of(log: RunLog, head: Head, path: str) -> Evaluation | None:
    """The evaluation of a checkpoint that is in the log by `head`; None if it has none. Reads back to its commit."""
    for number in range(head.number, -1, -1):
        body = log.entry(number).body
        if isinstance(body, Evaluation) and body.checkpoint.path == path:
            return body
        if isinstance(body, Commit) and body.checkpoint.path == path:
            break
    return None


def history_of(entries: Iterable[Entry]) -> History:
    """Fold all entries of a log into the story of its tip.

    Raises:
        RunLogError: a checkpoint on the way to the tip was never committed.
    """
    commits: dict[str, Entry] = {}
    evaluations: dict[str, Evaluation] = {}
    head: Head | None = None
    for entry in entries:
        head = entry.head
        if isinstance(entry.body, Commit):
            commits[entry.body.checkpoint.path] = entry
        elif isinstance(entry.body, Evaluation):
            evaluations[entry.body.checkpoint.path] = entry.body
    lineage: list[Entry] = []
    path = head.tip.path if head is not None and head.tip is not None else None
    while path is not None:
        # Taken out, so that a log whose checkpoints are each other's parents comes to an end.
        if path not in commits:
            raise RunLogError(
                f"the tip comes from {path}, which no entry of the log committed, or which comes from itself; restore "
                "the log from a backup"
            )
        entry = commits.pop(path)
        lineage.append(entry)
        path = commit_of(entry).parent
    lineage.reverse()
    seconds: dict[str, float] = {}
    for entry in lineage:
        for cause, amount in commit_of(entry).seconds.items():
            seconds[cause] = seconds.get(cause, 0.0) + amount
    return History(
        commits=tuple(lineage),
        rows=tuple(row for entry in lineage for row in commit_of(entry).history),
        evaluations=tuple(
            evaluations[commit_of(entry).checkpoint.path]
            for entry in lineage
            if commit_of(entry).checkpoint.path in evaluations
        ),
        head=head,
        seconds=seconds,
    )
