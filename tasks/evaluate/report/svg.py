"""Draws charts as SVG: for the report's pages, and as pictures that stand alone on Prefect's pages.

Both have the same marks and the same style. Where scripts run, `curves.js` draws the charts of a page anew, to be
looked into: the same points with the same classes, on scales that follow what the reader looks at.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Final

from tasks.evaluate.report.curves import EVENT_WORDS, Chart, Curve, Curves
from tasks.foundation.telemetry.formatting import epoch_words, number_words

_WIDTH, _HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 10, 32
_HEADER = 48  # of a picture: its caption and what its marks mean
_TICKS = 5
_MAX_DOTS = 40
_MAX_PICTURE_POINTS = 400  # a line has a lowest and a highest point for each three columns of a picture

# CSS of charts and of their keys. One class of an element is its color, another its form, such as `line` or `dots`.
STYLE: Final = """\
:root { color-scheme: light dark; --card: #fff; --ink: #1f2933; --soft: #5b6671; --grid: #e9edf1; }
.training, .run0 { --color: #2f6690; } .validation, .run1 { --color: #c4532f; } .fork, .run2 { --color: #1a7f37; }
.rewind, .run3 { --color: #8250df; } .change, .run4 { --color: #7a5b00; } .run5 { --color: #bf3989; }
.run6 { --color: #0a7ea4; } .run7 { --color: #57606a; } .quiet { --color: #8894a0; } .kill { --color: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --card: #1a2128; --ink: #e6ebf0; --soft: #a3afbb; --grid: #27303a; }
  .training, .run0 { --color: #76b5e8; } .validation, .run1 { --color: #f0936f; } .fork, .run2 { --color: #5fd080; }
  .rewind, .run3 { --color: #c4a1ff; } .change, .run4 { --color: #e0b84c; } .run5 { --color: #f29ad0; }
  .run6 { --color: #5cc8e8; } .run7 { --color: #a9b4bf; } .quiet { --color: #7d8a97; } .kill { --color: #ff8a80; }
}
svg { font: 11px system-ui, Helvetica, Arial, sans-serif; fill: var(--soft); }
svg path { fill: none; stroke: var(--color); stroke-width: 1.6; stroke-linejoin: round; }
svg .grid { stroke: var(--grid); stroke-width: 1; } svg .border { stroke-width: 1; stroke-dasharray: 1 3; }
svg .event { stroke-dasharray: 5 3; } svg .dots { stroke-width: 6; stroke-linecap: round; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
svg .card { fill: var(--card); } svg .word { fill: var(--color); }
svg .caption { font-size: 14px; font-weight: 600; fill: var(--ink); }
"""


def svg_of(chart: Chart, curves: Curves) -> str:
    """The chart as an `<svg>` element of a page that has `STYLE`, in a size that the page scales.

    Args:
        chart: one of the run's.
        curves: all of them, with borders and events.
    """
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(_summary(chart))}">'
    return f"{head}{''.join(_marks(chart, curves))}</svg>"


def pictures_of(curves: Curves) -> Iterator[tuple[str, str]]:
    """Each chart as an SVG file with its caption; the same curves give the same files.

    It follows the color scheme of the page that shows it, and has a background, so that it can be read on any.
    """
    events = tuple(replace(event, text="") for event in curves.events)  # nobody points at what a picture shows
    curves = replace(curves.thinned(_MAX_PICTURE_POINTS), events=events)
    box = f'width="{_WIDTH}" height="{_HEADER + _HEIGHT}"'
    for chart in curves.charts:
        words = [(curve.color, ("• " if curve.kind == "validation" else "— ") + curve.label) for curve in chart.curves]
        happened = {event.kind for event in curves.events}
        words += [(kind, f"┆ {said}") for kind, said in EVENT_WORDS.items() if kind in happened]
        parts = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} viewBox="0 {-_HEADER} {_WIDTH} {_HEADER + _HEIGHT}">',
            f'<style>{STYLE}</style><rect class="card" y="{-_HEADER}" {box}/>',
            f'<text class="caption" x="14" y="-27">{escape(chart.caption)}</text><text x="4" y="-8">',
            *(f'<tspan class="word {color}" dx="10">{escape(said)}</tspan>' for color, said in words),
            "</text>",
            *_marks(chart, curves),
            "</svg>",
        )
        yield chart.caption, "".join(parts)


def _marks(chart: Chart, curves: Curves) -> Iterator[str]:
    """What a chart shows, below its caption."""
    last = max((step for curve in chart.curves for step, _ in curve.points), default=1)
    scale = _Scale(chart, last)
    yield from _grid(scale, curves.epochs_per_step)
    yield from (f'<path class="border quiet" d="{scale.upright(step)}"/>' for step in curves.borders)
    for event in curves.events:
        if event.step <= last:
            line = f'<path class="event {event.kind}" d="{scale.upright(event.step)}">'
            yield f"{line}<title>{escape(event.text)}</title></path>"
    for curve in chart.curves:
        yield from _curve(curve, scale, dots=not chart.from_zero)


class _Scale:
    """Maps steps and values to the picture."""

    def __init__(self, chart: Chart, last: int) -> None:
        finite = chart.finite
        self.logarithmic = chart.logarithmic
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        self.low, self.high = self._map(min(low, 0.0) if chart.from_zero else low), self._map(high)
        if self.high <= self.low:
            self.low, self.high = self.low - 0.5, self.high + 0.5
        self.last = max(last, 1)

    def _map(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def x(self, step: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * step / self.last, 1)

    def y(self, value: float) -> float:
        share = (self._map(value) - self.low) / (self.high - self.low)
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share, 1)

    def upright(self, step: float) -> str:
        """The path of a line from the top to the bottom."""
        return f"M{self.x(step)} {_TOP}V{_HEIGHT - _BOTTOM}"

    def values(self) -> Sequence[float]:
        """Values with a line of the grid."""
        if self.logarithmic and self.high - self.low > 1:
            return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1)]
        low, high = (10**self.low, 10**self.high) if self.logarithmic else (self.low, self.high)
        return ticks(low, high)


def ticks(low: float, high: float, count: int = _TICKS) -> list[float]:
    """About `count` round numbers from `low` to `high`.

    The steps between them are 1, 2 or 5 times a power of ten (Heckbert, Graphics Gems, 1990).
    """
    rough = (high - low) / count
    if not rough > 0 or not math.isfinite(rough):
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(scale: _Scale, epochs_per_step: float | None) -> Iterator[str]:
    for value in scale.values():
        y, words = scale.y(value), number_words(value)
        words = f"{value:,.0f}" if words.isdigit() else words
        yield f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>'
        yield f'<text class="end" x="{_LEFT - 6}" y="{y + 4}">{words}</text>'
    for step in ticks(0, scale.last):
        yield f'<text class="middle" x="{scale.x(step)}" y="{_HEIGHT - 18}">{step:,.0f}</text>'
    epochs = "" if epochs_per_step is None else f", to {epoch_words(scale.last * epochs_per_step)}"
    yield f'<text class="end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}">step{epochs}</text>'


def _curve(curve: Curve, scale: _Scale, *, dots: bool) -> Iterator[str]:
    line, points, joined = [], [], False
    for step, value in curve.points:
        drawable = math.isfinite(value) and (value > 0 or not scale.logarithmic)
        if drawable:
            at = f"{scale.x(step)} {scale.y(value)}"
            line.append(f"{'L' if joined else 'M'}{at}")
            points.append(f"M{at}h0")
        joined = drawable
    if curve.kind != "validation":
        yield f'<path class="line {curve.color}" d="{"".join(line)}"/>'
    if curve.kind == "validation" or (dots and len(curve.points) <= _MAX_DOTS):
        yield f'<path class="dots {curve.color}" d="{"".join(points)}"/>'


def _summary(chart: Chart) -> str:
    """The chart in words, for who does not see it."""
    said = []
    for curve in chart.curves:
        known = [(step, value) for step, value in curve.points if math.isfinite(value)]
        if known:
            (first, began), (last, ended) = known[0], known[-1]
            said.append(f"{curve.label}: {number_words(began)} at step {first}, {number_words(ended)} at step {last}")
    return f"{chart.caption}. {'; '.join(said) or 'no finite value'}"
