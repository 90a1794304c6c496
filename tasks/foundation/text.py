"""Text for people: messages with a headline, details and hints, lists, counts, and lines that fit a terminal.

What comes from outside is shown without secrets (`masking.py`) and without control characters.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from baton.tasks.foundation.masking import masked

HINT: Final = "hint: "
_SHOWN = 8
# Longer lines lose their middle, because the remedy comes last.
_LINE_CHARACTERS = 1000
# The limit for other text; long enough for any command or path.
_SHOWN_CHARACTERS = 4000
_MIN_COLUMNS, _MAX_COLUMNS = 40, 120
# Stays on one line with the first word after it, even if that is a long path.
_LABEL = re.compile(r"^([A-Za-z]{1,12}:) ")
# Control characters, line separators, direction marks and surrogates: text from a file must not control the terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_NO_BREAK = "\0"
# Stays on one line with the number before it.
_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|days?|bytes|[kMGT]B|[KMGT]iB|[a-z]{1,12}/s)\b)")


def message(headline: str, *, details: Sequence[str] = (), hints: Sequence[str] = ()) -> str:
    """A headline, the first few details with the number of the others, and one line per hint."""
    lines = [headline, *(f"  {detail}" for detail in details[:_SHOWN])]
    if len(details) > _SHOWN:
        lines.append(f"  and {len(details) - _SHOWN} more")
    return "\n".join([*lines, *(f"{HINT}{hint}" for hint in hints)])


def with_place(text: str, place: str) -> str:
    """A message with `(place)` at the end of its headline."""
    headline, line_end, rest = text.partition("\n")
    if headline.endswith(":"):
        return f"{headline[:-1]} ({place}):{line_end}{rest}"
    return f"{headline} ({place}){line_end}{rest}"


def listed(items: Sequence[str]) -> str:
    """The first few items, separated by commas, and the number of the others."""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def time_words(time: str) -> str:
    """`2026-01-31 12:00:00`, from ISO 8601 in UTC."""
    return time[:19].replace("T", " ")


def counted(number: int, noun: str, plural: str | None = None, *, thousands: str = "") -> str:
    """`1 step`, `2 steps`; `2 entries` with its own plural; `2,000 steps` with a comma between thousands."""
    return f"{number:{thousands}} {noun if number == 1 else plural or f'{noun}s'}"


def wrapped_lines(text: str, *, columns: int | None) -> Iterator[str]:
    """The lines of a message, shortened and wrapped for the terminal.

    Args:
        columns: width of the terminal; None to wrap no lines, as for a pipe.
    """
    for line in text.split("\n"):
        short = shown(line, _LINE_CHARACTERS)
        if columns is None:
            yield short
            continue
        indent = len(short) - len(short.lstrip()) + 2
        wrapped = textwrap.wrap(
            _kept_together(short),
            min(max(columns, _MIN_COLUMNS), _MAX_COLUMNS),
            subsequent_indent=" " * indent,
            break_long_words=False,  # people copy paths and commands
            break_on_hyphens=False,
        )
        yield from (part.replace(_NO_BREAK, " ") for part in wrapped or [""])


def folded(text: str, columns: int | None, *, indent: int = 0) -> list[str]:
    """One line as lines of at most `columns` characters, broken at spaces.

    Longer words stay whole, because people copy paths and commands. What two spaces
    separate, as in `loss 0.12  accuracy 0.97`, is broken there, and elsewhere only if it must.

    Args:
        columns: the width; None for one line.
        indent: spaces before all lines but the first.
    """
    if columns is None:
        return [text]
    parts = _kept_together(text).split("  ")
    kept = (part.replace(" ", _NO_BREAK) if part.strip() and len(part) <= columns - indent else part for part in parts)
    lines = textwrap.wrap(
        "  ".join(kept), columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ") for line in lines] or [""]


def _kept_together(line: str) -> str:
    """The line with no break after its label, and none between a number and its unit."""
    return _UNIT.sub(_NO_BREAK, _LABEL.sub(rf"\1{_NO_BREAK}", line))


def shown(line: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """One line that is safe to print: without control characters and secrets, and not too long."""
    return abridged(visible(masked(line)), characters)


def shown_lines(text: str) -> str:
    """`shown` for every line of a text."""
    return "\n".join(map(shown, masked(text).split("\n")))


def visible(text: str) -> str:
    r"""Text as one line, with escapes such as \x1b for control characters."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def abridged(line: str, characters: int = _LINE_CHARACTERS) -> str:
    """A line, without its middle if it is too long."""
    if len(line) <= characters:
        return line
    end = characters // 3
    return f"{line[: characters - end]} [...] {line[-end:]}"
