"""`baton run`: trains a run file to its target, through Prefect."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from baton.flows.admit import require_lasting_storage
from baton.flows.commands.options import RUN_FILE, AsJson, Overrides, RunFilePath
from baton.flows.commands.output import command_line, commands_to_paste, say_json
from baton.flows.facts import RunFacts
from baton.flows.host_checks import refusals_told
from baton.flows.opened_run import OpenedRun
from baton.flows.process import has_temporary_home, stop_reason
from baton.flows.result import Goal, RelayResult, leaves_time, override_to_continue, report_end
from baton.flows.supervisor import Trainer, trainer_words
from baton.flows.with_prefect.server import set_quiet_defaults
from baton.tasks.foundation.contracts.identity import accepted_keys
from baton.tasks.foundation.contracts.log_entry import Entry, Totals
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.machine.cluster import is_chief
from baton.tasks.foundation.machine.stops import RESUMABLE, STOP_SIGNALS, Terminated
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.telemetry.console import Console
from baton.tasks.foundation.telemetry.events import Begun, Ended, Event, Note, Several, Sink, warnings_as_notes
from baton.tasks.foundation.telemetry.formatting import checkpoint_name, number_words, step_words
from baton.tasks.foundation.text import message, shown

_UNEXPECTED = "this is unexpected; set BATON_DEBUG=1 for the traceback"
_TEMPORARY_RECORDS = (
    "HOME is not set and this user id has no home folder, so Prefect's records of this run go to a temporary one and "
    "are deleted at the end; set PREFECT_HOME (or HOME) to a writable folder to keep them"
)


def run(
    file: RunFilePath = Path(RUN_FILE),
    overrides: Overrides = None,
    *,
    until_step: Annotated[int | None, typer.Option(help="go to this step, counted from initialization")] = None,
    max_segments: Annotated[int | None, typer.Option(help="stop after this many segments")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="stop after this many seconds, with a last commit")] = None,
    accept: Annotated[
        str, typer.Option(metavar="KEYS", help="accept changes of these identity keys, as optimizer,data")
    ] = "",
    try_again: Annotated[
        bool, typer.Option("--try-again", help="after a repair: forget the attempts without progress")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="start even if another process trains the run; one of them loses")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Train a run file to its target, or continue it."""
    with refusals_told(file, overrides or [], note=partial(typer.echo, err=True)):
        run_file = load_run_file(file, overrides or [])
        # The trainer makes the goal; here it is refused before anything starts.
        Goal.of(run_file.spec, until_step=until_step, max_segments=max_segments, max_seconds=max_seconds)
        accepted = accepted_keys(accept)
        opened = OpenedRun.open(run_file)
        require_lasting_storage(opened)
    with (
        commands_to_paste(os.fspath(file), overrides or []),
        Console(sys.stderr if as_json else sys.stdout) as console,
        warnings_as_notes(console),
    ):
        words = trainer_words(
            run_file.path,
            overrides or [],
            until_step=until_step,
            max_segments=max_segments,
            max_seconds=max_seconds,
            accept=accepted,
            try_again=try_again,
            take_over=take_over,
        )
        parameters = {
            "run_file": str(opened.file),
            "overrides": [masked(override) for override in overrides or []],  # Prefect stores them
            "until_step": until_step,
            "max_segments": max_segments,
            "max_seconds": max_seconds,
            "accept": list(accepted),
            "try_again": try_again,
            "take_over": take_over,
        }
        set_quiet_defaults()
        ended = _train(opened, words, overrides or [], parameters, console)
        if ended.crashed:  # with an exit code of its own, it has said why
            if ended.exit_code != BatonError.exit_code:
                return ended.exit_code
            raise BatonError(ended.crashed)
        if ended.error is not None and not ended.error.is_expected:
            raise BatonError(message(ended.error.message, hints=[_UNEXPECTED]))
        if ended.error is not None:
            raise ended.error.to_error()
        result = RelayResult.model_validate_json(ended.result) if ended.result else None
        if result is not None and not leaves_time(result.exit_reason) and is_chief(opened.spec.accelerator, os.environ):
            # All is committed, and Prefect knows it: nothing is lost if the machine goes meanwhile.
            result = result.model_copy(update={"report": report_end(opened, console)})
        console.stop()
        if result is None:
            console.emit(Note(text="stopped before the run started; the same command starts it"))
        else:
            given = (os.fspath(file), overrides or [])
            newest = Entry.model_validate_json(ended.entry) if ended.entry else opened.require_newest()
            print_summary(
                console,
                RunFacts.as_known(opened, newest),
                exit_reason=result.exit_reason,
                report_path=result.report,
                report_command=command_line("report", *given),
                continue_command=_continue_command(*given, opened.with_recorded_examples(newest.head), result),
            )
    if as_json:
        say_json({"exit_reason": "stopped"} if result is None else result.model_dump())
    return RESUMABLE if result is None or result.stopped else 0


def _train(
    run: OpenedRun,
    words: Sequence[str],
    overrides: Sequence[str],
    parameters: Mapping[str, object],
    console: Console,
) -> Ended:
    """Have a trainer train, and Prefect record it; of several hosts, only the chief has a flow run."""
    readers: list[Sink] = [_Start(run, console)]
    if run.spec.stages.remote():
        return _train_in_flow_run(run, words, parameters, Several((*readers, console)))
    from baton.flows.with_prefect.recorder import Recorder

    recorder = None
    if is_chief(run.spec.accelerator, os.environ):
        of_run = {
            "file": str(run.file),
            "overrides": list(overrides),
            "parameters": dict(parameters),
        }
        recorder = Recorder(of_run, notes=console, on_cancelled=lambda: trainer.send(signal.SIGTERM))
        readers.append(recorder)
    trainer = Trainer(words, [*readers, console])
    outcome = trainer.wait(*STOP_SIGNALS)
    ended = outcome.end(f"the training {run.name}")
    if recorder is not None:
        recorder.close(ended)
    return ended


@dataclass(frozen=True, slots=True)
class _Start:
    """A reader that says what begins."""

    run: OpenedRun
    console: Console

    def emit(self, event: Event) -> None:
        if isinstance(event, Begun):
            is_recorded = is_chief(self.run.spec.accelerator, os.environ)
            starting = "Prefect and TensorFlow" if is_recorded else "TensorFlow"
            self.console.emit(Note(text=f"starting {starting}; the home is {self.run.home.uri}"))
            if is_recorded and has_temporary_home() and not {"PREFECT_HOME", "PREFECT_API_URL"} & os.environ.keys():
                self.console.emit(Note(text=_TEMPORARY_RECORDS, warning=True))


def _train_in_flow_run(run: OpenedRun, words: Sequence[str], parameters: Mapping[str, object], sink: Sink) -> Ended:
    """Train within a flow run of this process, whose children the stages in other processes are."""
    from baton.flows.with_prefect.server import connect

    try:
        connect()
        from baton.flows.with_prefect.run_flows import train_as_train_run  # imports Prefect

        return train_as_train_run(run, words, parameters, console=sink)
    except (Terminated, KeyboardInterrupt) as fault:  # before the trainer has begun
        return Ended(exit_code=RESUMABLE, stopped=stop_reason(fault))


def print_summary(
    console: Console,
    facts: RunFacts,
    *,
    exit_reason: str,
    report_path: str | None,
    report_command: str,
    continue_command: str,
) -> None:
    """Print what was reached, where it is, and the command that continues it.

    Args:
        console: prints it; its progress bar must be stopped.
        exit_reason: why the command ended.
        report_path: address of the report; None if it is not up to date.
        report_command: the command that writes the report.
        continue_command: the command that continues the training.
    """
    head, home, name, target = facts.head, facts.run.home.uri, facts.run.name, facts.target_of_command
    progress = step_words(facts.step, target, facts.epoch)
    is_short, is_idle = target is not None and facts.step < target, exit_reason == "nothing_to_do"
    console.show("")
    if head.finished is not None and is_short:
        console.show(
            Text(f"{'Nothing to do' if is_idle else 'Done'}: {name} ended early, at {progress}.", "bold green")
        )
        console.show(f"Its callbacks ended it: {head.finished.reason}.")
        console.show("It continues with changed callbacks (--accept callbacks), or without:")
        continue_command += " --set train.callbacks=null --accept callbacks"
    elif is_idle:
        own = facts.target_in_run_file
        is_further = is_short and own is not None and own <= facts.step
        where = f" up to step {own}: an earlier command aimed further, and" if is_further else ":"
        console.show(Text(f"Nothing to do{where} {name} is at {progress}.", "bold"))
    elif not is_short:
        console.show(Text(f"Done: {name} is at {progress}.", "bold green"))
    else:
        console.show(Text(f"Stopped ({exit_reason.replace('_', ' ')}): {name} is at {progress}.", "bold yellow"))
    console.show(_table(facts.totals, step=facts.step, target=target, columns=console.columns))
    checkpoint = "none yet" if head.tip is None else f"{home}/{head.tip.path}"
    for label, value in (
        *((("home", home),) if console.is_terminal else ()),
        *(("dataset", words) for words in console.datasets),
        ("checkpoint", checkpoint_name(checkpoint) if console.is_terminal and head.tip else checkpoint),
        ("report", report_path or f"not up to date: {report_command}"),
        ("continue", continue_command),
    ):
        console.show(Text.assemble((f"{label:<12}", "dim"), shown(value)))


def _table(totals: Totals, *, step: int, target: int | None, columns: int) -> Table:
    """The newest values, a row for each set; a row for each metric where these do not fit beside each other."""
    rows = (
        ("training", totals.row),
        ("training, partial", totals.partial),
        ("validation", totals.evaluation),
        ("test", totals.test),
    )
    names = list(dict.fromkeys(name for _, row in rows if row is not None for name in row.metrics))
    reached = f"{step}/{target}" if target is not None and step <= target else str(step)
    cells = [["", "segments", "step", *map(shown, names)], ["run", str(totals.segments), reached, *[""] * len(names)]]
    for label, row in rows:
        if row is not None:
            values = (number_words(row.metrics[name]) if name in row.metrics else "" for name in names)
            cells.append([label, "", str(row.step), *values])
    if sum(max(map(len, column)) + 2 for column in zip(*cells, strict=True)) > columns:
        cells = [list(row) for row in zip(*cells, strict=True)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=True)
    for heading in cells[0]:
        table.add_column(heading, justify="left" if heading == "" else "right")
    for each in cells[1:]:
        table.add_row(*each)
    return table


def _continue_command(file: str, overrides: Sequence[str], run: OpenedRun, result: RelayResult) -> str:
    """The command that continues the training. For a complete run, it doubles train.steps or train.epochs."""
    return command_line("run", file, overrides, override_to_continue(run.spec, result.step, result.target))
