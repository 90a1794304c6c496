"""What the commands print: one JSON object for machines, aligned plain text for people."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from tasks.foundation.messages import shown, without_password

_CELL_CHARACTERS = 1000

AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object, as the last line of stdout")]


def say(text: str = "", *, aside: bool = False) -> None:
    """A line for people; names from a run's files are shown, never obeyed.

    Args:
        text: the line.
        aside: on stderr.
    """
    typer.echo(shown(text), err=aside)


def say_json(value: Mapping[str, Any]) -> None:
    """One line of strict JSON: what is not finite becomes null, which every reader of JSON understands."""
    typer.echo(without_password(json.dumps(_finite(value), allow_nan=False)))


def aligned(rows: Sequence[Sequence[str]], *, gap: str = "  ") -> list[str]:
    """Columns, each as wide as its widest cell; never wrapped, so that lines can be searched and copied."""
    rows = [[shown(cell, _CELL_CHARACTERS) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
