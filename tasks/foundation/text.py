"""Text for people: messages with a headline, details and hints, lists, counts, and lines that fit a terminal.

What a message says of an option or a command is a value in it, `Usage`, which each face of Baton words for itself. What
comes from outside is shown without secrets (`masking.py`) and without control characters.
"""

import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Self

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


Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Usage:
    """A command, or options, that a message names.

    Attributes:
        verb: the command; "" for options to add to a command, None for options in a sentence.
        options: names and values: True for a switch, None for a name without its value. A name "" is for a key of the
            run file, where it was given as an override.
        after: a command to execute before it.
    """

    verb: str | None
    options: tuple[tuple[str, Value], ...]
    after: str = ""

    def __str__(self) -> str:
        quoted = str if self.verb is None else shlex.quote
        words = [f"{self.after}, then"] if self.after else []
        words += [f"baton {self.verb} FILE"] if self.verb else []
        for name, value in self.options:
            words += [f"--{name}"] if name else []
            if value is not None and value is not True:
                words.append(quoted(f"{value:g}" if isinstance(value, float) else str(value)))
        return " ".join(words)


class Words(str):
    """Text that keeps each `Usage` in it as a value; as a `str`, it is in the words of the command line.

    `+`, `message` and `joined` keep the values; an f-string does not.
    """

    parts: tuple[str | Usage, ...]
    __slots__ = ("parts",)

    def __new__(cls, *parts: str | Usage) -> Self:
        """Make a text of its parts."""
        words = super().__new__(cls, "".join(map(str, parts)))
        rows = groupby(parts, key=lambda part: isinstance(part, str))
        words.parts = tuple(part for is_text, row in rows for part in (["".join(map(str, row))] if is_text else row))
        return words

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> "Words":
        return Words(*self.parts, *parts_of(other))

    def __radd__(self, other: str) -> "Words":
        return Words(*parts_of(other), *self.parts)

    def partition(self, sep: str) -> tuple[str, str, str]:
        """Split at the first separator in the text between values."""
        for at, part in enumerate(self.parts):
            if isinstance(part, str) and sep in part:
                before, _, after = part.partition(sep)
                return Words(*self.parts[:at], before), sep, Words(after, *self.parts[at + 1 :])
        return self, "", ""


def parts_of(text: str) -> tuple[str | Usage, ...]:
    """The parts of `Words`; other text is one part."""
    return text.parts if isinstance(text, Words) else (text,)


def worded(text: str, face: Callable[[Usage], str]) -> str:
    """The text as a face of Baton words it."""
    return "".join(part if isinstance(part, str) else face(part) for part in parts_of(text))


def joined(separator: str, texts: Sequence[str]) -> str:
    """`separator.join(texts)`, with their values."""
    return Words(*[part for text in texts for part in (separator, *parts_of(text))][1:])


def option(name: str, value: Value = None) -> Words:
    """An option in a sentence, such as `--accept optimizer`; see `Usage`."""
    return Words(Usage(None, ((name, value),)))


def command(verb: str, *options: tuple[str, Value], after: str = "") -> Words:
    """A command with its options, to be pasted, such as `baton run FILE --accept optimizer`; see `Usage`."""
    return Words(Usage(verb, options, after))


def message(headline: str, *, details: Sequence[str] = (), hints: Sequence[str] = ()) -> str:
    """A headline, the first few details with the number of the others, and one line per hint."""
    lines = [headline, *(f"  {detail}" for detail in details[:_SHOWN])]
    if len(details) > _SHOWN:
        lines.append(f"  and {len(details) - _SHOWN} more")
    return joined("\n", [*lines, *(HINT + hint for hint in hints)])


def with_place(text: str, place: str) -> str:
    """A message with `(place)` at the end of its headline."""
    headline, line_end, rest = text.partition("\n")
    if headline.endswith(":"):
        return f"{headline[:-1]} ({place}):" + line_end + rest
    return headline + f" ({place})" + line_end + rest


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
