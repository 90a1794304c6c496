"""`baton evaluate`: evaluates a committed checkpoint on the validation or the test set."""

import sys
from typing import Annotated, get_args

import typer

from baton.flows.commands.options import (
    RUN_FILE,
    Address,
    AsJson,
    ChosenStep,
    CodeOf,
    Overrides,
    TrustCode,
    Verbose,
    run_with_code,
    step_of,
)
from baton.flows.commands.output import Output, Painted, say_json
from baton.flows.evaluating import Chosen, FreshEvaluation, chosen_of, evaluate_again, run_stages
from baton.flows.opened_run import OpenedRun, hint_at_other_files
from baton.flows.process_start import fast_imports
from baton.flows.runner import InProcess, Runner
from baton.tasks.foundation.contracts.data_spec import SetName
from baton.tasks.foundation.contracts.log_entry import Evaluation
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.machine.environment import quiet_tensorflow
from baton.tasks.foundation.telemetry.console import Console
from baton.tasks.foundation.telemetry.events import Sink, warnings_as_notes
from baton.tasks.foundation.telemetry.formatting import BAD, GOOD, metric_words
from baton.tasks.foundation.text import counted


def evaluate(
    address: Address = RUN_FILE,
    overrides: Overrides = None,
    *,
    step: ChosenStep = None,
    on: Annotated[str, typer.Option("--on", metavar="SET", help="validation or test")] = "validation",
    run_file: CodeOf = None,
    trust_code: TrustCode = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a committed checkpoint, and compare with the log.

    Metrics that the log does not have are added to it. Those of the test set decide nothing: keep-best and early
    stopping never see them.
    """
    chosen_step, chosen_set = step_of(step), _set_of(on)
    run = run_with_code(address, run_file, overrides, trust_code=trust_code)
    chosen_of(run, chosen_step, chosen_set)  # refuses a wrong step or set before TensorFlow is imported
    quiet_tensorflow()
    with (
        hint_at_other_files(run.run_file.path),
        Console(sys.stderr, doing="evaluating") as console,
        warnings_as_notes(console),
    ):

        def work(chosen: Chosen) -> Evaluation:
            return run_stages(run, chosen, _runner(run, console), console)

        done = evaluate_again(run, chosen_step, work, console, on=chosen_set)
    if as_json:
        say_json(done.model_dump())
        return
    out = Output.to(sys.stdout, verbose=verbose)
    out.facts(_words(done, out))


def _set_of(on: str) -> SetName:
    for name in get_args(SetName):
        if on == name:
            return name  # type: ignore[no-any-return]
    raise InvalidInput(f"--on {on} is not a set; use {' or '.join(get_args(SetName))}")


def _runner(run: OpenedRun, telemetry: Sink) -> Runner:
    """Runs the stages in this process, or as the deployments that the run file names."""
    local = InProcess()
    if not run.spec.stages.remote():
        return local
    with fast_imports():
        from baton.flows.remote_stage import runner_for
        from baton.flows.with_prefect.flow_runs import answer  # imports Prefect

    return runner_for(run.spec, local, ask=answer, attempt=None, telemetry=telemetry)


def _words(done: FreshEvaluation, out: Output) -> list[tuple[str, str]]:
    logged = {
        None: "the log had no evaluation of it on this set; it has this one now",
        True: Painted("the log has the same metrics", GOOD),
        False: Painted(f"DIFFERS: the log has {metric_words(done.logged or {})}", BAD),
    }
    return [
        ("checkpoint", out.path(done.checkpoint)),
        ("step", str(done.step)),
        (done.on, f"{metric_words(done.metrics)}  ({counted(done.examples, 'example')})"),
        ("log", logged[done.agrees]),
    ]
