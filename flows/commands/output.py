"""What commands print: one JSON object for programs, aligned plain text for people."""

import json
import math
from collections.abc import Mapping, Sequence

import typer

from tasks.foundation.messages import shown, without_password

_CELL_CHARACTERS = 1000


def say(text: str = "", *, aside: bool = False) -> None:
    """Print a line for people. Control characters are escaped, because names from a run's files may have some.

    Args:
        text: the line.
        aside: print to stderr, not to stdout.
    """
    typer.echo(shown(text), err=aside)


def say_json(value: Mapping[str, object]) -> None:
    """Print one line of strict JSON; numbers that are not finite become null."""
    typer.echo(without_password(json.dumps(_finite(value), allow_nan=False)))


def aligned(rows: Sequence[Sequence[str]], *, gap: str = "  ") -> list[str]:
    """Return rows as lines with aligned columns. Lines are never wrapped, so that they can be searched and copied."""
    rows = [[shown(cell, _CELL_CHARACTERS) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
