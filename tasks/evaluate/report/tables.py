"""Tables of the report's page."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Cell:
    """Markup that is escaped already, and how its column is set."""

    html: str
    kind: str = ""


def number(text: str) -> Cell:
    """A cell to be set to the right."""
    return Cell(escape(text), "number")


def table(headings: Sequence[str], rows: Sequence[Sequence[Cell]], *, numbers: set[int]) -> str:
    """A table; `numbers` are the columns whose headings are set to the right."""
    first = "".join(
        f'<th class="number">{escape(text)}</th>' if index in numbers else f"<th>{escape(text)}</th>"
        for index, text in enumerate(headings)
    )
    body = "\n".join(
        "<tr>"
        + "".join(f'<td class="{cell.kind}">{cell.html}</td>' if cell.kind else f"<td>{cell.html}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<div class="table"><table><thead><tr>{first}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def code(text: str, *, whole: str) -> str:
    """What fits the column; the whole on hovering."""
    return f'<code title="{escape(whole)}">{escape(text)}</code>'


def time_words(time: str) -> str:
    """`2026-01-31 12:00:00`, from ISO 8601 in UTC."""
    return escape(time[:19].replace("T", " "))
