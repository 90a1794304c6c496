"""The last lines of `baton run`: what was reached, where it is, and how to continue.

A curve as one line of text.
"""

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from flows.opened_run import Run, leaves_time, target_in_run_file, target_of_command
from tasks.foundation.contracts.log_entry import Totals
from tasks.foundation.messages import shown
from tasks.foundation.telemetry.console import Console
from tasks.foundation.telemetry.formatting import checkpoint_name, number_words, step_words

NOTHING_TO_DO = "nothing_to_do"


def print_summary(
    console: Console,
    run: Run,
    *,
    exit_reason: str,
    report_path: str | None,
    report_command: str,
    continue_command: str,
) -> None:
    """Print a table of the run, the addresses of its tip and its report, and the command that continues it.

    Args:
        console: prints it; its progress bar must be stopped.
        run: the run.
        exit_reason: why the command ended; `NOTHING_TO_DO` if the run had already reached its target.
        report_path: address of the report; None if there is none. It is outdated if a stop left no time to write it.
        report_command: the command that writes the report.
        continue_command: the command that continues the training.
    """
    name = run.spec.run
    newest = run.log.newest_seen()
    tip = None if newest is None else newest.head.tip
    finished = None if newest is None else newest.head.finished
    step = 0 if tip is None else tip.step
    totals = None if newest is None else run.log.totals(newest)
    target = None if newest is None else target_of_command(run, newest)
    epoch = None if totals is None or totals.epoch is None else totals.epoch.after(step)
    progress = step_words(step, target, epoch)
    is_short = target is not None and step < target
    console.show("")
    if finished is not None and is_short:
        nothing = "Nothing to do" if exit_reason == NOTHING_TO_DO else "Done"
        console.show(Text(f"{nothing}: {name} ended early, at {progress}.", "bold green"))
    elif exit_reason == NOTHING_TO_DO:
        own = None if newest is None else target_in_run_file(run, newest.head)
        is_further = is_short and own is not None and own <= step
        where = f" up to step {own}: an earlier command aimed further, and" if is_further else ":"
        console.show(Text(f"Nothing to do{where} {name} is at {progress}.", "bold"))
    elif not is_short:
        console.show(Text(f"Done: {name} is at {progress}.", "bold green"))
    else:
        reason = exit_reason.replace("_", " ")
        console.show(Text(f"Stopped ({reason}): {name} is at {progress}.", "bold yellow"))
    if finished is not None and is_short:
        console.show(f"Its callbacks ended it: {finished.reason}. It continues if train.callbacks change.")
        continue_command += " --accept callbacks"
    if totals is not None:
        console.show(_table(totals, step=step, target=target))
    for label, value in (
        *((("home", run.home.uri),) if console.is_terminal else ()),
        ("checkpoint", "none yet" if tip is None else _checkpoint_words(console, f"{run.home.uri}/{tip.path}")),
        ("report", report_path if report_path and leaves_time(exit_reason) else f"not up to date: {report_command}"),
        ("continue", continue_command),
    ):
        console.show(Text.assemble((f"{label:<12}", "dim"), shown(value)))


def _checkpoint_words(console: Console, address: str) -> str:
    return checkpoint_name(address) if console.is_terminal else address


def _table(totals: Totals, *, step: int, target: int | None) -> Table:
    rows = (("training", totals.row), ("validation", totals.evaluation), ("test", totals.test))
    names = list(dict.fromkeys(name for _, row in rows if row is not None for name in row.metrics))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=True)
    for heading in ("", "segments", "step", *map(shown, names)):
        table.add_column(heading, justify="left" if heading == "" else "right")
    reached = f"{step}/{target}" if target is not None and step <= target else str(step)
    table.add_row("run", str(totals.segments), reached, *("" for _ in names))
    for label, row in rows:
        if row is not None:
            values = (number_words(row.metrics[name]) if name in row.metrics else "" for name in names)
            table.add_row(label, "", str(row.step), *values)
    return table


_LEVELS = "▁▂▃▄▅▆▇█"
_LOGARITHMIC_FROM_RATIO = 50


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
