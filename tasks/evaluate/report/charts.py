"""What the report's charts show: curves by step, the borders of segments, and events on them.

Draws charts as SVG: for the report's pages, and as pictures that stand alone on Prefect's pages.

Both have the same marks and the same style. Where scripts run, `curves.js` draws the charts of a page anew, to be
looked into: the same points with the same classes, on scales that follow what the reader looks at.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Final, Literal, Self

from baton.tasks.foundation.contracts.attempt import AttemptRecord, UsageSample, utc_time
from baton.tasks.foundation.contracts.log_entry import Change, Entry, MetricRow, Origin, Rewind
from baton.tasks.foundation.contracts.run_spec import recorded_epoch
from baton.tasks.foundation.log.accounting import GOOD, Account
from baton.tasks.foundation.log.history import History, commit_of, posix_seconds
from baton.tasks.foundation.log.host_history import summed_stats
from baton.tasks.foundation.telemetry.formatting import epoch_words, number_words

_LOGARITHMIC_FROM_RATIO = 50
_MAX_BORDERS = 120  # more lines would cover the curves
_MAX_EVENTS = 200
_COLORS = 8  # of lines that differ in nothing else
_MAX_POINTS = 2000  # more than a screen has columns

Points = Sequence[tuple[int, float]]
EventKind = Literal["kill", "rewind", "change", "fork"]
# What the lines of events mean.
EVENT_WORDS: Final[dict[EventKind, str]] = {
    "kill": "killed or crashed",
    "rewind": "rewind",
    "change": "accepted change",
    "fork": "fork",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Values by step.

    Attributes:
        label: such as `training`.
        kind: validation points are dots joined by a dashed line, partial windows are hollow, the others lines.
        points: step and value, by step; a value that is not finite interrupts the line.
        run: its number where several runs are compared, which then decides the color.
        host: its number where hosts are compared, which then decides the color.
    """

    label: str
    kind: Literal["training", "validation", "quiet", "partial", "before"]
    points: Points
    run: int | None = None
    host: int | None = None

    @property
    def color(self) -> str:
        """CSS class of its color."""
        number = self.run if self.host is None else self.host % _COLORS
        return self.kind if number is None else f"run{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over the same steps.

    Attributes:
        caption: the name of the metric.
        unit: of the values; empty if they have none.
        curves: at least one.
        logarithmic: whether the values are shown so at first.
        from_zero: whether the values begin at 0.
        axis: what the points are over.
    """

    caption: str
    unit: str = ""
    curves: tuple[Curve, ...]
    logarithmic: bool = False
    from_zero: bool = False
    axis: str = "step"

    @property
    def finite(self) -> list[float]:
        """All values that can be drawn."""
        return [value for curve in self.curves for _, value in curve.points if math.isfinite(value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The curves of one metric of one run.

    Attributes:
        run: its name; empty where only one run is shown.
        training: values of the training.
        validation: values of the evaluations.
        partial: the value of a window that is not complete yet; at most one point.
        before: values of the training that the run was forked from.
    """

    run: str = ""
    training: Points
    validation: Points
    partial: Points = ()
    before: Points = ()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the run at a step."""

    kind: EventKind
    step: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Where a step of a run is in epochs and in time.

    Attributes:
        epochs_per_step: None if the log does not know the length of an epoch.
        segments: of each commit its first and last step, and the seconds since the run began at these.
    """

    epochs_per_step: float | None
    segments: tuple[tuple[int, int, float, float], ...]

    @classmethod
    def of(cls, history: History) -> Self:
        """Read it from a run's log."""
        length = None if history.head is None else recorded_epoch(history.head.identity)
        return cls(epochs_per_step=None if length is None else length.after(1), segments=tuple(_segments(history)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """All charts of a page. They share one range of steps.

    Attributes:
        charts: in their order on the page.
        borders: steps at which segments end.
        events: by step.
        clocks: of each run, at least one.
    """

    charts: tuple[Chart, ...]
    borders: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()
    clocks: tuple[Clock, ...]

    @property
    def last(self) -> int:
        """The last step of all charts."""
        return max((curve.points[-1][0] for chart in self.charts for curve in chart.curves if curve.points), default=1)

    def thinned(self, most: int = _MAX_POINTS) -> Self:
        """The same charts with at most `most` points a curve, which look the same."""

        def thin(chart: Chart) -> Chart:
            return replace(
                chart, curves=tuple(replace(curve, points=thinned(curve.points, most)) for curve in chart.curves)
            )

        return replace(self, charts=tuple(map(thin, self.charts)))

    def facts(self) -> dict[str, Any]:
        """What the page's script draws from; numbers that are not finite are None."""
        return {
            "charts": [
                {
                    "caption": chart.caption,
                    "log": chart.logarithmic,
                    "zero": chart.from_zero,
                    "curves": [
                        {
                            "label": curve.label,
                            "kind": curve.kind,
                            "run": curve.run or 0,
                            "color": curve.color,
                            "steps": [step for step, _ in curve.points],
                            "values": [value if math.isfinite(value) else None for _, value in curve.points],
                        }
                        for curve in chart.curves
                    ],
                }
                for chart in self.charts
            ],
            "borders": self.borders,
            "events": [{"kind": event.kind, "step": event.step, "text": event.text} for event in self.events],
            "clocks": [{"epochsPerStep": each.epochs_per_step, "segments": each.segments} for each in self.clocks],
        }


def curves_of(
    history: History, entries: Sequence[Entry], account: Account | None, before: Sequence[MetricRow] = ()
) -> Curves:
    """Collect the curves of a run: loss, the other metrics, throughput, hosts. No charts if nothing was trained.

    Args:
        history: the curves in the log.
        entries: the log, oldest first.
        account: the attempts; None if they are not recorded.
        before: rows of the run that this one was forked from, up to the fork.
    """
    borders = tuple(commit_of(entry).checkpoint.step for entry in history.commits)
    return Curves(
        charts=(*_metrics(history, before), *_learning_rate(history, before), *_throughput(history), *_hosts(history))
        if history.segments
        else (),
        borders=borders if len(borders) <= _MAX_BORDERS else (),
        events=tuple(sorted(_events(entries, account), key=lambda event: event.step))[-_MAX_EVENTS:],
        clocks=(Clock.of(history),),
    )


def _metrics(history: History, before: Sequence[MetricRow]) -> Iterator[Chart]:
    partial = () if history.partial is None else history.partial.metrics
    for name in dict.fromkeys([*history.metric_names, *partial]):
        earlier = [(row.step, row.metrics[name]) for row in before if name in row.metrics]
        yield metric_chart(name, [replace(line_of(history, name), before=earlier)])


def compared_curves(runs: Mapping[str, History], metrics: Sequence[str]) -> Curves:
    """The curves of metrics, those of all runs over each other."""
    charts = [metric_chart(name, [line_of(each, name, run) for run, each in runs.items()]) for name in metrics]
    return Curves(charts=tuple(chart for chart in charts if chart.curves), clocks=tuple(map(Clock.of, runs.values())))


def line_of(history: History, metric: str, run: str = "") -> Line:
    """The curves of one metric of one run, whose name is empty where only one run is shown."""
    partial = history.partial
    return Line(
        run=run,
        training=history.training_curve(metric),
        validation=history.validation_curve(metric),
        partial=() if partial is None or metric not in partial.metrics else [(partial.step, partial.metrics[metric])],
    )


def metric_chart(name: str, lines: Sequence[Line]) -> Chart:
    """The chart of a metric; a loss whose values are far apart is logarithmic at first."""
    curves: list[Curve] = []
    for place, line in enumerate(lines):
        run, whose = (place, f"{line.run}, ") if line.run else (None, "")
        if line.before:
            curves.append(Curve(label="before the fork", kind="before", points=line.before))
        if line.training:
            curves.append(Curve(label=line.run or "training", kind="training", points=line.training, run=run))
        if line.validation:
            curves.append(Curve(label=f"{whose}validation", kind="validation", points=line.validation, run=run))
        if line.partial:
            curves.append(Curve(label=f"{whose}partial window", kind="partial", points=line.partial, run=run))
    chart = Chart(caption=name, curves=tuple(curves))
    finite = chart.finite
    positive = bool(finite) and min(finite) > 0
    wide = positive and name.endswith("loss") and max(finite) / min(finite) > _LOGARITHMIC_FROM_RATIO
    return replace(chart, logarithmic=wide)


def _learning_rate(history: History, before: Sequence[MetricRow]) -> Iterator[Chart]:
    earlier, points = (
        [(row.step, row.learning_rate) for row in rows if row.learning_rate is not None]
        for rows in (before, history.rows)
    )
    if len({rate for _, rate in (*earlier, *points)}) > 1:  # a constant is no curve
        own = Curve(label="learning rate", kind="training", points=points)
        forked = (Curve(label="before the fork", kind="before", points=earlier),) if earlier else ()
        caption = "learning rate of the next step"  # as a row has it, and Keras's TensorBoard callback
        yield Chart(caption=caption, curves=(*forked, own))


def _throughput(history: History) -> Iterator[Chart]:
    """Examples per second of each segment: over its whole time, and over its training time only."""
    overall: list[tuple[int, float]] = []
    training: list[tuple[int, float]] = []
    start = 0
    for commit in map(commit_of, history.commits):
        end = commit.checkpoint.step
        for points, seconds in ((overall, sum(commit.seconds.values())), (training, commit.seconds.get("train", 0.0))):
            if commit.examples and seconds > 0:
                rate = commit.examples / seconds
                points += [(start, rate), (end, rate), (end, math.nan)]
        start = end
    if overall:
        yield Chart(
            caption="throughput of each segment",
            unit="examples per second",
            curves=(
                Curve(label="while it trains", kind="quiet", points=training),
                Curve(label="over all its time", kind="training", points=overall),
            ),
            from_zero=True,
        )


def _hosts(history: History) -> Iterator[Chart]:
    """What is each host's own of a step: it waits for the others the rest of the time. No chart with one host.

    Of many hosts, those that need the most are shown.
    """
    stats = summed_stats(history)
    lines = [
        (
            each.host,
            [(of.step, 1000 * (of.input_wait_seconds + (of.processor_seconds or 0.0))) for of in each.intervals],
        )
        for each in stats
    ]
    if len(lines) < 2 or not all(points for _, points in lines):  # noqa: PLR2004 - nothing to compare
        return
    most = sorted(lines, key=lambda line: -statistics.median(value for _, value in line[1]))[:_COLORS]
    yield Chart(
        caption="each host's own time of a step: input wait and processor time",
        unit="ms",
        curves=tuple(
            Curve(label=f"host {host}", kind="training", points=points, host=host) for host, points in sorted(most)
        ),
        from_zero=True,
    )


def _segments(history: History) -> Iterator[tuple[int, int, float, float]]:
    """A commit's seconds end at its time. The time between two commits without a process shows as a gap."""
    began: float | None = None
    start = 0
    for entry in history.commits:
        commit = commit_of(entry)
        end, seconds = posix_seconds(entry), sum(commit.seconds.values())
        if began is None:
            began = end - seconds
        yield start, commit.checkpoint.step, round(end - seconds - began, 3), round(end - began, 3)
        start = commit.checkpoint.step


def _events(entries: Sequence[Entry], account: Account | None) -> Iterator[Event]:
    for entry in entries:
        step = 0 if entry.head.tip is None else entry.head.tip.step
        match entry.body:
            case Origin(forked_from=lineage) if lineage is not None:
                yield Event("fork", lineage.step, f"forked from step {lineage.step:,} of {lineage.home}")
            case Rewind() as rewind:
                yield Event("rewind", rewind.to.step, f"rewound from step {rewind.blown_up_at:,}: {rewind.reason}")
            case Change(accepted=accepted) if accepted:
                yield Event("change", step, f"accepted {', '.join(accepted)}")
    for attempt in () if account is None else account.attempts:
        if attempt.silent:
            record = attempt.record
            yield Event("kill", max(record.step, record.from_step), f"killed or crashed in {record.doing}")


def usage_pictures(records: Sequence[AttemptRecord]) -> Iterator[tuple[str, str]]:
    """Captions and SVG of what the processes that trained a run used; none if no record has samples.

    Args:
        records: of the run's attempts, by start time.
    """
    trained = [record for record in records if record.seconds.get(GOOD, 0.0) > 0]  # others wait for them
    sampled = [record for record in trained or records if record.usage]
    if not sampled:
        return
    began = utc_time(sampled[0].began)
    starts = [(utc_time(record.began) - began).total_seconds() for record in sampled]
    seconds, word = (1, "seconds") if starts[-1] + sampled[-1].usage[-1].seconds < _IN_SECONDS else (60, "minutes")
    clock = Clock(epochs_per_step=None, segments=())
    for (caption, unit), value in _USED.items():
        points: list[tuple[int, float]] = []
        for record, start in zip(sampled, starts, strict=True):
            points.append((int(start / seconds), value(record.usage[0])))  # a sample is of the time before it
            # A record may be of a clock that was set, or made to do harm.
            ends = [int((start + min(each.seconds, _LONGEST_SECONDS)) / seconds) for each in record.usage]
            points += zip(ends, map(value, record.usage), strict=True)
            points.append((points[-1][0], math.nan))
        curve = Curve(label=caption, kind="training", points=thinned(points, _MAX_PICTURE_POINTS))
        axis = f"{word} since the first start"
        chart = Chart(caption=caption, unit=unit, curves=(curve,), from_zero=True, axis=axis)
        yield _title(chart), svg_of(chart, Curves(charts=(chart,), clocks=(clock,)))


_IN_SECONDS, _LONGEST_SECONDS = 600, 1e9
_USED: Final[dict[tuple[str, str], Callable[[UsageSample], float]]] = {
    ("processors in use", ""): lambda each: each.cpu,
    ("memory in use", "GB"): lambda each: each.memory_bytes / 1e9,
}


def thinned(points: Points, most: int) -> Points:
    """The lowest and the highest point of each of `most` / 2 parts, and the last point: the picture stays the same.

    Args:
        points: step and value, in the order of the steps; returned as they are if they are few.
        most: an even number of points, at least 2.
    """
    if len(points) <= most:
        return points
    parts = most // 2
    kept: list[tuple[int, float]] = []
    for part in range(parts):
        begin, end = part * len(points) // parts, (part + 1) * len(points) // parts
        known = [index for index in range(begin, end) if not math.isnan(points[index][1])] or [begin]
        ends = {min(known, key=lambda index: points[index][1]), max(known, key=lambda index: points[index][1])}
        kept += [points[index] for index in sorted(ends)]
    return kept if kept[-1][0] == points[-1][0] else [*kept, points[-1]]


_WIDTH, _HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 10, 32
_HEADER = 48  # of a picture: its caption and what its marks mean
_TICKS = 5
_FEW_DECADES, _MOST_DECADES = 3, 8
_MAX_DOTS = 40
_SIGNS = {"validation": "•", "partial": "○"}  # of a curve's kind; the others are lines
_MAX_PICTURE_POINTS = 400  # a line has a lowest and a highest point for each three columns of a picture

# CSS of charts and of their keys. One class of an element is its color, another its form, such as `line` or `dots`.
STYLE: Final = """\
:root { color-scheme: light dark; --card: #fff; --ink: #1f2933; --soft: #5b6671; --grid: #e9edf1; }
.training, .partial, .run0 { --color: #2f6690; } .validation, .run1 { --color: #c4532f; }
.fork, .run2 { --color: #1a7f37; }
.rewind, .run3 { --color: #8250df; } .change, .run4 { --color: #7a5b00; } .run5 { --color: #bf3989; }
.run6 { --color: #0a7ea4; } .run7 { --color: #57606a; } .kill { --color: #b3261e; }
.quiet, .before { --color: #8894a0; }
@media (prefers-color-scheme: dark) {
  :root { --card: #1a2128; --ink: #e6ebf0; --soft: #a3afbb; --grid: #27303a; }
  .training, .partial, .run0 { --color: #76b5e8; } .validation, .run1 { --color: #f0936f; }
  .fork, .run2 { --color: #5fd080; }
  .rewind, .run3 { --color: #c4a1ff; } .change, .run4 { --color: #e0b84c; } .run5 { --color: #f29ad0; }
  .quiet, .before { --color: #7d8a97; }
  .run6 { --color: #5cc8e8; } .run7 { --color: #a9b4bf; } .kill { --color: #ff8a80; }
}
svg { font: 11px system-ui, Helvetica, Arial, sans-serif; fill: var(--soft); }
svg path { fill: none; stroke: var(--color); stroke-width: 1.6; stroke-linejoin: round; }
svg .grid { stroke: var(--grid); stroke-width: 1; } svg .border { stroke-width: 1; stroke-dasharray: 1 3; }
svg .event { stroke-dasharray: 5 3; } svg .dots { stroke-width: 6; stroke-linecap: round; }
svg .joined { stroke-dasharray: 4 3; stroke-width: 1.2; } svg .hollow { fill: var(--card); }
.end { text-anchor: end; } .middle { text-anchor: middle; }
svg .card { fill: var(--card); } svg .word { fill: var(--color); }
svg .caption { font-size: 14px; font-weight: 600; fill: var(--ink); }
"""


def svg_of(chart: Chart, curves: Curves) -> str:
    """The chart as an `<svg>` element of a page that has `STYLE`, in a size that the page scales.

    Args:
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
        words = [(curve.color, f"{_SIGNS.get(curve.kind, '—')} {curve.label}") for curve in chart.curves]
        happened = {event.kind for event in curves.events}
        words += [(kind, f"┆ {said}") for kind, said in EVENT_WORDS.items() if kind in happened]
        parts = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} viewBox="0 {-_HEADER} {_WIDTH} {_HEADER + _HEIGHT}">',
            f'<style>{STYLE}</style><rect class="card" y="{-_HEADER}" {box}/>',
            f'<text class="caption" x="14" y="-27">{escape(_title(chart))}</text><text x="4" y="-8">',
            *(f'<tspan class="word {color}" dx="10">{escape(said)}</tspan>' for color, said in words),
            "</text>",
            *_marks(chart, curves),
            "</svg>",
        )
        yield chart.caption, "".join(parts)


def _marks(chart: Chart, curves: Curves) -> Iterator[str]:
    """What a chart shows, below its caption."""
    last = curves.last
    scale = _Scale(chart, last)
    yield from _grid(scale, curves.clocks[0].epochs_per_step if len(curves.clocks) == 1 else None)
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
        self.last, self.axis = max(last, 1), chart.axis

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
            return decades(self.low, self.high)
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


def decades(low: float, high: float) -> list[float]:
    """Powers of ten between two powers, thinned if they are many; of few decades also twice and five times as much."""
    factors = (1, 2, 5) if high - low < _FEW_DECADES else (1,)
    powers = range(math.floor(low), math.floor(high) + 1, math.ceil((high - low) / _MOST_DECADES))
    values = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in values if low - 1e-9 <= math.log10(value) <= high + 1e-9]


def _grid(scale: _Scale, epochs_per_step: float | None) -> Iterator[str]:
    for value in scale.values():
        y, words = scale.y(value), number_words(value)
        words = f"{value:,.0f}" if words.isdigit() else words
        yield f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>'
        yield f'<text class="end" x="{_LEFT - 6}" y="{y + 4}">{words}</text>'
    for step in ticks(0, scale.last):
        yield f'<text class="middle" x="{scale.x(step)}" y="{_HEIGHT - 18}">{step:,.0f}</text>'
    epochs = "" if epochs_per_step is None else f", to {epoch_words(scale.last * epochs_per_step)}"
    yield f'<text class="end" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}">{scale.axis}{epochs}</text>'


def _curve(curve: Curve, scale: _Scale, *, dots: bool) -> Iterator[str]:
    line, points, joined = [], [], False
    for step, value in curve.points:
        drawable = math.isfinite(value) and (value > 0 or not scale.logarithmic)
        if drawable:
            at = f"{scale.x(step)} {scale.y(value)}"
            line.append(f"{'L' if joined else 'M'}{at}")
            points.append(f"M{at}h0")
        joined = drawable
    if curve.kind == "partial":
        circles = (f"{point.removesuffix('h0')}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0" for point in points)
        yield f'<path class="hollow {curve.color}" d="{"".join(circles)}"/>'
        return
    yield f'<path class="{"joined" if curve.kind == "validation" else "line"} {curve.color}" d="{"".join(line)}"/>'
    if curve.kind == "validation" or (dots and len(curve.points) <= _MAX_DOTS):
        yield f'<path class="dots {curve.color}" d="{"".join(points)}"/>'


def _summary(chart: Chart) -> str:
    """The chart in words, for who does not see it."""

    def at(place: int) -> str:
        return f"at step {place}" if chart.axis == "step" else f"{place} {chart.axis}"

    said = []
    for curve in chart.curves:
        known = [(step, value) for step, value in curve.points if math.isfinite(value)]
        if known:
            (first, began), (last, ended) = known[0], known[-1]
            said.append(f"{curve.label}: {number_words(began)} {at(first)}, {number_words(ended)} {at(last)}")
    return f"{_title(chart)}. {'; '.join(said) or 'no finite value'}"


def _title(chart: Chart) -> str:
    return f"{chart.caption}, {chart.unit}" if chart.unit else chart.caption
