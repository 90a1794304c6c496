"""Pictures of a run's curves, for Prefect's pages.

matplotlib's object interface needs no display and works in any thread.
"""

import io
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.evaluate.report.curves import Points, thinned
from tasks.foundation.contracts.epochs import recorded_epoch
from tasks.foundation.runlog.accounting import GOOD, LOST
from tasks.foundation.runlog.history import History, commit_of
from tasks.foundation.telemetry.formatting import duration_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TRAINING, _VALIDATION, _GREY, _FAINT, _INK = "#2f6690", "#d1603d", "#9aa5b1", "#e3e7ec", "#38424d"
_WIDTH_INCHES, _HEIGHT_INCHES = 5.2, 3.0
_DOTS_PER_INCH = 160
_MAX_MARKERS = 40
_LOGARITHMIC_FROM_RATIO = 50
_MAX_BORDERS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A PNG with the stem of its file name and its caption."""

    name: str
    caption: str
    png: bytes


def import_matplotlib() -> None:
    """Import what `draw` needs, which takes a second. `draw` raises if it is not installed."""
    with suppress(ImportError):
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401


def draw(history: History, seconds: Mapping[str, float]) -> tuple[Plot, ...]:
    """All pictures of a run: loss, the other metrics, speed, time. Empty if nothing was trained.

    Args:
        history: the curves.
        seconds: seconds by cause, in the order of the picture.
    """
    if not history.segments:
        return ()
    for logger in ("matplotlib", "matplotlib.font_manager"):
        logging.getLogger(logger).setLevel(logging.ERROR)  # hides the messages about its font cache
    return (*_curves(history), *_speed(history), *_seconds(seconds))


def _curves(history: History) -> Iterator[Plot]:
    names = dict.fromkeys(
        [
            *(name for row in history.rows for name in row.metrics),
            *(name for evaluation in history.evaluations for name in evaluation.metrics),
        ]
    )
    borders = [commit_of(entry).checkpoint.step for entry in history.commits]
    taken: set[str] = set()
    for name in sorted(names, key=lambda name: name != "loss"):  # the sort is stable: other metrics keep their order
        training = [(row.step, row.metrics[name]) for row in history.rows if name in row.metrics]
        validation = [
            (evaluation.checkpoint.step, evaluation.metrics[name])
            for evaluation in history.evaluations
            if name in evaluation.metrics
        ]
        figure, axes = _figure()
        _borders(axes, borders)
        _lines(axes, name, thinned(training), thinned(validation))
        _epochs(axes, history)
        yield Plot(name=_file_name(name, taken), caption=name, png=_png(figure))


def _lines(axes: "Axes", name: str, training: Points, validation: Points) -> None:
    finite = [value for _, value in (*training, *validation) if math.isfinite(value)]
    if training:
        marker = "." if len(training) <= _MAX_MARKERS else ""
        axes.plot(*_columns(training), color=_TRAINING, linewidth=1.4, marker=marker, markersize=4, label="training")
    if validation:
        axes.plot(*_columns(validation), color=_VALIDATION, linewidth=0, marker="o", markersize=4.5, label="validation")
    if not finite:
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", va="center", color=_GREY)
    elif name.endswith("loss") and min(finite) > 0 and max(finite) / min(finite) > _LOGARITHMIC_FROM_RATIO:
        axes.set_yscale("log")
    axes.set_ylabel(name, parse_math=False)
    axes.set_xlabel("step")
    axes.legend(frameon=False, fontsize=8, loc="best", labelcolor=_INK)


def _epochs(axes: "Axes", history: History) -> None:
    """Add the epochs above the steps, if the log knows the length of an epoch."""
    length = None if history.head is None else recorded_epoch(history.head.identity)
    if length is None:
        return
    per_step = length.after(1)

    def epochs(steps: Any) -> Any:
        return steps * per_step

    def steps(epochs: Any) -> Any:
        return epochs / per_step

    above = axes.secondary_xaxis("top", functions=(epochs, steps))
    above.set_xlabel("epoch")
    above.tick_params(labelsize=8, colors=_INK, length=0)
    above.xaxis.label.set(fontsize=9, color=_INK)
    above.spines["top"].set_visible(False)


def _speed(history: History) -> Iterator[Plot]:
    """Examples per second of each segment: over its whole time, and over its training time only."""
    overall: list[tuple[int, int, float]] = []
    training: list[tuple[int, int, float]] = []
    start = 0
    for commit in map(commit_of, history.commits):
        end = commit.checkpoint.step
        for bars, seconds in ((overall, sum(commit.seconds.values())), (training, commit.seconds.get("train", 0.0))):
            if commit.examples and seconds > 0:
                bars.append((start, end, commit.examples / seconds))
        start = end
    if not overall:
        return
    figure, axes = _figure()
    for bars, color, label in ((training, _GREY, "while training"), (overall, _TRAINING, "over the whole segment")):
        for index, (left, right, rate) in enumerate(bars):
            axes.plot(
                (left, right), (rate, rate), color=color, linewidth=2.2, label=label if index == 0 else None,
                solid_capstyle="butt",
            )  # fmt: skip
    axes.set_ylim(bottom=0, top=1.15 * max(rate for _, _, rate in (*overall, *training)))
    axes.set_ylabel("examples/s")
    axes.set_xlabel("step")
    axes.legend(frameon=False, fontsize=8, loc="lower right", labelcolor=_INK)
    yield Plot(name="speed", caption="examples per second, by segment", png=_png(figure))


def _seconds(amounts: Mapping[str, float]) -> Iterator[Plot]:
    """Seconds by cause; training and lost work have their own colours."""
    if not amounts:
        return
    total = sum(amounts.values())
    figure, axes = _figure(height_inches=max(_HEIGHT_INCHES, 0.3 * len(amounts) + 0.8))
    positions = range(len(amounts))
    colors = [_TRAINING if cause == GOOD else _VALIDATION if cause == LOST else _GREY for cause in amounts]
    axes.barh(positions, list(amounts.values()), color=colors, height=0.62)
    axes.set_yticks(positions, labels=list(amounts), parse_math=False)
    axes.invert_yaxis()
    for position, amount in zip(positions, amounts.values(), strict=True):
        share = f"  {duration_words(amount)}  {amount / total:.0%}" if total > 0 else ""
        axes.text(amount, position, share, va="center", fontsize=8, color=_INK)
    axes.set_xlim(0, max([*amounts.values(), 1e-9]) * 1.45)
    axes.grid(visible=False)
    axes.xaxis.grid(visible=True, color=_FAINT, linewidth=0.7)
    axes.set_xlabel("seconds")
    yield Plot(name="seconds", caption="seconds by cause", png=_png(figure))


def _figure(*, height_inches: float = _HEIGHT_INCHES) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), dpi=_DOTS_PER_INCH, layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.grid(visible=True, axis="y", color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_INK, length=0)
    axes.xaxis.label.set(fontsize=9, color=_INK)
    axes.yaxis.label.set(fontsize=9, color=_INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GREY)
    return figure, axes


def _borders(axes: "Axes", steps: Sequence[int]) -> None:
    if len(steps) <= _MAX_BORDERS:  # more lines would cover the curves
        for step in steps:
            axes.axvline(step, color=_GREY, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0.5)


def _columns(points: Points) -> tuple[list[int], list[float]]:
    # matplotlib skips NaN; infinity would stretch the axis.
    return [step for step, _ in points], [value if math.isfinite(value) else math.nan for _, value in points]


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*missing from font.*")  # names of metrics may be in any script
        figure.savefig(buffer, format="png", metadata={"Software": None})  # the same log gives the same bytes
    return buffer.getvalue()


def _file_name(metric: str, taken: set[str]) -> str:
    """The stem of a file name that every file system accepts; the user's model names the metrics."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", metric).strip("-").lower()[:60] or "metric"
    if stem in {"speed", "seconds"}:
        stem = f"metric-{stem}"
    name, count = stem, 1
    while name in taken:
        count += 1
        name = f"{stem}-{count}"
    taken.add(name)
    return name
