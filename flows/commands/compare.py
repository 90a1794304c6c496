"""`baton compare`: several runs beside each other, in the terminal or as a page."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import AsJson, Verbose
from flows.commands.output import Output, say_json
from flows.facts import ComparedRun, compared, differing_settings, metric_names
from flows.opened_run import open_run
from tasks.foundation.contracts.identity import readable
from tasks.foundation.contracts.log_entry import Best
from tasks.foundation.errors import InvalidInput
from tasks.foundation.telemetry.formatting import duration_words, metric_words, number_words

_FEWEST, _MOST = 2, 8
_VALUE_CHARACTERS = 60
_CURVE_COLUMNS = 40
_LEVELS = "▁▂▃▄▅▆▇█"
_LOGARITHMIC_FROM_RATIO = 50

Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="two or more run files, or addresses of homes")]
Page = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="write a page with the curves, too")]
Metric = Annotated[str | None, typer.Option("--metric", metavar="NAME", help="only the curves of this metric")]


def compare(
    runs: Runs, *, metric: Metric = None, html: Page = None, verbose: Verbose = False, as_json: AsJson = False
) -> None:
    """Compare the settings, metrics and curves of several runs."""
    if not _FEWEST <= len(runs) <= _MOST:
        raise InvalidInput(f"{len(runs)} runs were given; name {_FEWEST} to {_MOST} of them")
    found = compared([open_run(address) for address in runs])
    names = metric_names(found)
    if metric is not None and metric not in names:
        raise InvalidInput(f"--metric {metric} is in none of the runs; they have: {', '.join(names) or 'none'}")
    names = names if metric is None else [metric]
    settings = differing_settings(found)
    if html is not None:
        _write_page(html, found, settings, names)
    if as_json:
        say_json({"runs": [run.json() for run in found], "settings": settings, "page": _uri(html)})
        return
    out = Output.to(sys.stdout, verbose=verbose)
    _print_runs(out, found)
    _print_settings(out, found, settings)
    _print_curves(out, found, names)
    if html is not None:
        out.line()
        out.line(f"page: {_uri(html)}")


def _print_runs(out: Output, runs: Sequence[ComparedRun]) -> None:
    rows: list[list[str]] = [["", *(run.name for run in runs)]]
    rows.append(["step", *(str(run.step) for run in runs)])
    rows.append(["epoch", *("" if run.epoch is None else f"{run.epoch:.1f}" for run in runs)])
    for label in ("training", "validation", "test"):
        metrics = [getattr(run, label) for run in runs]
        rows += [
            [f"{label} {name}", *(number_words(each[name]) if name in each else "" for each in metrics)]
            for name in dict.fromkeys(name for each in metrics for name in each)
        ]
    rows.append(["best", *(_best_words(run.head.best) for run in runs)])
    rows.append(["committed segments took", *(duration_words(run.seconds) for run in runs)])
    speeds = [run.examples_per_second for run in runs]
    rows.append(["examples/s while training", *("" if speed is None else f"{speed:,.0f}" for speed in speeds)])
    out.table([row for row in rows if any(row[1:])], right=range(1, len(runs) + 1))


def _best_words(best: Best | None) -> str:
    return "" if best is None else f"{best.metric} {number_words(best.value)} at step {best.checkpoint.step}"


def _print_settings(out: Output, runs: Sequence[ComparedRun], settings: dict[str, list[object]]) -> None:
    out.line()
    if not settings:
        out.line("settings, data, code and environment are the same")
        return
    rows = [["differing settings", *(run.name for run in runs)]]
    rows += [[key, *(_value_words(out, value) for value in values)] for key, values in settings.items()]
    out.table(rows)


def _value_words(out: Output, value: object) -> str:
    text = value if isinstance(value, str) else str(readable(value))
    return text if out.whole or len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}…"


def _print_curves(out: Output, runs: Sequence[ComparedRun], names: Sequence[str]) -> None:
    for name in names:
        curves = [(run.name, run.history.training_curve(name)) for run in runs]
        values = [value for _, curve in curves for _, value in curve]
        last = max((step for _, curve in curves for step, _ in curve), default=0)
        if values:
            out.line()
            rows = [
                (run, sparkline(curve, columns=_CURVE_COLUMNS, last=last, values=values), number_words(curve[-1][1]))
                for run, curve in curves
                if curve
            ]
            out.line(f"training {name}, steps 0 to {last}")
            out.table(rows)


def sparkline(curve: Sequence[tuple[int, float]], *, columns: int, last: int, values: Sequence[float]) -> str:
    """Draw a curve with characters of eight heights.

    Args:
        curve: step and value, by step.
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


def _uri(page: Path | None) -> str | None:
    return None if page is None else str(page.resolve())


def _write_page(
    page: Path, runs: Sequence[ComparedRun], settings: dict[str, list[object]], names: Sequence[str]
) -> None:
    from tasks.evaluate.report.charts import Line
    from tasks.evaluate.report.page import comparison_page
    from tasks.evaluate.report.sections import Cell, number

    lines = {
        name: [
            Line(run=name_of, training=history.training_curve(name), validation=history.validation_curve(name))
            for name_of, history in ((run.name, run.history) for run in runs)
        ]
        for name in names
    }
    table = {
        key: [value if isinstance(value, str) else str(readable(value)) for value in values]
        for key, values in settings.items()
    }
    text = comparison_page(
        runs=[run.name for run in runs],
        rows=[
            [
                Cell(run.name, strong=True),
                number(f"{run.step:,}", run.step),
                Cell(metric_words(run.validation)),
                Cell(_best_words(run.head.best)),
            ]
            for run in runs
        ],
        settings=table,
        curves=lines,
    )
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise InvalidInput(f"--html {page} cannot be written ({fault.strerror}); name another file") from fault
