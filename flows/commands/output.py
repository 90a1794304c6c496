"""What commands print: one JSON object for programs; lines, facts and tables for people.

On a terminal, words of a status have colors, lines are wrapped with a hanging indent, ids are short and times relative.
A pipe gets plain lines that are never wrapped, with whole ids and times, as `--verbose` prints them.
"""

import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self, TextIO

from baton.tasks.foundation.errors import InvalidInput, errors_worded
from baton.tasks.foundation.masking import masked_values
from baton.tasks.foundation.telemetry.formatting import (
    Style,
    ago_words,
    checkpoint_name,
    columns_of,
    has_colors,
    painted,
    painted_label,
    style_of,
)
from baton.tasks.foundation.text import Usage, folded, shown, wrapped_lines

# The shape of every --json object, described in flows/homes.md. Keys are added; another meaning needs another version.
JSON_SCHEMA_VERSION: Final = 1
_CELL_CHARACTERS = 1000
_ID_CHARACTERS = 12
_GAP, _BELOW = "  ", "    "
# Below it, a terminal wraps by itself. Above it, lines of prose are hard to read.
_MIN_COLUMNS, _MAX_PROSE_COLUMNS = 40, 120
# The last column of a table gets no less: a table that leaves less is printed as wrapped lines.
_MIN_LAST_COLUMNS = 16
_NARROW_LINES = 3


class Painted(str):
    """A cell with a style. Joined with other text, it is plain text."""

    style: Style
    __slots__ = ("style",)

    def __new__(cls, text: str, style: Style) -> Self:
        """Make a cell of a text and its style."""
        cell = super().__new__(cls, text)
        cell.style = style
        return cell


def status(word: str) -> Painted:
    """A cell that is a word of a status, such as `pass`, `damaged` or `at work`, in its color."""
    return Painted(word, style_of(word))


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where a command prints for people, and how.

    Attributes:
        stream: a terminal, a file or a pipe.
        columns: width of the terminal; None to wrap no lines.
        colors: whether words have colors.
        whole: whether ids and times are printed whole.
        now: what relative times are relative to.
    """

    stream: TextIO
    columns: int | None
    colors: bool
    whole: bool
    now: datetime

    @classmethod
    def to(cls, stream: TextIO, *, verbose: bool = False) -> Self:
        """Print to a stream; whole ids and times if `verbose`, or if it is not a terminal."""
        return cls(
            stream=stream,
            columns=columns_of(stream),
            colors=has_colors(stream),
            whole=verbose or not stream.isatty(),
            now=datetime.now(UTC),
        )

    def line(self, text: str = "") -> None:
        """Print a line, which may be `Painted`. A label at its beginning has a color: `damaged: …`, `hint: …`.

        Control characters are escaped, because names from a run's files may have some.
        """
        self._write(self._painted_lines(folded(shown(text), self._prose_columns, indent=2), like=text))

    def message(self, text: str) -> None:
        """Print a message of several lines: a headline, indented details, and `hint:` lines."""
        lines = wrapped_lines(text, columns=self.columns)
        self._write([painted_label(line, colors=self.colors) for line in lines])

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Print lines of a label and a text, aligned. Without a text it is left out; no label continues.

        A terminal gets a label that several lines share once.
        """
        facts = [fact for fact in facts if fact[1]]
        before = ["", *(label for label, _ in facts)]
        again = [self.columns is not None and label == last for (label, _), last in zip(facts, before, strict=False)]
        rows = [
            ("" if known else Painted(label, "dim"), text) for (label, text), known in zip(facts, again, strict=True)
        ]
        self._table(rows, (), self._prose_columns)

    def table(self, rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> None:
        """Print rows with aligned columns. On a terminal, the last column is wrapped.

        Args:
            rows: cells; all rows have as many. A cell may be `Painted`.
            right: the columns that are aligned on their right, such as numbers.
        """
        self._table(rows, right, self.columns)

    def time(self, text: str) -> str:
        """A time of the log: `3 min ago`, or whole."""
        if self.whole:
            return text
        from baton.tasks.foundation.contracts.attempt import utc_time  # contracts take long to import: not for help

        try:
            return ago_words((self.now - utc_time(text)).total_seconds())
        except ValueError:  # informational, so an invalid one is shown as it is
            return text

    def path(self, path: str) -> str:
        """A checkpoint's path or address: its folder with the first characters of the attempt, or whole."""
        return path if self.whole else checkpoint_name(path)

    def id(self, text: str) -> str:
        """A digest or the id of an attempt: its first characters, or whole."""
        return text if self.whole else text[:_ID_CHARACTERS]

    @property
    def _prose_columns(self) -> int | None:
        return None if self.columns is None else min(max(self.columns, _MIN_COLUMNS), _MAX_PROSE_COLUMNS)

    def _table(self, rows: Sequence[Sequence[str]], right: Collection[int], columns: int | None) -> None:
        columns_of_cells = zip(*([_printable(cell) for cell in row] for row in rows), strict=True)
        used = [(place, cells) for place, cells in enumerate(columns_of_cells) if any(cells)]
        if not used:
            return
        *widths, last = (max(map(len, cells)) for _, cells in used)
        to_right = [place in right for place, _ in used]
        rows = list(zip(*(cells for _, cells in used), strict=True))
        before = sum(width + len(_GAP) for width in widths)
        columns = None if columns is None else max(columns, _MIN_COLUMNS)
        room = None if columns is None else columns - before
        if columns is not None and columns - before < min(last, _MIN_LAST_COLUMNS):
            self._write([line for row in rows for line in self._stacked(row, columns)])
            return
        lines: list[str] = []
        for *cells, text in rows:
            start = "".join(
                self._padded(cell, width, is_right) + _GAP
                for cell, width, is_right in zip(cells, widths, to_right, strict=False)
            )
            if to_right[-1] and (room is None or last <= room):
                lines.append((start + self._padded(text, last, is_right=True)).rstrip())
                continue
            if columns is not None and _is_better_below(text, columns - before, columns - len(_BELOW)):
                lines += [start.rstrip(), *self._below(text, columns)]
                continue
            for part in self._painted_lines(folded(text, room), like=text):
                lines.append((start + part).rstrip())
                start = " " * before
        self._write(lines)

    def _stacked(self, row: Sequence[str], columns: int) -> list[str]:
        """A row of a table that is too wide: the cells, and the last one below them."""
        cells, text = [cell for cell in row[:-1] if cell.strip()], row[-1]
        plain = _GAP.join(cells)
        whole = _GAP.join(self._painted(cell, like=cell) for cell in cells)
        lines = [whole] if len(plain) <= columns else folded(plain, columns, indent=2)
        return [*(lines if plain else []), *(self._below(text, columns) if text else [])]

    def _below(self, text: str, columns: int) -> list[str]:
        lines = folded(text, columns - len(_BELOW))
        return [_BELOW + line for line in self._painted_lines(lines, like=text)]

    def _padded(self, cell: str, width: int, is_right: bool) -> str:
        blank, text = " " * (width - len(cell)), self._painted(cell, like=cell)
        return blank + text if is_right else text + blank

    def _painted_lines(self, lines: list[str], *, like: str) -> list[str]:
        """The lines of a wrapped text, in its style, or with the color of its label."""
        if isinstance(like, Painted):
            return [self._painted(line, like=like) for line in lines]
        return [painted_label(lines[0], colors=self.colors), *lines[1:]]

    def _painted(self, text: str, *, like: str) -> str:
        return painted(text, like.style, colors=self.colors) if isinstance(like, Painted) else text

    def _write(self, lines: Sequence[str]) -> None:
        # Line by line: an unbuffered stream (`python -u`) drops what one write of many lines leaves over.
        self.stream.writelines(f"{line}\n" for line in lines)
        self.stream.flush()


def say(text: str = "", *, aside: bool = False) -> None:
    """Print a line for people.

    Args:
        text: the line, see `Output.line`.
        aside: print to stderr, not to stdout.
    """
    Output.to(sys.stderr if aside else sys.stdout).line(text)


def say_json(value: Mapping[str, object]) -> None:
    """Print one line of strict JSON with a `schema_version`; numbers that are not finite become null."""
    facts = {"schema_version": JSON_SCHEMA_VERSION, **value}
    sys.stdout.write(json.dumps(masked_values(_finite(facts)), allow_nan=False) + "\n")
    sys.stdout.flush()


def uri_of(page: Path | None) -> str | None:
    """The address of a page; None without one."""
    return None if page is None else str(page.resolve())


def save_page(page: Path, text: str) -> None:
    """Write a page.

    Raises:
        InvalidInput: it cannot be written there.
    """
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise InvalidInput(f"--html {page} cannot be written ({fault.strerror}); name another file") from fault


def _is_better_below(text: str, beside: int, below: int) -> bool:
    """Whether a text is printed below its row: a word fits only there, or it is a long text in a narrow column."""
    longest = max(map(len, text.split()), default=0)
    return beside < longest <= below or (2 * beside < below and len(folded(text, beside)) > _NARROW_LINES)


def _printable(cell: str) -> str:
    text = shown(cell, _CELL_CHARACTERS)
    return Painted(text, cell.style) if isinstance(cell, Painted) else text


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def commands_to_paste(file: str, overrides: Sequence[str]) -> AbstractContextManager[None]:
    """Put the run file and the overrides of a command into the commands that errors within the block name.

    Args:
        file: the run file, as it was typed.
        overrides: `key=value` each.
    """

    def typed(usage: Usage) -> str:
        if usage.verb != "run":
            return str(usage)
        new = [str(value) for name, value in usage.options if name == "set"]
        others = Usage("", tuple(each for each in usage.options if each[0] != "set"))
        words = f"{command_line('run', file, overrides, *new)} {others}".rstrip()
        return f"{usage.after} && {words}" if usage.after else words

    return errors_worded(typed)


def command_line(verb: str, file: str, overrides: Sequence[str], *more: str | None) -> str:
    """A command that can be pasted into a shell.

    Args:
        verb: of `baton`.
        overrides: `key=value` each.
        more: further ones, which replace those of the same key; None is left out.
    """
    new = [override for override in more if override is not None]
    keys = tuple(override.partition("=")[0] + "=" for override in new)
    kept = [override for override in overrides if not override.startswith(keys)] if keys else overrides
    program = Path(sys.argv[0])  # its path if it is not on the shell's PATH
    name = "baton" if program.name != "baton" or shutil.which("baton") else os.path.relpath(program)
    return shlex.join([name, verb, file, *(word for override in (*kept, *new) for word in ("--set", override))])
