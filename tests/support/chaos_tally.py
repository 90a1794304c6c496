"""The counts of a chaos run, and the checks of a home after every interruption."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Quarantine, Rewind
from baton.tasks.foundation.errors import BatonError
from tests.protocol.model_checker import accept, missing_programs
from tests.support.homes import commits_in, damaged, entries_of, log_bytes, read_history

HEADINGS = (
    "kind",
    "hit",
    "missed",
    "in flight",
    "commits lost",
    "gaps",
    "wrong restores",
    "ends differ",
    "other faults",
)


@dataclass
class Row:
    """The counts of one kind of interruption.

    Attributes:
        hit: interruptions that hit a running process.
        missed: interruptions that came too late.
        in_flight: hits between the snapshot of a save and its log entry.
        lost: committed files that are missing or changed.
        gaps: logs that have a gap or cannot be read.
        wrong: commits with a wrong parent or digest.
        differ: results that differ from the uninterrupted run.
        other: all other faults.
    """

    hit: int = 0
    missed: int = 0
    in_flight: int = 0
    lost: int = 0
    gaps: int = 0
    wrong: int = 0
    differ: int = 0
    other: int = 0

    @property
    def bad(self) -> bool:
        return bool(self.lost or self.gaps or self.wrong or self.differ or self.other)


@dataclass
class Tally:
    """Counts of all lanes.

    Attributes:
        print_line: receives one line for each event.
        rows: the counts by kind of interruption.
    """

    print_line: Callable[[str], None]
    rows: dict[str, Row] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def row(self, kind: str) -> Iterator[Row]:
        with self._lock:
            yield self.rows.setdefault(kind, Row())

    def log(self, text: str) -> None:
        with self._lock:
            self.print_line(text)

    def has_hit(self, kind: str) -> bool:
        """Whether an interruption of this kind has hit a running process."""
        with self._lock:
            return kind in self.rows and self.rows[kind].hit > 0

    @property
    def hits(self) -> int:
        return sum(row.hit for row in self.rows.values())

    @property
    def bad(self) -> bool:
        return any(row.bad for row in self.rows.values())

    def table(self) -> list[str]:
        total = Row(*(sum(column) for column in zip(*(_cells(row) for row in self.rows.values()), strict=True)))
        lines = [[kind, *map(str, _cells(row))] for kind, row in [*sorted(self.rows.items()), ("all", total)]]
        widths = [max(map(len, column)) for column in zip(HEADINGS, *lines, strict=True)]
        return [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs)
            )
            for pairs in (list(zip(line, widths, strict=True)) for line in [list(HEADINGS), *lines])
        ]


def _cells(row: Row) -> tuple[int, ...]:
    return row.hit, row.missed, row.in_flight, row.lost, row.gaps, row.wrong, row.differ, row.other


@dataclass
class HomeChecker:
    """Compares a run's home with its earlier content.

    Attributes:
        home: the run's home.
        known: state digests of the uninterrupted run by step.
        tally: receives the counts.
        damaged_by_test: paths of checkpoints that the test damaged.
    """

    home: Path
    known: dict[int, str]
    tally: Tally
    damaged_by_test: set[str] = field(default_factory=set)
    _log: dict[str, bytes] = field(default_factory=dict)
    _last: str = "nothing"

    def check(self, kind: str) -> None:
        """After an interruption of a kind, check that no commit is lost or wrong."""
        self._last = kind
        now = log_bytes(self.home)
        for name, data in self._log.items():
            if now.get(name) != data:
                self.fault("lost", f"{name} is missing or was changed")
        self._log = now
        if sorted(now) != [f"{number:08d}.json" for number in range(len(now))]:
            self.fault("gaps", f"the log is {sorted(now)}")
            return
        try:
            entries = entries_of(self.home)
        except BatonError as fault:
            self.fault("gaps", str(fault))
            return
        for path in damaged(self.home) - self.damaged_by_test:
            self.fault("lost", f"{path} is damaged, and not by the test")
        self._check_restores(entries)

    def _check_restores(self, entries: list[Entry]) -> None:
        """Check each commit's parent and digest. Training is deterministic: a wrong restore gives another digest."""
        before = None
        for entry in entries:
            body = entry.body
            if isinstance(body, Commit):
                tip = before.tip.path if before is not None and before.tip is not None else None
                if body.parent != tip:
                    self.fault("wrong", f"entry {entry.number} has the parent {body.parent}; the tip was {tip}")
                step = body.checkpoint.step
                if self.known.get(step, body.checkpoint.state_digest) != body.checkpoint.state_digest:
                    self.fault("wrong", f"entry {entry.number} holds another state at step {step}")
            kept = before is None or not before.read or entry.head.read
            if not kept and not isinstance(body, Quarantine | Rewind):
                self.fault("lost", f"entry {entry.number} retains no checkpoint that was read whole")
            before = entry.head

    def compare(self, straight: Path) -> None:
        """After the run, compare its result with the uninterrupted run."""
        self.check(self._last)
        here, there = commits_in(entries_of(self.home))[-1], commits_in(entries_of(straight))[-1]
        if (here.step, here.state_digest) != (there.step, there.state_digest):
            self.fault("differ", f"ended at step {here.step} with {here.state_digest[:12]}…")
        if read_history(self.home) != read_history(straight):
            self.fault("differ", "the history differs")
        left = [path.name for path in (self.home / "log").glob(".unfinished-*")]
        if left:
            self.fault("other", f"left behind: {left}")
        refused = "" if missing_programs() else accept(entries_of(self.home)).fault
        if refused:
            self.fault("other", f"the model of the protocol refuses the log: {refused}")

    def fault(self, what: str, text: str) -> None:
        """Count a fault under the kind of the last interruption."""
        with self.tally.row(self._last) as row:
            setattr(row, what, getattr(row, what) + 1)
        self.tally.log(f"OFF  {self.home}: after {self._last}: {text}")
