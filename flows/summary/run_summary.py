"""The last lines of `baton run`: what was reached, where it is, and how to continue."""

from rich.table import Table
from rich.text import Text

from flows.result import leaves_time
from flows.run import Run
from tasks.foundation.messages import shown
from tasks.foundation.runlog.history import History
from tasks.foundation.telemetry.console import Console
from tasks.foundation.telemetry.formatting import number_words, step_words

NOTHING_TO_DO = "nothing_to_do"


def print_summary(
    console: Console,
    run: Run,
    history: History,
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
        history: the history in the run's log.
        exit_reason: why the command ended; `NOTHING_TO_DO` if the run had already reached its target.
        report_path: address of the report; None if there is none. It is outdated if a stop left no time to write it.
        report_command: the command that writes the report.
        continue_command: the command that continues the training.
    """
    name = run.spec.run
    tip = None if history.head is None else history.head.tip
    finished = None if history.head is None else history.head.finished
    step = 0 if tip is None else tip.step
    target = run.spec.train.steps
    progress = step_words(step, target)
    console.show("")
    if finished is not None and step < target:
        nothing = "Nothing to do" if exit_reason == NOTHING_TO_DO else "Done"
        console.show(Text(f"{nothing}: {name} ended early, at {progress}.", "bold green"))
    elif exit_reason == NOTHING_TO_DO:
        console.show(Text(f"Nothing to do: {name} is at {progress}.", "bold"))
    elif step >= target:
        console.show(Text(f"Done: {name} is at {progress}.", "bold green"))
    else:
        reason = exit_reason.replace("_", " ")
        console.show(Text(f"Stopped ({reason}): {name} is at {progress}.", "bold yellow"))
    if finished is not None and step < target:
        console.show(f"Its callbacks ended it: {finished.reason}. It continues if train.callbacks change.")
        continue_command += " --accept callbacks"
    console.show(_table(history, step=step, target=target))
    for label, value in (
        ("checkpoint", "none yet" if tip is None else f"{run.home.uri}/{tip.path}"),
        ("report", report_path if report_path and leaves_time(exit_reason) else f"not up to date: {report_command}"),
        ("continue", continue_command),
    ):
        console.show(Text.assemble((f"{label:<12}", "dim"), shown(value)))


def _table(history: History, *, step: int, target: int) -> Table:
    training = history.rows[-1] if history.rows else None
    validation = history.evaluations[-1] if history.evaluations else None
    names = list(dict.fromkeys([*(training.metrics if training else ()), *(validation.metrics if validation else ())]))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=True)
    for heading in ("", "segments", "step", *map(shown, names)):
        table.add_column(heading, justify="left" if heading == "" else "right")
    reached = f"{step}/{target}" if step <= target else str(step)
    table.add_row("run", str(history.segments), reached, *("" for _ in names))
    for label, at_step, metrics in (
        ("training", training.step if training else 0, training.metrics if training else None),
        ("validation", validation.checkpoint.step if validation else 0, validation.metrics if validation else None),
    ):
        if metrics is not None:
            values = (number_words(metrics[name]) if name in metrics else "" for name in names)
            table.add_row(label, "", str(at_step), *values)
    return table
