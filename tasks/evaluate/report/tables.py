"""Sections and tables of the report's page, as plain text; the template turns them into HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A coloured word, such as `tip`; `reason` shows on hovering."""

    word: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: its first line.
        kind: CSS class; numbers are aligned to the right.
        strong: whether the text is bold.
        full_text: shown on hovering, if `text` is only a part of it.
        more_lines: the lines below the first one.
        marks: coloured words before the text.
        sort: what the column is sorted by, if not by the text.
        share: length of a bar after the text, from 0 to 1; None: no bar.
        bar: CSS class of the bar's color.
    """

    text: str = ""
    kind: Literal["", "number", "wrap", "wrap code"] = ""
    strong: bool = False
    full_text: str = ""
    more_lines: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    sort: float | None = None
    share: float | None = None
    bar: Literal["training", "kill", "quiet"] = "quiet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows below optional headings; `numbers` are the columns whose headings are aligned to the right."""

    headings: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]]
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with a table, a note below it, and texts of files, which are folded.

    Attributes:
        heading: of the section.
        table: None: no table.
        note: below the table.
        texts: names and contents of files.
    """

    heading: str
    table: Table | None = None
    note: str = ""
    texts: tuple[tuple[str, str], ...] = ()


def number(text: str, sort: float | None = None) -> Cell:
    """A cell aligned to the right; `sort` is its number, if the text has a unit."""
    return Cell(text, "number", sort=sort)


def time_words(time: str) -> str:
    """`2026-01-31 12:00:00`, from ISO 8601 in UTC."""
    return time[:19].replace("T", " ")


def cut(text: str, characters: int) -> str:
    """The first `characters` of a text, and an ellipsis if there are more."""
    return text if len(text) <= characters else f"{text[:characters]}…"
