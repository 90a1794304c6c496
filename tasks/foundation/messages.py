"""Messages of several lines: a headline, what it is about in detail, and hints. And long ones, as they are printed."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

HINT: Final = "hint: "
_SHOWN = 8
# More of one line is read by nobody; its end is kept as well as its beginning, since the remedy comes last.
_LINE_CHARACTERS = 1000
# Of a line that is no message: long enough for any command or path.
_SHOWN_CHARACTERS = 4000
_LEAST_COLUMNS, _MOST_COLUMNS = 40, 120
# Never alone on its line, also where a long path follows.
_LABEL = re.compile(r"^(error:|hint:) ")
# Control characters, line separators, what turns the direction of writing, and halves of characters: a terminal obeys
# them, and text from a file is not to command it.
_USER_INFO = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{0,20}://)[^/\s'\"<>]*@")
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_NO_BREAK = "\0"


def message(headline: str, *, details: Sequence[str] = (), hints: Sequence[str] = ()) -> str:
    """The first few details, indented, and the number of the others; then one line for each hint."""
    lines = [headline, *(f"  {detail}" for detail in details[:_SHOWN])]
    if len(details) > _SHOWN:
        lines.append(f"  and {len(details) - _SHOWN} more")
    return "\n".join([*lines, *(f"{HINT}{hint}" for hint in hints)])


def with_place(text: str, place: str) -> str:
    """A message that says where it comes from: at the end of its headline, before details and hints."""
    headline, line_end, rest = text.partition("\n")
    return f"{headline} ({place}){line_end}{rest}"


def listed(items: Sequence[str]) -> str:
    """The first few items, separated by commas, and the number of the others."""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def printed(text: str, *, columns: int | None) -> Iterator[str]:
    """The lines of a message for people: none without end, and none wider than the terminal.

    Args:
        text: the message.
        columns: the terminal's width; None where no terminal is: then lines are not broken.
    """
    for line in text.split("\n"):
        short = shown(line, _LINE_CHARACTERS)
        if columns is None:
            yield short
            continue
        indent = len(short) - len(short.lstrip()) + 2
        broken = textwrap.wrap(
            _LABEL.sub(rf"\1{_NO_BREAK}", short),
            min(max(columns, _LEAST_COLUMNS), _MOST_COLUMNS),
            subsequent_indent=" " * indent,
            break_long_words=False,  # paths and commands are copied
            break_on_hyphens=False,
        )
        yield from (part.replace(_NO_BREAK, " ") for part in broken or [""])


def shown(line: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """One line, fit to be printed whatever it holds: no control characters, no passwords, not without end."""
    return abridged(visible(without_password(line)), characters)


def shown_lines(text: str) -> str:
    """`shown`, line by line: for text that may have several."""
    return "\n".join(map(shown, text.split("\n")))


def without_password(text: str) -> str:
    """Text with `user:password@` cut out of every URL in it, so that it may be printed and logged."""
    return _USER_INFO.sub(r"\1***@", text)


def visible(text: str) -> str:
    r"""Text as one line that a terminal only shows: what it would obey is written as an escape, such as \x1b."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def abridged(line: str, characters: int = _LINE_CHARACTERS) -> str:
    """A line without its middle, if it is too long."""
    if len(line) <= characters:
        return line
    end = characters // 3
    return f"{line[: characters - end]} [...] {line[-end:]}"
