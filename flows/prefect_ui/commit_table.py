"""The rows of the commits artifact, kept up to date from the log."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tasks.foundation.contracts.log_entry import Commit, Entry, Evaluation, Head
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.telemetry.formatting import duration_words, metric_words, short_path, size_words

MOST_ROWS: Final = 100


@dataclass(frozen=True, slots=True)
class _Row:
    """One commit in the table; `path` is its checkpoint's."""

    path: str
    cells: Mapping[str, object]


class CommitTable:
    """The newest commits that lead to the tip. Not thread-safe.

    An update reads the new entries only, and the first one reads back as far as the table goes. So neither its cost nor
    its memory grows with the log.
    """

    def __init__(self, log: RunLog, most: int = MOST_ROWS) -> None:
        """Read nothing yet.

        Args:
            log: the run's log.
            most: the number of rows.
        """
        self._log = log
        self._most = most
        self._known = -1  # number of the newest entry that the rows show
        self._rows: list[_Row] = []  # oldest first

    def rows(self) -> list[Mapping[str, object]]:
        """The rows, newest first."""
        return [row.cells for row in reversed(self._rows)]

    @property
    def is_full(self) -> bool:
        """Whether there may be older commits."""
        return len(self._rows) == self._most

    def update(self, head: Head) -> None:
        """Bring the rows up to date with the log.

        Args:
            head: the log's newest state.

        Raises:
            BatonError: an entry cannot be read.
        """
        was_full = self.is_full
        self._read(head)
        if was_full and not self.is_full:  # a rewind brings back older commits than the rows had
            self._known, self._rows = -1, []
            self._read(head)

    def _read(self, head: Head) -> None:
        """Read back from the newest entry, to a row that is there already."""
        kept = {row.path: index for index, row in enumerate(self._rows)}
        new: list[_Row] = []
        validation: dict[str, str] = {}
        path = None if head.tip is None else head.tip.path
        for number in range(head.number, -1, -1):
            if path is None or len(new) == self._most or (number <= self._known and path in kept):
                break
            entry = self._log.entry(number)
            match entry.body:
                case Evaluation(checkpoint=checkpoint, metrics=metrics):
                    validation.setdefault(checkpoint.path, _words(metrics))
                # A kept row's commit is met only on the way to evaluations that are newer than the rows.
                case Commit(checkpoint=checkpoint, parent=parent) if checkpoint.path == path and path not in kept:
                    new.append(_row_of(entry, entry.body))
                    path = parent
        end = 0 if path not in kept else kept[path] + 1
        rows = [*self._rows[:end], *reversed(new)][-self._most :]
        self._rows = [_evaluated(row, validation) for row in rows]
        self._known = head.number


def _row_of(entry: Entry, commit: Commit) -> _Row:
    ref = commit.checkpoint
    cells = {
        "step": ref.step,
        "training": _words(commit.history[-1].metrics if commit.history else {}),
        "validation": "",
        "ended by": commit.exit_reason.replace("_", " "),
        "size": size_words(ref.size),
        "took": duration_words(sum(commit.seconds.values())) if commit.seconds else "",
        "committed, UTC": entry.time[:19].replace("T", " "),
        "checkpoint": short_path(ref.path).removeprefix("checkpoints/"),
    }
    return _Row(ref.path, cells)


def _evaluated(row: _Row, validation: Mapping[str, str]) -> _Row:
    words = validation.get(row.path)
    return row if words is None else replace(row, cells={**row.cells, "validation": words})


def _words(metrics: Mapping[str, float]) -> str:
    return metric_words(metrics).replace("  ", ", ")
