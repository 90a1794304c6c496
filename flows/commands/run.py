"""`baton run`: train a run file to its target, through Prefect."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.admission.run_at_work import require_nobody_at_work
from flows.admission.storage_check import try_out
from flows.commands.address import Overrides
from flows.commands.output import AsJson, say_json
from flows.commands.run_summary import print_closing
from flows.goal import (
    Goal,
    RelayResult,
    interrupted,
    preflight,
    relay_is_done,
    require_lasting_storage,
    require_not_stuck,
    require_packages_and_source,
    storage_of,
)
from flows.process.leaving import nobody_listens
from flows.process.stop_signals import RESUMABLE, Terminated, stop_reason
from tasks.foundation.accelerator.cluster import is_chief
from tasks.foundation.contracts.identity import accepted_keys
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.errors import BatonError
from tasks.foundation.runlog.history import history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.stops.uninterrupted import last_stop
from tasks.foundation.telemetry.console import Console
from tasks.foundation.telemetry.events import Note
from tasks.foundation.telemetry.log_handler import warnings_as_notes


def run(
    file: Annotated[Path, typer.Argument(help="the run file", metavar="FILE")],
    overrides: Overrides = None,
    *,
    until_step: Annotated[int | None, typer.Option(help="go to this step, counted from initialization")] = None,
    max_segments: Annotated[int | None, typer.Option(help="stop after so many segments")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="stop after so many seconds, with a last commit")] = None,
    accept: Annotated[
        str, typer.Option(metavar="KEYS", help="accept that these of the run's identity changed, as optimizer,data")
    ] = "",
    try_again: Annotated[
        bool, typer.Option("--try-again", help="after a repair: forget the attempts that did not get further")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="begin although another process trains the run; one of them loses")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Train a run file, or go on with it, to its target."""
    run_file = load_run_file(file, overrides or [])
    goal = Goal.of(run_file.spec, until_step=until_step, max_segments=max_segments, max_seconds=max_seconds)
    accepted = accepted_keys(accept)
    preflight(run_file)
    require_lasting_storage(run_file)
    log = RunLog(storage_of(run_file).at(run_file.spec.run))
    parameters = {
        "run_file": str(run_file.path),
        "overrides": overrides or [],
        "until_step": until_step,
        "max_segments": max_segments,
        "max_seconds": max_seconds,
        "accept": list(accepted),
        "try_again": try_again,
        "take_over": take_over,
    }
    with Console(sys.stderr if as_json else sys.stdout) as console, warnings_as_notes(console):
        result = relay_is_done(run_file, goal, accept=accepted)
        if result is None:
            require_packages_and_source(run_file)
            require_not_stuck(run_file, try_again=try_again)
            if is_chief(run_file.spec.accelerator, os.environ):
                require_nobody_at_work(run_file, take_over=take_over, telemetry=console)
            try_out(storage_of(run_file))  # the flow emits its notes
            head = log.head()
            result = _train(run_file, goal, parameters, console, since=-1 if head is None else head.number)
        console.stop()
        if result is None:
            console.emit(Note(text="stopped before the run began; the same command begins it"))
        else:
            _close(console, run_file, log, result, said=(os.fspath(file), overrides or []))
    if as_json:
        say_json({"exit_reason": "stopped"} if result is None else result.model_dump())
    return RESUMABLE if result is None or result.stopped else 0


def _train(
    run_file: RunFile, goal: Goal, parameters: dict[str, Any], console: Console, *, since: int
) -> RelayResult | None:
    """Through Prefect, whose embedded API starts while TensorFlow is being imported.

    Returns:
        What was reached; None if a signal came before the run began.
    """
    from flows.prefect_compat.prefect_startup import quiet, start_prefect_api
    from flows.prefect_compat.require_prefect import require_prefect

    reached: list[RelayResult] = []
    try:
        quiet()
        require_prefect()
        home = storage_of(run_file).at(run_file.spec.run).uri
        console.emit(Note(text=f"starting Prefect and TensorFlow; the home is {home}"))
        api = start_prefect_api()
        from prefect import tags
        from prefect.exceptions import TerminationSignal

        from flows.train_run import REACHED, WATCHER, import_stages, tags_of, train_run

        import_stages(run_file.spec)
        api.wait()
        token = WATCHER.set(console)
        REACHED.set(reached)
        try:
            # Tags that are to stand on the flow run itself must be there before it begins.
            with tags(*tags_of(run_file.spec)):
                result: RelayResult = train_run(**parameters)
                return result
        except TerminationSignal as fault:
            raise Terminated from fault
        finally:
            WATCHER.reset(token)
    except (Terminated, KeyboardInterrupt) as fault:
        # Prefect has heard of it; the flow run has crashed or waits to be scheduled again.
        reason = stop_reason(fault)
    except BatonError:
        raise
    except Exception as fault:
        # Prefect's API may be gone, or ended by whoever ends this process: what was trained is committed all the same.
        stop = last_stop()
        if not reached and (stop is None or stop.reason == "time_budget"):
            from flows.launching.prefect_api import require_passing

            require_passing(fault)  # a wrong key is met here first, where the flow run is to be made
            raise
        console.emit(Note(text=f"Prefect was not told: {type(fault).__name__}: {fault}", warning=True))
        nobody_listens()
        if stop is None or reached:
            return reached[-1]
        reason = stop.reason
    return interrupted(run_file, goal, reason, since=since)


def _close(
    console: Console, run_file: RunFile, log: RunLog, result: RelayResult, *, said: tuple[str, Sequence[str]]
) -> None:
    print_closing(
        console,
        home=log.home,
        history=history_of(log.entries()),
        spec=run_file.spec,
        exit_reason=result.exit_reason,
        report_path=result.report,
        report_command=_command("report", *said),
        continue_command=_continue_command(*said, run_file, result),
    )


def _continue_command(file: str, overrides: Sequence[str], run_file: RunFile, result: RelayResult) -> str:
    """What to type to train on; a finished run goes on to a target beyond the step that it has reached."""
    kept = list(overrides)
    if result.step >= run_file.spec.train.steps:
        kept = [override for override in kept if not override.startswith("train.steps=")]
        kept.append(f"train.steps={2 * result.step}")
    return _command("run", file, kept)


def _command(verb: str, file: str, overrides: Sequence[str]) -> str:
    """What to type; a command that is printed must work as it stands."""
    words = [word for override in overrides for word in ("--set", override)]
    return shlex.join([_program(), verb, file, *words])


def _program() -> str:
    """`baton`, or where it lies if the shell would not find it."""
    program = Path(sys.argv[0])
    if program.name != "baton" or shutil.which("baton"):
        return "baton"
    return os.path.relpath(program)
