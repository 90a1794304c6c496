"""Draws a chart as SVG. Where scripts run, `curves.js` draws the same anew, to be looked into."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from tasks.evaluate.report.curves import Chart, Curve, Curves
from tasks.foundation.telemetry.formatting import number_words

_WIDTH, _HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 10, 32
_TICKS = 5
_MAX_DOTS = 40


def svg_of(chart: Chart, curves: Curves) -> str:
    """The chart as an `<svg>` element, in a size that a page scales.

    Args:
        chart: one of the run's.
        curves: all of them, with borders and events.
    """
    last = max((step for curve in chart.curves for step, _ in curve.points), default=1)
    scale = _Scale(chart, last)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(_summary(chart))}">',
        *_grid(scale),
        *(f'<path class="border" d="M{scale.x(step)} {_TOP}V{_HEIGHT - _BOTTOM}"/>' for step in curves.borders),
        *(_event(event.kind, scale.x(event.step), event.text) for event in curves.events if event.step <= last),
        *(part for curve in chart.curves for part in _curve(curve, scale, dots=not chart.from_zero)),
        "</svg>",
    ]
    return "".join(parts)


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


def _grid(scale: _Scale) -> Iterator[str]:
    for value in scale.values():
        y = scale.y(value)
        yield f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>'
        yield f'<text class="tick end" x="{_LEFT - 6}" y="{y + 4}">{escape(number_words(value))}</text>'
    for step in ticks(0, scale.last):
        yield f'<text class="tick middle" x="{scale.x(step)}" y="{_HEIGHT - 12}">{step:,.0f}</text>'
    yield f'<text class="tick end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 1}">step</text>'


def _event(kind: str, x: float, text: str) -> str:
    return f'<path class="event {kind}" d="M{x} {_TOP}V{_HEIGHT - _BOTTOM}"><title>{escape(text)}</title></path>'


def _curve(curve: Curve, scale: _Scale, *, dots: bool) -> Iterator[str]:
    path, joined = [], False
    kind = f"{curve.kind} {curve.group}".rstrip()
    for step, value in curve.points:
        drawable = math.isfinite(value) and (value > 0 or not scale.logarithmic)
        if drawable:
            path.append(f"{'L' if joined else 'M'}{scale.x(step)} {scale.y(value)}")
        joined = drawable
    if curve.kind != "validation":
        yield f'<path class="curve {kind}" d="{"".join(path)}"/>'
    if curve.kind == "validation" or (dots and len(curve.points) <= _MAX_DOTS):
        for step, value in curve.points:
            if math.isfinite(value) and (value > 0 or not scale.logarithmic):
                yield f'<circle class="{kind}" cx="{scale.x(step)}" cy="{scale.y(value)}" r="3"/>'


def _summary(chart: Chart) -> str:
    """The chart in words, for who does not see it."""
    said = []
    for curve in chart.curves:
        known = [(step, value) for step, value in curve.points if math.isfinite(value)]
        if known:
            (first, began), (last, ended) = known[0], known[-1]
            said.append(f"{curve.label}: {number_words(began)} at step {first}, {number_words(ended)} at step {last}")
    return f"{chart.caption}. {'; '.join(said) or 'no finite value'}"
