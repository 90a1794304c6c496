"""`baton compare`: several runs beside each other, in the terminal or as a page."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from baton.flows.commands.options import AsJson
from baton.flows.commands.output import Output, Painted, save_page, say_json, uri_of
from baton.flows.comparison import CodeDiff, ComparedRun, Comparison, value_text
from baton.flows.opened_run import open_run
from baton.tasks.evaluate.report.sections import cut
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.telemetry.formatting import Style, number_words
from baton.tasks.foundation.text import counted

_FEWEST, _MOST = 2, 8
_WHOLE_CHARACTERS, _FEWEST_CHARACTERS, _GAP = 1000, 12, 3
_DIFF_LINES = 40
_DIFF_STYLES: Final[dict[str, Style]] = {"+": "green", "-": "bold red", "@": "dim"}
_CURVE_COLUMNS = 40
_LEVELS = "▁▂▃▄▅▆▇█"
_LOGARITHMIC_FROM_RATIO = 50

Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="two or more run files, or addresses of homes")]
Page = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="write a page with the curves, too")]
All = Annotated[
    bool, typer.Option("--verbose", "-v", help="print equal values and all lines, too, and settings as recorded")
]
Metric = Annotated[str | None, typer.Option("--metric", metavar="NAME", help="only the curves of this metric")]


def compare(
    runs: Runs, *, metric: Metric = None, html: Page = None, verbose: All = False, as_json: AsJson = False
) -> None:
    """Compare the settings, metrics and curves of several runs."""
    if not _FEWEST <= len(runs) <= _MOST:
        raise InvalidInput(f"{counted(len(runs), 'run')} given; name {_FEWEST} to {_MOST} of them")
    found = Comparison.of([open_run(address) for address in runs])
    names = found.metric_names
    if metric is not None and metric not in names:
        raise InvalidInput(f"--metric {metric} is in none of the runs; they have: {', '.join(names) or 'none'}")
    names = names if metric is None else [metric]
    if html is not None:
        _write_page(html, found, names)
    if as_json:
        say_json({**found.json(), "page": uri_of(html)})
        return
    out = Output.to(sys.stdout, verbose=verbose)
    values = found.values_table
    out.table(values.texts, right=values.numbers)
    _print_changes(out, found, verbose=verbose)
    _print_curves(out, found.runs, names)
    if html is not None:
        out.line()
        out.line(f"page: {uri_of(html)}")


def _print_changes(out: Output, found: Comparison, *, verbose: bool) -> None:
    names = [run.name for run in found.runs]
    out.line()
    if found.changed:
        room = _characters(out, [*found.changed], len(names))
        out.table([[key, *(cut(value, room) for value in values)] for key, *values in found.changes_table.texts])
    else:
        out.line("settings, data, code and environment are the same")
    for each in found.code:
        _print_diff(out, each, whole=verbose)
    out.line()
    if not verbose:
        out.line(f"{counted(len(found.equal), 'equal value')}: --verbose prints them")
        return
    if found.settings:
        out.table([["as recorded", *names], *([key, *map(value_text, each)] for key, each in found.settings.items())])
        out.line()
    out.table([["equal values", ""], *([key, value_text(value)] for key, value in found.equal.items())])


def _print_diff(out: Output, code: CodeDiff, *, whole: bool) -> None:
    lines = code.diff.splitlines()
    out.line()
    out.line(f"{code.file} of {code.run}")
    for line in lines if whole else lines[:_DIFF_LINES]:
        out.line(Painted(f"  {line}", _DIFF_STYLES.get(line[:1], "")))
    if not whole and len(lines) > _DIFF_LINES:
        out.line(f"  and {counted(len(lines) - _DIFF_LINES, 'more line')}: --verbose prints them")


def _characters(out: Output, labels: Sequence[str], values: int) -> int:
    """How many characters of a value fit beside the others."""
    if out.columns is None or out.whole:
        return _WHOLE_CHARACTERS
    return max((out.columns - max(map(len, labels))) // values - _GAP, _FEWEST_CHARACTERS)


def _print_curves(out: Output, runs: Sequence[ComparedRun], names: Sequence[str]) -> None:
    for name in names:
        # A row is about the steps before it.
        curves = [(run.name, [(step - 1, value) for step, value in run.history.training_curve(name)]) for run in runs]
        values = [value for _, curve in curves for _, value in curve]
        last = max((step + 1 for _, curve in curves for step, _ in curve), default=0)
        if values:
            out.line()
            columns = min(_CURVE_COLUMNS, max(len(curve) for _, curve in curves))
            rows = [
                (run, sparkline(curve, columns=columns, last=last, values=values), number_words(curve[-1][1]))
                for run, curve in curves
                if curve
            ]
            out.line(f"training {name}, steps 0 to {last}")
            out.table(rows)


def sparkline(curve: Sequence[tuple[int, float]], *, columns: int, last: int, values: Sequence[float]) -> str:
    """Draw a curve with characters of eight heights.

    Args:
        columns: characters for the steps from 0 to `last`.
        last: the last step of all curves that are compared.
        values: all their values, which decide the heights. They are logarithmic if they are positive and far apart.

    Returns:
        A text of at most `columns` characters; a blank where the curve has no finite value.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or last < 1:
        return ""
    low, high = min(finite), max(finite)
    logarithmic = low > 0 and high / low > _LOGARITHMIC_FROM_RATIO

    def height(value: float) -> float:
        if logarithmic:
            return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
        return (value - low) / (high - low) if high > low else 0.5

    means: dict[int, list[float]] = {}
    for step, value in curve:
        if math.isfinite(value):
            means.setdefault(min(step * columns // last, columns - 1), []).append(value)
    drawn = (
        _LEVELS[min(int(height(sum(found) / len(found)) * len(_LEVELS)), len(_LEVELS) - 1)] if found else " "
        for found in (means.get(column, []) for column in range(columns))
    )
    return "".join(drawn).rstrip()


def _write_page(page: Path, found: Comparison, names: Sequence[str]) -> None:
    from baton.tasks.evaluate.report.page import comparison_page
    from baton.tasks.evaluate.report.sections import Section

    runs = found.runs
    recorded = [f"{key}: {' | '.join(map(value_text, values))}" for key, values in found.settings.items()]
    equal = [f"{key}: {value_text(value)}" for key, value in found.equal.items()]
    differing = Section(
        heading="What differs",
        table=found.changes_table if found.changed else None,
        note="" if found.changed else "Nothing: data, code and environment are the same.",
        texts=(
            *((f"{each.file} of {each.run}, compared with {runs[0].name}", each.diff) for each in found.code),
            *([(f"{counted(len(recorded), 'differing value')} as recorded", "\n".join(recorded))] if recorded else []),
            (counted(len(equal), "equal value"), "\n".join(equal)),
        ),
        unfolded=len(found.code) if sum(each.diff.count("\n") for each in found.code) < _DIFF_LINES else 0,
    )
    text = comparison_page(
        title=" / ".join(run.name for run in runs),
        address=f"{len(runs)} runs",
        runs={run.name: run.history for run in runs},
        metrics=names,
        lead=[Section(heading="Runs", table=found.values_table)],
        sections=[differing],
    )
    save_page(page, text)
