"""What a chaos run counts, and how it looks at a home after every interruption."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tasks.foundation.contracts.log_entry import Commit, Entry
from tasks.foundation.errors import BatonError
from tests.support.homes import commits_in, damaged, entries_of, log_bytes, told_by

HEADINGS = ("kind", "hit", "missed", "commits lost", "gaps", "wrong restores", "ends differ", "other faults")


@dataclass
class Row:
    """One kind of interruption."""

    hit: int = 0
    missed: int = 0
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
    """Shared by the lanes; says everything aloud, line by line."""

    say: Callable[[str], None]
    rows: dict[str, Row] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def row(self, kind: str) -> Iterator[Row]:
        with self._lock:
            yield self.rows.setdefault(kind, Row())

    def tell(self, text: str) -> None:
        with self._lock:
            self.say(text)

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
                cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(pairs)
            )
            for pairs in (list(zip(line, widths, strict=True)) for line in [list(HEADINGS), *lines])
        ]


def _cells(row: Row) -> tuple[int, ...]:
    return row.hit, row.missed, row.lost, row.gaps, row.wrong, row.differ, row.other


@dataclass
class Witness:
    """Remembers what a run's home held, and compares.

    Attributes:
        home: the run's.
        known: digest of the state at each step of the uninterrupted run's commits.
        tally: where to count.
        harmed: paths of checkpoints that we damaged ourselves.
    """

    home: Path
    known: dict[int, str]
    tally: Tally
    harmed: set[str] = field(default_factory=set)
    _log: dict[str, bytes] = field(default_factory=dict)
    _last: str = "nothing"

    def look(self, kind: str) -> None:
        """After an interruption of a kind: is all that was committed still there, and all of it right?"""
        self._last = kind
        now = log_bytes(self.home)
        for name, data in self._log.items():
            if now.get(name) != data:
                self.fault("lost", f"{name} is gone or was changed")
        self._log = now
        if sorted(now) != [f"{number:08d}.json" for number in range(len(now))]:
            self.fault("gaps", f"the log is {sorted(now)}")
            return
        try:
            entries = entries_of(self.home)
        except BatonError as fault:
            self.fault("gaps", str(fault))
            return
        for path in damaged(self.home) - self.harmed:
            self.fault("lost", f"{path} is damaged, and not by us")
        self._restores(entries)

    def _restores(self, entries: list[Entry]) -> None:
        """Training is a function of where it starts: a right digest was trained from the right state."""
        before = None
        for entry in entries:
            body = entry.body
            if isinstance(body, Commit):
                tip = before.tip.path if before is not None and before.tip is not None else None
                if body.parent != tip:
                    self.fault("wrong", f"entry {entry.number} stands on {body.parent}, the tip was {tip}")
                step = body.checkpoint.step
                if self.known.get(step, body.checkpoint.state_digest) != body.checkpoint.state_digest:
                    self.fault("wrong", f"entry {entry.number} holds another state at step {step}")
            before = entry.head

    def end(self, straight: Path) -> None:
        """After the end of the run: is it the end of the uninterrupted one?"""
        self.look(self._last)
        here, there = commits_in(entries_of(self.home))[-1], commits_in(entries_of(straight))[-1]
        if (here.step, here.state_digest) != (there.step, there.state_digest):
            self.fault("differ", f"ended at step {here.step} with {here.state_digest[:12]}…")
        if told_by(self.home) != told_by(straight):
            self.fault("differ", "the history differs")
        left = [path.name for path in (self.home / "log").glob(".unfinished-*")]
        if left:
            self.fault("other", f"left behind: {left}")

    def fault(self, what: str, text: str) -> None:
        """Count something that is off, under the kind of the interruption before it."""
        with self.tally.row(self._last) as row:
            setattr(row, what, getattr(row, what) + 1)
        self.tally.tell(f"OFF  {self.home}: after {self._last}: {text}")
