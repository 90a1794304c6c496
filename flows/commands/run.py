"""`baton run`: train a run file to its target, through Prefect."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.address import Overrides
from flows.commands.closing import print_closing
from flows.commands.output import AsJson, say_json
from flows.relay import Goal, RelayResult, preflight, relay_is_done, storage_of
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.errors import RunFileError
from tasks.foundation.runlog.history import history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.telemetry.console import Console
from tasks.foundation.telemetry.events import Note

_RESUMABLE = 3


def run(
    file: Annotated[Path, typer.Argument(help="the run file", metavar="FILE")],
    overrides: Overrides = None,
    until_step: Annotated[int | None, typer.Option(help="go to this step, counted from initialization")] = None,
    max_segments: Annotated[int | None, typer.Option(help="stop after so many segments")] = None,
    as_json: AsJson = False,
) -> int:
    """Train a run file, or go on with it, to its target."""
    run_file = load_run_file(file, overrides or [])
    goal = Goal.of(run_file.spec, until_step=until_step, max_segments=max_segments)
    preflight(run_file)
    if run_file.spec.storage.startswith("memory:"):
        raise RunFileError(f"storage is {run_file.spec.storage}, which ends with this process; name a folder")
    with Console(sys.stderr if as_json else sys.stdout) as console:
        result = relay_is_done(run_file, goal)
        if result is None:
            result = _train(run_file, overrides or [], until_step, max_segments, console)
        console.stop()
        home = storage_of(run_file).at(run_file.spec.run)
        print_closing(
            console,
            home=home,
            history=history_of(RunLog(home).entries()),
            spec=run_file.spec,
            exit_reason=result.exit_reason,
            report_path=result.report,
            continue_command=_continue_command(file, overrides or [], run_file, result),
        )
    if as_json:
        say_json(result.model_dump())
    return _RESUMABLE if result.exit_reason == "max_segments" else 0


def _train(
    run_file: RunFile, overrides: list[str], until_step: int | None, max_segments: int | None, console: Console
) -> RelayResult:
    """Through Prefect, whose embedded API starts while TensorFlow is being imported."""
    from flows.quiet import quiet, start_prefect_api

    quiet()
    console.emit(
        Note(text=f"starting Prefect and TensorFlow; the home is {storage_of(run_file).at(run_file.spec.run).uri}")
    )
    api = start_prefect_api()
    from prefect import tags

    from flows.train_run import WATCHER, tags_of, train_run

    api.join()
    token = WATCHER.set(console)
    try:
        # Tags that are to stand on the flow run itself must be there before it begins.
        with tags(*tags_of(run_file.spec)):
            return train_run(str(run_file.path), overrides, until_step, max_segments)
    finally:
        WATCHER.reset(token)


def _continue_command(file: Path, overrides: list[str], run_file: RunFile, result: RelayResult) -> str:
    """What to type to train on; a finished run goes on to a later target."""
    kept = list(overrides)
    if result.step >= run_file.spec.train.steps:
        kept = [override for override in kept if not override.startswith("train.steps=")]
        kept.append(f"train.steps={2 * run_file.spec.train.steps}")
    words = [word for override in kept for word in ("--set", override)]
    return shlex.join([_program(), "run", os.fspath(file), *words])


def _program() -> str:
    """`baton`, or where it lies if the shell would not find it: a command that is printed must work as it stands."""
    program = Path(sys.argv[0])
    if program.name != "baton" or shutil.which("baton"):
        return "baton"
    return os.path.relpath(program)
