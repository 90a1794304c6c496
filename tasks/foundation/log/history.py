"""The history of a run: metrics, evaluations and seconds along the lineage of its tip, and what is kept for good.

A checkpoint that is kept for good leaves the head, which the entry says in which it leaves. So all that can be restored
is what the head has and what a reader of the history finds. The head counts them: a run without any reads nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, Protocol, TypeVar

from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import (
    Body,
    Commit,
    Entry,
    Evaluation,
    EvaluationOnTest,
    Head,
    LoggedValues,
    MetricRow,
    Quarantine,
    Retained,
    Retire,
)
from baton.tasks.foundation.contracts.run_spec import PlainValue
from baton.tasks.foundation.errors import RunLogError

E = TypeVar("E", Evaluation, EvaluationOnTest)


class EntryReader(Protocol):
    """A log, as far as reading back in it goes."""

    def entry(self, number: int) -> Entry:
        """See `RunLog.entry`."""

    def entries(self, *, blocks: Literal["ignored", "read", "written"] = "ignored") -> Iterator[Entry]:
        """See `RunLog.entries`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The history of a run's tip. Rewound and quarantined work is not in it.

    Attributes:
        commits: entries of the commits that lead to the tip, oldest first.
        rows: their metric rows.
        evaluations: their evaluations on the validation set.
        tests: their evaluations on the test set; of each checkpoint, the newest.
        logged: what callbacks logged at their rows and evaluations, by step.
        kept: what was kept for good and has left the head, oldest first; of any lineage.
        head: the newest state; None for an empty log.
        seconds: their seconds by cause.
    """

    commits: tuple[Entry, ...] = ()
    rows: tuple[MetricRow, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    tests: tuple[EvaluationOnTest, ...] = ()
    logged: tuple[LoggedValues, ...] = ()
    kept: tuple[Retained, ...] = ()
    head: Head | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def restorable(self) -> tuple[CheckpointRef, ...]:
        """Every checkpoint that can be restored: what is kept for good, and those of the head."""
        return (*(each.ref for each in self.kept), *(() if self.head is None else self.head.retained))

    @property
    def lineage(self) -> frozenset[str]:
        """Paths of the checkpoints that lead to the tip, and of the tip."""
        return frozenset(commit_of(entry).checkpoint.path for entry in self.commits)

    @property
    def metadata(self) -> dict[str, PlainValue]:
        """The user's own facts, as of the newest commit."""
        found = (commit_of(entry).metadata for entry in reversed(self.commits))
        return next((metadata for metadata in found if metadata is not None), {})

    @property
    def partial(self) -> MetricRow | None:
        """The metrics since the last row, as they were at the commit of the tip; no row."""
        return commit_of(self.commits[-1]).partial if self.commits else None

    @property
    def metric_names(self) -> list[str]:
        """All metrics of the curves, the loss first; the others keep their order."""
        rows = [*(row.metrics for row in self.rows), *(each.metrics for each in self.evaluations)]
        logged = [name.removeprefix("val_") for each in self.logged for name in each.values if each.numbers(name)]
        names = dict.fromkeys([*(name for row in rows for name in row), *logged])
        return sorted(names, key=lambda name: name != "loss")

    def training_curve(self, metric: str) -> list[tuple[int, float]]:
        """Step and value of a metric in the training, or of a number that callbacks logged."""
        rows = [(row.step, row.metrics[metric]) for row in self.rows if metric in row.metrics]
        return [*rows, *(point for each in self.logged for point in each.numbers(metric))]

    def validation_curve(self, metric: str) -> list[tuple[int, float]]:
        """Step and value of a metric on the validation set; of what callbacks logged, the names begin with val_."""
        rows = [(each.checkpoint.step, each.metrics[metric]) for each in self.evaluations if metric in each.metrics]
        return [*rows, *(point for each in self.logged for point in each.numbers(f"val_{metric}"))]

    @property
    def segments(self) -> int:
        """Number of committed segments that lead to the tip, including parts of segments that were stopped."""
        return sum(commit_of(entry).ends_a_segment for entry in self.commits)


class KeptForGood:
    """The checkpoints that have left the head and are kept, as a reader of all entries learns of them."""

    def __init__(self) -> None:
        """Begin with none."""
        self._kept: dict[str, Retained] = {}

    def follow(self, body: Body) -> None:
        """Take notice of the next entry."""
        if isinstance(body, Retire):
            self._kept |= {each.ref.path: each for each in body.kept}
        elif isinstance(body, Quarantine) and body.adopted is not None:
            self._kept.pop(body.adopted.ref.path, None)  # it is in the head again

    @property
    def checkpoints(self) -> tuple[Retained, ...]:
        """Those after the entries so far, in order of commit."""
        return tuple(sorted(self._kept.values(), key=lambda each: each.ref.base))


def kept_for_good(log: EntryReader, head: Head, *, blocks: Literal["read", "written"] = "read") -> tuple[Retained, ...]:
    """Return the checkpoints that are kept for good and have left the head, in order of commit.

    Reads the history only if there are any.

    Raises:
        RunLogError: an entry is missing or cannot be read.
    """
    kept = KeptForGood()
    if head.kept_for_good:
        for entry in log.entries(blocks=blocks):
            kept.follow(entry.body)
    return kept.checkpoints


def restorable(log: EntryReader, head: Head) -> tuple[CheckpointRef, ...]:
    """Return every checkpoint that can be restored, in order of commit: the head's, and what is kept for good."""
    refs = (*(each.ref for each in kept_for_good(log, head)), *head.retained)
    return tuple(sorted(refs, key=lambda ref: ref.base))


def commit_of(entry: Entry) -> Commit:
    """Return the body of an entry that must be a commit."""
    if not isinstance(entry.body, Commit):
        raise TypeError(f"entry {entry.number} is a {entry.body.kind}, not a checkpoint")
    return entry.body


def posix_seconds(entry: Entry) -> float:
    """POSIX time of an entry; 0 if it cannot be read, because it is informational."""
    try:
        return datetime.fromisoformat(entry.time).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def newest_commits(log: EntryReader, head: Head) -> Iterator[tuple[Entry, Evaluation | None]]:
    """Yield the commits that lead to the tip, newest first, each with its evaluation; reads only as far as asked."""
    evaluations: dict[str, Evaluation] = {}
    path = None if head.tip is None else head.tip.path
    number = head.number
    while path is not None and number >= 0:
        entry = log.entry(number)
        match entry.body:
            case Evaluation(checkpoint=checkpoint) as evaluation:
                evaluations.setdefault(checkpoint.path, evaluation)
            case Commit(checkpoint=checkpoint, parent=parent) if checkpoint.path == path:
                yield entry, evaluations.get(path)
                path = parent
        number -= 1


def recent_rows(log: EntryReader, head: Head, count: int) -> list[MetricRow]:
    """Return the last `count` metric rows up to the tip, oldest first, reading only the entries that it needs."""
    rows: list[MetricRow] = []
    for entry, _ in newest_commits(log, head):
        rows = [*commit_of(entry).history, *rows]
        if len(rows) >= count:
            break
    return rows[-count:]


def evaluation_of(log: EntryReader, head: Head, path: str) -> Evaluation | None:
    """Return the evaluation of a checkpoint in the log up to `head`, or None; reads back to the checkpoint's commit."""
    return _newest_about(log, head, path, Evaluation)


def evaluation_on_test_of(log: EntryReader, head: Head, path: str) -> EvaluationOnTest | None:
    """Return the newest evaluation of a checkpoint on the test set, or None; reads back as `evaluation_of`."""
    return _newest_about(log, head, path, EvaluationOnTest)


def _newest_about(log: EntryReader, head: Head, path: str, kind: type[E]) -> E | None:
    """The newest entry of a kind about a checkpoint; None if there is none after the checkpoint's commit."""
    for number in range(head.number, -1, -1):
        body = log.entry(number).body
        if isinstance(body, kind) and body.checkpoint.path == path:
            return body
        if isinstance(body, Commit) and body.checkpoint.path == path:
            break
    return None


def values_at(evaluation: Evaluation) -> LoggedValues | None:
    """What callbacks logged at an evaluation that no commit followed; None if there is nothing."""
    if not evaluation.logged:
        return None
    return LoggedValues(step=evaluation.checkpoint.step, on="evaluation", values=evaluation.logged)


def history_of(entries: Iterable[Entry]) -> History:
    """Collect the history of the tip from all entries of a log.

    Raises:
        RunLogError: a checkpoint in the tip's lineage was never committed.
    """
    commits: dict[str, Entry] = {}
    evaluations: dict[str, Evaluation] = {}
    tests: dict[str, EvaluationOnTest] = {}
    logged: dict[str, LoggedValues] = {}
    head: Head | None = None
    kept = KeptForGood()
    for entry in entries:
        head = entry.head
        kept.follow(entry.body)
        if isinstance(entry.body, Commit):
            commits[entry.body.checkpoint.path] = entry
        elif isinstance(entry.body, Evaluation):
            evaluations[entry.body.checkpoint.path] = entry.body
            if (values := values_at(entry.body)) is not None:
                logged[entry.body.checkpoint.path] = values
        elif isinstance(entry.body, EvaluationOnTest):
            tests[entry.body.checkpoint.path] = entry.body
    lineage: list[Entry] = []
    path = head.tip.path if head is not None and head.tip is not None else None
    while path is not None:
        # `pop` below ends the loop even if checkpoints are each other's parents.
        if path not in commits:
            raise RunLogError(
                f"no entry commits {path}, an ancestor of the tip, or the checkpoint is its own ancestor; restore the "
                "log from a backup"
            )
        entry = commits.pop(path)
        lineage.append(entry)
        path = commit_of(entry).parent
    lineage.reverse()
    seconds: dict[str, float] = {}
    paths = [commit_of(entry).checkpoint.path for entry in lineage]
    # A run that went on after its last evaluation has the values of this twice.
    by_step = {each.step: each for entry in lineage for each in commit_of(entry).logged}
    by_step |= {logged[path].step: logged[path] for path in paths if path in logged}
    for entry in lineage:
        for cause, amount in commit_of(entry).seconds.items():
            seconds[cause] = seconds.get(cause, 0.0) + amount
    return History(
        commits=tuple(lineage),
        rows=tuple(row for entry in lineage for row in commit_of(entry).history),
        evaluations=tuple(evaluations[path] for path in paths if path in evaluations),
        tests=tuple(tests[path] for path in paths if path in tests),
        logged=tuple(by_step[step] for step in sorted(by_step)),
        kept=kept.checkpoints,
        head=head,
        seconds=seconds,
    )
