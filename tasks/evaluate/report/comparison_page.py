"""The page of a comparison: the curves of several runs over each other, and where the runs differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.evaluate.report.charts import Curves, Line, metric_chart
from tasks.evaluate.report.page import Key, html_page
from tasks.evaluate.report.sections import Cell, Section, Table, number
from tasks.foundation.telemetry.formatting import metric_words


@dataclass(frozen=True, slots=True, kw_only=True)
class RunColumn:
    """What the page says of one run."""

    name: str
    step: int
    validation: Mapping[str, float]
    best: str


def comparison_page(
    *,
    runs: Sequence[RunColumn],
    settings: Mapping[str, Sequence[str]],
    curves: Mapping[str, Sequence[Line]],
) -> str:
    """The page as HTML.

    Args:
        runs: at least two.
        settings: where the runs differ: by key, the value of each run.
        curves: by metric, the curves of each run, in the order of the runs.
    """
    charts = [metric_chart(name, lines) for name, lines in curves.items()]
    rows = [
        [
            Cell(run.name, strong=True),
            number(f"{run.step:,}", run.step),
            Cell(metric_words(run.validation)),
            Cell(run.best),
        ]
        for run in runs
    ]
    sections = [
        Section(
            heading="Runs",
            table=Table(headings=("run", "step", "validation", "best"), rows=rows, numbers=frozenset({1})),
        )
    ]
    if settings:
        different = [[Cell(key), *(Cell(value, "wrap code") for value in values)] for key, values in settings.items()]
        sections.append(
            Section(
                heading="Differing settings",
                table=Table(headings=("setting", *(run.name for run in runs)), rows=different),
            )
        )
    else:
        sections.append(Section(heading="Differing settings", note="None: data, code and environment are the same."))
    return html_page(
        title=" / ".join(run.name for run in runs),
        address=f"{len(runs)} runs",
        introduction=["Lines are the training, dots the validation set."],
        tiles=[],
        curves=Curves(
            charts=tuple(chart for chart in charts if chart.curves),
            borders=(),
            events=(),
            epochs_per_step=None,
            segments=(),
        ),
        keys=[Key(f"run{place}", run.name) for place, run in enumerate(runs)],
        sections=sections,
    )
