"""`baton fork`: starts a new run from a committed checkpoint of another run."""

import shlex
import sys
import uuid
from typing import Annotated

import typer

from flows.commands.options import RUN_FILE, Address, AsJson, Overrides, Verbose
from flows.commands.output import Output, say_json
from flows.run import Run, RunHome, open_run
from tasks.foundation.checkpoint.fork import fork as fork_run
from tasks.foundation.checkpoint.fork_status import Fork
from tasks.foundation.contracts.run_spec import check_run_name
from tasks.foundation.errors import RunFileError


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
    home = RunHome.at(opened.root, new).home
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
    out.facts(_words(opened, forked, new=new, home=home.uri, checkpoint=checkpoint, address=address))


def _words(
    opened: RunHome, forked: Fork, *, new: str, home: str, checkpoint: str | None, address: str
) -> list[tuple[str, str]]:
    file = shlex.quote(address) if isinstance(opened, Run) else "FILE"
    verb = "was forked from" if forked.already_there else "forked from"
    return [
        ("run", f"{new}, {verb} {forked.lineage.home} at step {forked.lineage.step}"),
        ("home", home),
        ("checkpoint", checkpoint or "none"),
        ("next", f"baton run {file} --set run={new}"),
        ("", f"or write run: {new} into a copy of the run file;"),
        ("", "a changed model, data, seed or batch size is refused, as in any run, unless --accept names it"),
    ]
