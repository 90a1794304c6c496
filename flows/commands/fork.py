"""`baton fork`: a new run from a committed checkpoint of another."""

import shlex
import uuid
from typing import Annotated

import typer

from flows.commands.address import Address, OpenedRun, Overrides, open_run
from flows.commands.output import AsJson, aligned, say, say_json
from tasks.foundation.contracts.run_spec import check_run_name
from tasks.foundation.errors import RunFileError
from tasks.foundation.runlog.fork import fork as fork_run
from tasks.foundation.runlog.fork_status import Fork


def fork(
    address: Address,
    new: Annotated[str, typer.Option("--as", metavar="NEW", help="name of the new run")],
    at_step: Annotated[
        int | None, typer.Option(help="step of the checkpoint to begin from; left out: the newest one")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Begin a new run from a checkpoint of another, beside it; the other one is only read."""
    try:
        check_run_name(new)
    except ValueError as fault:
        raise RunFileError(f"--as {new!r} is no run name: {fault}") from fault
    opened = open_run(address, overrides)
    forked = fork_run(opened.root, opened.name, new, at_step=at_step, attempt=uuid.uuid4().hex)
    home = opened.root.at(new)
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
    for line in aligned(_words(opened, forked, new=new, home=home.uri, checkpoint=checkpoint, address=address)):
        say(line)


def _words(
    opened: OpenedRun, forked: Fork, *, new: str, home: str, checkpoint: str | None, address: str
) -> list[tuple[str, str]]:
    file = "FILE" if opened.run_file is None else shlex.quote(address)
    verb = "was forked from" if forked.already_there else "forked from"
    return [
        ("run", f"{new}, {verb} {forked.lineage.home} at step {forked.lineage.step}"),
        ("home", home),
        ("checkpoint", checkpoint or "none"),
        ("next", f"write run: {new} into a copy of the run file, or: baton run {file} --set run={new}"),
        ("", "a change of model, data, seed or batches is refused as in any run, unless --accept names it"),
    ]
