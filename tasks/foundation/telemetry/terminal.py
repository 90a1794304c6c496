"""What a stream can show to people: its width, colors, and one color for each kind of word.

The console of a run and all verbs use it, so that a word has the same color everywhere. The names of the styles are
those of rich.
"""

import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, TextIO

Style = Literal["green", "yellow", "bold red", "cyan", "dim", ""]
GOOD: Final[Style] = "green"
NOTICE: Final[Style] = "yellow"
BAD: Final[Style] = "bold red"
_CODES: Mapping[Style, str] = MappingProxyType(
    {"green": "32", "yellow": "33", "bold red": "1;31", "cyan": "36", "dim": "2"}
)
_STYLES: Mapping[str, Style] = MappingProxyType(
    {
        **dict.fromkeys(("pass", "same", "done", "checkpoint", "finish", "at work", "complete"), GOOD),
        **dict.fromkeys(
            ("warn", "warning", "skipped", "stopped", "rewind", "change", "newer", "incomplete", "ended early"), NOTICE
        ),
        **dict.fromkeys(("error", "fail", "damaged", "hung", "quarantine", "quarantined", "different"), BAD),
        **dict.fromkeys(("hint", "remedy"), "cyan"),
    }
)
_LABEL = re.compile(r"([A-Za-z ]{1,20}):(?= |$)")


def style_of(word: str) -> Style:
    """The style of a status word or a label, such as `pass`, `damaged` or `hint`; empty if it has none."""
    return _STYLES.get(word.strip(), "")


def painted(text: str, style: Style, *, colors: bool) -> str:
    """A text in a style, for a stream with colors; else the text. It must be safe to print already."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if colors and style and text else text


def painted_label(line: str, *, colors: bool) -> str:
    """A line with the color of its label: `error: …`, `hint: …`, `damaged: …`."""
    label = _LABEL.match(line)
    if label is None:
        return line
    return painted(label[0], style_of(label[1]), colors=colors) + line[label.end() :]


def has_colors(stream: TextIO) -> bool:
    """Whether a stream gets colors: a terminal does, unless a variable says otherwise.

    NO_COLOR wins over FORCE_COLOR and CLICOLOR_FORCE; CLICOLOR=0 and TERM=dumb mean none.
    """
    said = os.environ.get
    if said("NO_COLOR"):
        return False
    if said("FORCE_COLOR", "0") not in {"", "0"} or said("CLICOLOR_FORCE", "0") not in {"", "0"}:
        return True
    return stream.isatty() and said("CLICOLOR") != "0" and said("TERM") != "dumb"


def columns_of(stream: TextIO) -> int | None:
    """The width of a terminal; None if the stream is not one, or does not know its width: lines are not wrapped."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # not a terminal, or without a descriptor
        return None
