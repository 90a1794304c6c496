"""How values look to people: numbers, and what a stream can show, its width and colors.

The console of a run and all verbs use it, so that a word has the same color everywhere. The names of the styles are
those of rich.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Final, Literal, TextIO

_THOUSAND = 1000
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TENTHS_BELOW_SECONDS = 10
_ELEMENT = re.compile(r"(/\d+)+$")
_MOST_ELEMENTS = 10


def metric_words(metrics: Mapping[str, float], *, between: str = "  ", partial: bool = False) -> str:
    """`loss 0.1234  accuracy 0.98`: four significant digits each; of many of one metric, their range.

    `partial`: they are of a window of steps that is not complete, which is said behind them.
    """
    words = []
    for (name, is_element), group in groupby(metrics.items(), key=lambda item: _metric_of(item[0])):
        values = dict(group)
        if is_element and len(values) > _MOST_ELEMENTS:
            finite = sorted(filter(math.isfinite, values.values())) or [math.nan]
            words.append(f"{name}/0..{len(values) - 1} {number_words(finite[0])}..{number_words(finite[-1])}")
        else:
            words += [f"{each} {number_words(value)}" for each, value in values.items()]
    return between.join(words) + (" (partial)" if partial and words else "")


def _metric_of(name: str) -> tuple[str, bool]:
    """The metric that `f1_score/3` or `counts/0/1` is a number of, and whether it is."""
    metric = _ELEMENT.sub("", name)
    return metric, metric != name


def plain_words(values: Mapping[str, object], *, between: str = "  ") -> str:
    """`f1 0.93  ok true  note text`, see `value_words`."""
    return between.join(f"{name} {value_words(value)}" for name, value in values.items())


def value_words(value: object) -> str:
    """A number as those of metrics, a text as it is, anything else as JSON."""
    return number_words(value) if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def number_words(value: float) -> str:
    """Four significant digits; whole numbers without a decimal point."""
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else f"{value:.4g}"  # noqa: PLR2004 - larger floats are not exact


def step_words(step: int, target: int | None, epoch: float | None = None) -> str:
    """`step 200 of 400, epoch 1.3`; `step 800, beyond the target of 400` if an earlier command trained further."""
    words = f"step {step}"
    if target is not None:
        words += f" of {target}" if step <= target else f", beyond the target of {target}"
    return words if epoch is None else f"{words}, {epoch_words(epoch)}"


def epoch_words(epoch: float) -> str:
    """`epoch 159.1`: the epochs that are done, rounded down, so that an epoch that is not done never looks so."""
    return f"epoch {math.floor(epoch * 10) / 10:.1f}"


def size_words(size: float) -> str:
    """Bytes in decimal units, as in a store's bill: `1.2 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < _THOUSAND:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= _THOUSAND
    return f"{size:.1f} TB"


def duration_words(seconds: float) -> str:
    """`0.4 s`, `42 s`, `3 min 05 s`, `2 h 07 min`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < _TENTHS_BELOW_SECONDS:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    minutes = round(seconds / _MINUTE)
    return f"{minutes // _MINUTE} h {minutes % _MINUTE:02d} min"


def ago_words(seconds: float) -> str:
    """`12 s ago`, `3 min ago`, `5 h ago`, `12 days ago`: rounded down; 0 if a clock is ahead."""
    whole = max(int(seconds), 0)
    if whole < _MINUTE:
        return f"{whole} s ago"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min ago"
    if whole < 2 * _DAY:
        return f"{whole // _HOUR} h ago"
    return f"{whole // _DAY} days ago"


def checkpoint_name(path: str) -> str:
    """The name of a checkpoint's folder with the first eight characters of its attempt, from its path or address."""
    return short_path(path.rpartition("checkpoints/")[2])


def short_path(path: str) -> str:
    """A checkpoint's path with the first eight characters of its attempt."""
    name, _, attempt = path.rpartition("-")
    return f"{name}-{attempt[:8]}" if name else path


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
        **dict.fromkeys(("error", "fail", "failed", "damaged", "hung", "quarantine", "quarantined", "different"), BAD),
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
