"""The trainer, the program that trains a run: `python -m baton.flows.train FILE [options]`.

With `--stage` it runs one stage, for a flow run (`stage_process.py`). It imports neither Prefect nor a command.
`supervisor.py` starts it, and gives it a pipe for its events: then it says there what it does, and how it ended, and
prints nothing. What it asks of Prefect, for stages in other processes, is answered through a second pipe. Started by
hand it prints the lines of the console on standard error, and as the last line of standard output the result as JSON. A
`BatonError` ends the process with its exit code, and is printed at the end of standard error as `error: Class: text`.
"""

from baton.flows.process_start import begin_with_fixed_hashes

if __name__ == "__main__":
    begin_with_fixed_hashes()

from baton.flows.process import exits_with  # isort: skip - the function that registers first is called last

import argparse
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from baton.tasks.foundation.machine.environment import quiet_tensorflow
from baton.tasks.foundation.machine.tpu import announce_tpu

quiet_tensorflow()
announce_tpu()

from baton.flows.admit import Admitted, admit, require_still_idle  # noqa: E402
from baton.flows.host_checks import refusals_told  # noqa: E402
from baton.flows.opened_run import OpenedRun  # noqa: E402
from baton.flows.process import (  # noqa: E402
    keep_main_module_from_children,
    mask_library_output,
    provide_home_folder,
    sigterm_raises,
    stop_reason,
    stop_signal_name,
    tolerate_closed_readers,
    unreachable_store,
)
from baton.flows.process_start import fast_imports  # noqa: E402
from baton.flows.relay import relay  # noqa: E402 - TensorFlow must be quiet before it is imported
from baton.flows.result import Goal, RelayResult, result_of_interrupted  # noqa: E402
from baton.flows.runner import InProcess, Runner, import_stages, read_tip_ahead  # noqa: E402
from baton.tasks.foundation.contracts.identity import accepted_keys  # noqa: E402
from baton.tasks.foundation.contracts.run_file import load_run_file  # noqa: E402
from baton.tasks.foundation.contracts.stage_calls import ErrorReport  # noqa: E402
from baton.tasks.foundation.errors import BatonError  # noqa: E402
from baton.tasks.foundation.machine.stops import RESUMABLE, STOP_SIGNALS, Terminated, terminal_closed  # noqa: E402
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE  # noqa: E402
from baton.tasks.foundation.telemetry.console import Console  # noqa: E402
from baton.tasks.foundation.telemetry.events import (  # noqa: E402
    Ask,
    Begun,
    Ended,
    EventStream,
    Note,
    Questions,
    Sink,
    warnings_as_notes,
)
from baton.tasks.foundation.text import shown_lines  # noqa: E402


def train(
    run: OpenedRun,
    goal: Goal,
    runner: Runner | None = None,
    *,
    telemetry: Sink,
    accept: Sequence[str] = (),
    try_again: bool = False,
    take_over: bool = False,
) -> RelayResult:
    """Admit a run and train it to its goal.

    Args:
        goal: how far to train.
        runner: runs the stages; None: as functions in this process; the run file must name no deployments then.
        accept: identity keys whose change is accepted.
        try_again: forget earlier attempts without progress.
        take_over: start even if another process trains the run.

    Raises:
        BatonError: the run is refused, or a stage failed.
    """
    PROCESS_DEADLINE.clear()
    with warnings_as_notes(telemetry):
        admitted = admit(run, goal, accept=accept, try_again=try_again, take_over=take_over, telemetry=telemetry)
        return admitted if isinstance(admitted, RelayResult) else _train_admitted(admitted, runner, telemetry=telemetry)


def _train_admitted(
    admitted: Admitted,
    runner: Runner | None = None,
    *,
    telemetry: Sink,
    look_again: bool = False,
    ask: Ask | None = None,
) -> RelayResult:
    telemetry.emit(Begun())
    spec, limit, attempt = admitted.run.spec, admitted.goal.max_seconds, uuid.uuid4().hex
    if runner is None:
        runner = InProcess()
        if spec.stages.remote():
            from baton.flows.remote_stage import runner_for

            runner = runner_for(spec, runner, ask=ask, attempt=attempt, telemetry=telemetry, max_seconds=limit)
        read_tip_ahead(spec, admitted.run.home, admitted.head)
        with fast_imports():
            import_stages(spec)
        if look_again:  # of two commands that start at once, one says so; the log keeps them apart anyway
            require_still_idle(admitted, telemetry=telemetry)
    return relay(admitted, runner, telemetry=telemetry, attempt=attempt, whole_process=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train one run file to its goal.

    Args:
        arguments: the command's arguments; None: those of the process.

    Returns:
        The exit code: 0, 3 if work is left to do, or the exit code of the `BatonError` that ended the run.
    """
    parser = argparse.ArgumentParser(prog="python -m baton.flows.train", description="Train a run file.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", type=Path, nargs="?")
    what.add_argument("--stage", metavar="NAME", help="run only this stage, as a flow run asks for it")
    parser.add_argument("--call", type=Path, metavar="FILE", help="the call of the stage and its context, in JSON")
    parser.add_argument("--flow-run", metavar="ID", help="of the stage; its answer is named after it")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--until-step", type=int)
    parser.add_argument("--cut-at", type=int, action="append", default=[], help="commit at this step, too; repeatable")
    parser.add_argument("--max-segments", type=int)
    parser.add_argument("--max-seconds", type=float)
    parser.add_argument("--accept", type=accepted_keys, default=(), metavar="KEYS")
    parser.add_argument("--try-again", action="store_true")
    parser.add_argument("--take-over", action="store_true")
    parser.add_argument("--events", type=int, metavar="DESCRIPTOR", help="of the pipe that events are written to")
    parser.add_argument(
        "--answers", type=int, metavar="DESCRIPTOR", help="of the pipe with the answers to what it asks by events"
    )
    options = parser.parse_args(arguments)
    mask_library_output()
    with tolerate_closed_readers(beside_bar=options.events is not None):
        if options.events is not None:
            stream = EventStream(options.events)
            ask = None if options.answers is None else Questions(options.answers, stream)
            try:
                ended = _train(options, stream, ask)
            except Exception as fault:  # noqa: BLE001 - who started this process says it
                ended = Ended(exit_code=BatonError.exit_code, error=ErrorReport.of(fault))
            stream.emit(ended)
            return ended.exit_code
        with Console(sys.stderr) as console:
            ended = _train(options, console)
        if ended.stopped:
            by = f" by {stop_signal_name()}" if ended.stopped == "sigterm" and terminal_closed() else ""
            _say(f"stopped: {ended.stopped}{by}")
        if ended.error is not None:
            _say(f"error: {ended.error.error}: {ended.error.message}")
        if ended.result:
            sys.stdout.write(ended.result + "\n")
    return ended.exit_code


def _train(options: argparse.Namespace, telemetry: Sink, ask: Ask | None = None) -> Ended:
    admitted: Admitted | RelayResult | None = None
    try:
        with sigterm_raises(), warnings_as_notes(telemetry):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            provide_home_folder()
            if options.stage is not None:
                from baton.flows.stage_process import run_stage

                call = options.call.read_text(encoding="utf-8")
                return run_stage(options.stage, call, flow_run=options.flow_run, telemetry=telemetry)
            with refusals_told(options.file, options.overrides, note=lambda text: telemetry.emit(Note(text=text))):
                run = OpenedRun.open(load_run_file(options.file, options.overrides))
                goal = Goal.of(
                    run.spec,
                    until_step=options.until_step,
                    max_segments=options.max_segments,
                    max_seconds=options.max_seconds,
                    cuts=options.cut_at,
                )
            admitted = admit(
                run,
                goal,
                accept=options.accept,
                try_again=options.try_again,
                take_over=options.take_over,
                telemetry=telemetry,
            )
            if isinstance(admitted, RelayResult):
                return _ended(run, admitted)
            look_again = options.events is not None
            result = _train_admitted(admitted, telemetry=telemetry, look_again=look_again, ask=ask)
    except (Terminated, KeyboardInterrupt) as fault:
        # All is committed, or given up. A signal that comes twice, as to a whole session, must not interrupt the rest.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return _ended_by_signal(fault, admitted, telemetry)
        finally:
            if options.events is None:  # with a supervisor, the process ends now
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except SystemExit as fault:  # a library or the user's code called sys.exit
        ended = BatonError(f"something called sys.exit({fault.code!r}) before the command ended")
        return Ended(exit_code=ended.exit_code, error=ErrorReport.of(ended))
    except BatonError as fault:
        return Ended(exit_code=fault.exit_code, error=ErrorReport.of(fault))
    return _ended(run, result)


def _ended(run: OpenedRun, result: RelayResult | None, *, stopped: str = "") -> Ended:
    newest = None if result is None else run.log.newest_seen()
    return Ended(
        exit_code=RESUMABLE if result is None or result.stopped else 0,
        result="" if result is None else result.model_dump_json(),
        entry="" if newest is None else newest.model_dump_json(),
        stopped=stopped,
    )


def _ended_by_signal(fault: BaseException, admitted: Admitted | RelayResult | None, telemetry: Sink) -> Ended:
    """The end of a training that a signal stopped, with what it reached."""
    if (unreachable := unreachable_store(fault)) is not None:
        telemetry.emit(Note(text=str(unreachable), warning=True))
    reason = stop_reason(fault)
    if not isinstance(admitted, Admitted):
        return Ended(exit_code=RESUMABLE, stopped=reason)
    run, goal, since = admitted.run, admitted.goal, admitted.head
    try:
        result = result_of_interrupted(run, goal, reason, since=since, telemetry=telemetry)
    except BatonError as another:
        return Ended(exit_code=another.exit_code, error=ErrorReport.of(another))
    return _ended(run, result, stopped=reason)


def _say(text: str) -> None:
    """Print to standard error, without secrets and control characters."""
    sys.stderr.write(shown_lines(text) + "\n")


if __name__ == "__main__":
    keep_main_module_from_children()
    sys.exit(exits_with(main()))
