"""How `baton run` ends: what was reached, where it is, and how to go on."""

from rich.table import Table
from rich.text import Text

from flows.goal import leaves_time
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.messages import shown
from tasks.foundation.runlog.history import History
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.console import Console
from tasks.foundation.telemetry.formatting import number_words, step_words

NOTHING_TO_DO = "nothing_to_do"


def print_closing(
    console: Console,
    *,
    home: Storage,
    history: History,
    spec: RunSpec,
    exit_reason: str,
    report_path: str | None,
    report_command: str,
    continue_command: str,
) -> None:
    """A table of the run as it stands, and the addresses to go on with.

    Args:
        console: where to; its bar should be stopped by now.
        home: the run's home.
        history: the whole log.
        spec: the run file.
        exit_reason: why the command ended; `NOTHING_TO_DO` if it found the run at its target.
        report_path: address of the report, if there is one; after a stop that leaves no time it is from before.
        report_command: what to type to write it.
        continue_command: what to type to train on.
    """
    tip = None if history.head is None else history.head.tip
    finished = None if history.head is None else history.head.finished
    step = 0 if tip is None else tip.step
    target = spec.train.steps
    where = step_words(step, target)
    console.show("")
    if finished is not None and step < target:
        nothing = "Nothing to do" if exit_reason == NOTHING_TO_DO else "Done"
        console.show(Text(f"{nothing}: {spec.run} ended early, at {where}.", "bold green"))
    elif exit_reason == NOTHING_TO_DO:
        console.show(Text(f"Nothing to do: {spec.run} is at {where}.", "bold"))
    elif step >= target:
        console.show(Text(f"Done: {spec.run} is at {where}.", "bold green"))
    else:
        why = exit_reason.replace("_", " ")
        console.show(Text(f"Stopped ({why}): {spec.run} is at {where}.", "bold yellow"))
    if finished is not None and step < target:
        console.show(f"Its callbacks ended it: {finished.reason}. It goes on once train.callbacks are others.")
        continue_command += " --accept callbacks"
    console.show(_table(history, step=step, target=target))
    for label, value in (
        ("checkpoint", "none yet" if tip is None else f"{home.uri}/{tip.path}"),
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
