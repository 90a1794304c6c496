"""The figures, the goals beside them, and the table that is printed and kept."""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_COLUMNS = ("figure", "min", "median", "max", "goal", "verdict", "rounds")
_VERDICT = _COLUMNS.index("verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table.

    Attributes:
        group: the heading that it stands under.
        name: what was measured.
        values: one for each round.
        unit: "x" for a ratio; "s", "ms", "MB".
        goal: what the median is compared with; None: there is no goal, as for a peer.
        at_least: whether larger is better.
    """

    group: str
    name: str
    values: Sequence[float]
    unit: str = "x"
    goal: float | None = None
    at_least: bool = False

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)

    @property
    def verdict(self) -> str:
        """Whether the median reaches the goal; "" without a goal."""
        if self.goal is None:
            return ""
        reached = self.median >= self.goal if self.at_least else self.median <= self.goal
        return "reached" if reached else "missed"

    def words(self) -> tuple[str, ...]:
        """The cells of its line."""
        sign = "≥" if self.at_least else "≤"
        goal = "" if self.goal is None else f"{sign} {_number(self.goal, self.unit)}"
        found = (min(self.values), self.median, max(self.values))
        return (
            self.name,
            *(_number(value, self.unit) for value in found),
            goal,
            self.verdict,
            str(len(self.values)),
        )


def _number(value: float, unit: str) -> str:
    digits = {"x": 3, "s": 2, "ms": 0, "MB": 0, "": 0, "/s": 0}.get(unit, 2)
    space = "" if unit in {"x", "", "/s"} else " "
    return f"{value:,.{digits}f}{space}{'' if unit == 'x' else unit}"


def as_markdown(figures: Iterable[Figure]) -> str:
    """The table, with a heading for each group, padded so that it can be read as text too."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for figure in figures:
        groups.setdefault(figure.group, []).append(figure.words())
    parts = []
    for group, lines in groups.items():
        rows = [_COLUMNS, *lines]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        padded = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
        padded.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
        parts.append(f"## {group}\n\n" + "\n".join(padded) + "\n")
    return "\n".join(parts)


def with_conclusion(page: str) -> str:
    """A page of tables, with one sentence below its heading that says which goals are reached."""
    group, reached, missed = "", 0, dict[str, int]()
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            group = re.split(": |, ", line.removeprefix("## "))[0]
        elif cells[_VERDICT:] and cells[_VERDICT] == "reached":
            reached += 1
        elif cells[_VERDICT:] and cells[_VERDICT] == "missed":
            missed[group] = missed.get(group, 0) + 1
    words = "; ".join(f"{name} ({count})" for name, count in missed.items())
    goals = reached + sum(missed.values())
    sentence = f"**{reached} of {goals} goals are reached{f'; missed: {words}' if words else ''}.**"
    heading, _, rest = page.partition("\n\n")
    if rest.startswith("**"):
        rest = rest.partition("\n\n")[2]
    return f"{heading}\n\n{sentence}\n\n{rest}"


def write_results(file: Path, figures: Iterable[Figure], *, machine: str, command: str, notes: Sequence[str]) -> None:
    """Write the table with the machine's words, and what they say in one sentence, as Markdown."""
    lines = "".join(f"- {note}\n" for note in notes)
    text = (
        f"# Results of `{command}`\n\n{machine}\n\n"
        "Each arm is a process of its own; arms run in turn, round by round. A figure with unit x is the ratio of two "
        "runs of the same round. The verdict compares the median with the goal.\n"
        + (f"\n{lines}" if lines else "")
        + f"\n{as_markdown(figures)}"
    )
    file.write_text(with_conclusion(text), encoding="utf-8")
