"""`baton run`: trains a run file to its target, through Prefect."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer

from flows.admit import Admitted, admit, require_lasting_storage
from flows.commands.options import RUN_FILE, AsJson, Overrides, RunFilePath
from flows.commands.output import command_line, say_json
from flows.launching.devices import import_stages, read_tip_ahead
from flows.opened_run import Goal, RelayResult, Run, override_to_continue, result_of_interrupted
from flows.process.exit import skip_prefect_shutdown
from flows.process.fast_imports import fast_imports
from flows.process.standard_streams import has_temporary_home
from flows.process.stop_signals import Terminated, stop_reason
from flows.summary.run_summary import print_summary
from tasks.foundation.contracts.identity import accepted_keys
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.machine.stops import RESUMABLE
from tasks.foundation.messages import masked
from tasks.foundation.telemetry.console import Console
from tasks.foundation.telemetry.events import Note, warnings_as_notes

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
    run_file = load_run_file(file, overrides or [])
    goal = Goal.of(run_file.spec, until_step=until_step, max_segments=max_segments, max_seconds=max_seconds)
    accepted = accepted_keys(accept)
    opened = Run.open(run_file)
    require_lasting_storage(opened)
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
    with Console(sys.stderr if as_json else sys.stdout) as console, warnings_as_notes(console):
        admitted: Admitted | RelayResult | None = None
        with suppress(KeyboardInterrupt):
            admitted = admit(opened, goal, accept=accepted, try_again=try_again, take_over=take_over, telemetry=console)
        result = _train(admitted, parameters, console) if isinstance(admitted, Admitted) else admitted
        console.stop()
        if result is None:
            console.emit(Note(text="stopped before the run started; the same command starts it"))
        else:
            _print_summary(console, opened, result, file=os.fspath(file), overrides=overrides or [])
    if as_json:
        say_json({"exit_reason": "stopped"} if result is None else result.model_dump())
    return RESUMABLE if result is None or result.stopped else 0


def _train(admitted: Admitted, parameters: Mapping[str, object], console: Console) -> RelayResult | None:
    """Train beside the flow run that Prefect records. Its embedded server starts while TensorFlow is imported.

    A run that waits for its flow run imports Prefect first. Any other imports it when the first steps are trained.

    Returns:
        What the command reached; None if a signal came before the run had a checkpoint.
    """
    from flows.prefect_compat.prefect_startup import PrefectStart, set_quiet_defaults
    from flows.train_beside import flow_run_of_command, train_beside, waits_for_flow_run

    run, reached = admitted.run, list[RelayResult]()
    try:
        set_quiet_defaults()
        start = PrefectStart()
        read_tip_ahead(run.spec, run.home, admitted.head)
        waits = waits_for_flow_run(admitted)
        flow_run = flow_run_of_command(admitted, parameters, wait_for_server=start.wait if waits else start.respond)
        with ExitStack() as stack:
            with fast_imports():
                console.emit(Note(text=f"starting Prefect and TensorFlow; the home is {run.home.uri}"))
                if has_temporary_home() and not {"PREFECT_HOME", "PREFECT_API_URL"} & os.environ.keys():
                    console.emit(Note(text=_TEMPORARY_RECORDS, warning=True))
                if waits:
                    start.connect()
                    import flows.train_run  # noqa: F401 - imports Prefect

                    stack.enter_context(flow_run).begin()
                else:
                    start.check_beside()
                import_stages(run.spec)
            if not waits:
                start.require_checked()
                stack.enter_context(flow_run)
            train_beside(admitted, flow_run, console=console, on_result=reached.append)
    except (Terminated, KeyboardInterrupt) as fault:
        # Prefect has already recorded the flow run as crashed.
        reason = stop_reason(fault)
        return result_of_interrupted(run, admitted.goal, reason, since=admitted.head, telemetry=console)
    except Exception as fault:
        if not reached:
            raise
        # Prefect's API may be unreachable, or may have ended with this process. The checkpoints are committed anyway.
        console.emit(Note(text=f"Prefect did not record the result: {fault}", warning=True))
        skip_prefect_shutdown()
    return reached[-1]


def _print_summary(console: Console, run: Run, result: RelayResult, *, file: str, overrides: Sequence[str]) -> None:
    print_summary(
        console,
        run,
        exit_reason=result.exit_reason,
        report_path=result.report,
        report_command=command_line("report", file, overrides),
        continue_command=_continue_command(file, overrides, run, result),
    )


def _continue_command(file: str, overrides: Sequence[str], run: Run, result: RelayResult) -> str:
    """The command that continues the training. For a complete run, it doubles train.steps or train.epochs."""
    spec = run.with_recorded_examples(run.log.head_seen()).spec
    return command_line("run", file, overrides, override_to_continue(spec, result.step, result.target))
