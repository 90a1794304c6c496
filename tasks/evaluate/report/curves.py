"""What the report's charts show: curves by step, the borders of segments, and events on them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Literal, Self

from tasks.foundation.contracts.epochs import recorded_epoch
from tasks.foundation.contracts.log_entry import Change, Entry, Origin, Rewind
from tasks.foundation.runlog.accounting import Account
from tasks.foundation.runlog.history import History, commit_of

_LOGARITHMIC_FROM_RATIO = 50
_MAX_BORDERS = 120  # more lines would cover the curves
_MAX_EVENTS = 200
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
        kind: evaluations are dots, the others lines.
        points: step and value, by step; a value that is not finite interrupts the line.
        group: such as `run0`: curves of one run have one color where several runs are compared.
    """

    label: str
    kind: Literal["training", "validation", "quiet"]
    points: Points
    group: str = ""

    @property
    def color(self) -> str:
        """CSS class of its color."""
        return self.group or self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over the same steps.

    Attributes:
        caption: the name of the metric.
        curves: at least one.
        logarithmic: whether the values are shown so at first.
        from_zero: whether the values begin at 0.
    """

    caption: str
    curves: tuple[Curve, ...]
    logarithmic: bool = False
    from_zero: bool = False

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
    """

    run: str = ""
    training: Points
    validation: Points


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the run at a step."""

    kind: EventKind
    step: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """All charts of a run.

    Attributes:
        charts: in their order on the page.
        borders: steps at which segments end.
        events: by step.
        epochs_per_step: None if the log does not know the length of an epoch.
        segments: of each commit its first and last step, and the seconds since the run began at these.
    """

    charts: tuple[Chart, ...]
    borders: tuple[int, ...]
    events: tuple[Event, ...]
    epochs_per_step: float | None
    segments: tuple[tuple[int, int, float, float], ...]

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
            "epochsPerStep": self.epochs_per_step,
            "segments": self.segments,
        }


def curves_of(history: History, entries: Sequence[Entry], account: Account | None) -> Curves:
    """Collect the curves of a run: loss, the other metrics, speed. No charts if nothing was trained.

    Args:
        history: the curves in the log.
        entries: the log, oldest first.
        account: the attempts; None if they are not recorded.
    """
    length = None if history.head is None else recorded_epoch(history.head.identity)
    borders = tuple(commit_of(entry).checkpoint.step for entry in history.commits)
    return Curves(
        charts=(*_metrics(history), *_learning_rate(history), *_speed(history)) if history.segments else (),
        borders=borders if len(borders) <= _MAX_BORDERS else (),
        events=tuple(sorted(_events(entries, account), key=lambda event: event.step))[-_MAX_EVENTS:],
        epochs_per_step=None if length is None else length.after(1),
        segments=tuple(_segments(history)),
    )


def _metrics(history: History) -> Iterator[Chart]:
    names = dict.fromkeys(
        [
            *(name for row in history.rows for name in row.metrics),
            *(name for evaluation in history.evaluations for name in evaluation.metrics),
        ]
    )
    for name in sorted(names, key=lambda name: name != "loss"):  # the sort is stable: other metrics keep their order
        line = Line(
            training=[(row.step, row.metrics[name]) for row in history.rows if name in row.metrics],
            validation=[
                (each.checkpoint.step, each.metrics[name]) for each in history.evaluations if name in each.metrics
            ],
        )
        yield metric_chart(name, [line])


def metric_chart(name: str, lines: Sequence[Line]) -> Chart:
    """The chart of a metric; a loss whose values are far apart is logarithmic at first."""
    curves: list[Curve] = []
    for place, line in enumerate(lines):
        group = f"run{place}" if line.run else ""
        if line.training:
            curves.append(Curve(label=line.run or "training", kind="training", points=line.training, group=group))
        if line.validation:
            label = f"{line.run}, validation" if line.run else "validation"
            curves.append(Curve(label=label, kind="validation", points=line.validation, group=group))
    chart = Chart(caption=name, curves=tuple(curves))
    finite = chart.finite
    positive = bool(finite) and min(finite) > 0
    wide = positive and name.endswith("loss") and max(finite) / min(finite) > _LOGARITHMIC_FROM_RATIO
    return replace(chart, logarithmic=wide)


def _learning_rate(history: History) -> Iterator[Chart]:
    points = [(row.step, row.learning_rate) for row in history.rows if row.learning_rate is not None]
    if len({rate for _, rate in points}) > 1:  # a constant is no curve
        yield Chart(caption="learning rate", curves=(Curve(label="learning rate", kind="training", points=points),))


def _speed(history: History) -> Iterator[Chart]:
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
            caption="examples per second, by segment; grey: while training",
            curves=(
                Curve(label="while training", kind="quiet", points=training),
                Curve(label="over the whole segment", kind="training", points=overall),
            ),
            from_zero=True,
        )


def _segments(history: History) -> Iterator[tuple[int, int, float, float]]:
    """A commit's seconds end at its time. The time between two commits without a process shows as a gap."""
    began: float | None = None
    start = 0
    for entry in history.commits:
        commit = commit_of(entry)
        end, seconds = _timestamp(entry), sum(commit.seconds.values())
        if began is None:
            began = end - seconds
        yield start, commit.checkpoint.step, round(end - seconds - began, 3), round(end - began, 3)
        start = commit.checkpoint.step


def _timestamp(entry: Entry) -> float:
    try:
        return datetime.fromisoformat(entry.time).timestamp()
    except (ValueError, OverflowError):
        return 0.0


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
