"""`baton fork`: starts a new run from a committed checkpoint of another run."""

import sys
import uuid
from collections.abc import Sequence
from typing import Annotated

import typer

from baton.flows.commands.options import RUN_FILE, Address, AsJson, Overrides, Verbose
from baton.flows.commands.output import Output, command_line, say_json
from baton.flows.facts import RunFacts
from baton.flows.opened_run import OpenedRun, RunHome, open_run
from baton.flows.result import override_to_continue
from baton.tasks.foundation.checkpoint.fork import fork as fork_run
from baton.tasks.foundation.contracts.run_spec import check_run_name
from baton.tasks.foundation.errors import RunFileError


def fork(
    address: Address = RUN_FILE,
    *,
    new: Annotated[str, typer.Option("--as", metavar="NEW", help="name of the new run")],
    at_step: Annotated[
        int | None, typer.Option(help="step of the checkpoint to start from; left out: the newest")
    ] = None,
    overrides: Overrides = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Start a new run from a checkpoint of another run.

    Both are in the same storage; the other run is only read.
    """
    try:
        check_run_name(new)
    except ValueError as fault:
        raise RunFileError(f"--as {new!r} cannot be a run's name: {fault}") from fault
    opened = open_run(address, overrides)
    forked = fork_run(opened.root, opened.name, new, at_step=at_step, attempt=uuid.uuid4().hex)
    made = RunHome.at(opened.root, new)
    home = made.home
    checkpoint = None if forked.head.tip is None else f"{home.uri}/{forked.head.tip.path}"
    if as_json:
        say_json(
            {
                "run": new,
                "home": home.uri,
                "step": forked.lineage.step,
                "checkpoint": checkpoint,
                "state_digest": forked.lineage.state_digest,
                "skipped_batches": forked.head.skipped_batches,
                "forked_from": forked.lineage.model_dump(),
                "already_there": forked.already_there,
            }
        )
        return
    out = Output.to(sys.stdout, verbose=verbose)
    checkpoint = None if checkpoint is None else out.path(checkpoint)
    verb = "was forked from" if forked.already_there else "forked from"
    out.facts(
        [
            ("run", f"{new}, {verb} {forked.lineage.home} at step {forked.lineage.step}"),
            ("home", home.uri),
            ("checkpoint", checkpoint or "none"),
            *_next(opened, made, address, overrides or ()),
            ("", f"or write run: {new} into a copy of the run file;"),
            ("", "a changed model, data, seed or batch size is refused, as in any run, unless --accept names it"),
        ]
    )


def _next(opened: RunHome, made: RunHome, address: str, overrides: Sequence[str]) -> list[tuple[str, str]]:
    """The command that trains a fork; it names a target that is ahead, unless the run file does."""
    facts, name = RunFacts.of(made, made.require_newest()), f"run={made.name}"
    step, target = facts.step, facts.target
    if isinstance(opened, OpenedRun):
        more = override_to_continue(opened.with_recorded_examples(facts.head).spec, step, target)
        return [("next", command_line("run", address, overrides, name, more))]
    lines = [("next", command_line("run", "FILE", (), name))]
    if target is not None:
        further = f"--set train.steps={target if target > step else 2 * step}"
        lines.append(("", f"if FILE ends at step {step} or earlier, say how far it goes: {further}"))
    return lines
