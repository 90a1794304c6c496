"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from baton.flows.commands.output import say
from baton.flows.opened_run import OpenedRun, open_with_code
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.text import message

RUN_FILE: Final = "run.yaml"


def found(context: typer.Context, parameter: typer.CallbackParam, address: str | Path) -> str | Path:
    """The run file of a command that names none must be there.

    Raises:
        InvalidInput: it is not.
    """
    source = context.get_parameter_source(parameter.name or "")
    if source is not None and source.name == "DEFAULT" and not Path(RUN_FILE).exists():
        raise InvalidInput(
            message(f"there is no {RUN_FILE} in this folder", hints=["name a run file, or write one with: baton init"])
        )
    return address


Address = Annotated[
    str, typer.Argument(metavar="RUN", callback=found, help="a run file, or the folder or URI of a run's home")
]
RunFilePath = Annotated[Path, typer.Argument(metavar="FILE", callback=found, help="the run file")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change a key of the run file, as train.steps=5000; repeatable"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object, as the last line of stdout")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="print whole ids, paths and times, as in a pipe and in --json")
]
ChosenStep = Annotated[
    str | None,
    typer.Option("--step", metavar="N|best", help="a step, or best (checkpoint.keep_best); left out: the newest"),
]
CodeOf = Annotated[
    Path | None, typer.Option("--run-file", help="use this run file and its code, not those in the home")
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="run the code in a home that is in a bucket, or that another user can write to"),
]


def step_of(step: str | None) -> int | Literal["best"] | None:
    """Return the checkpoint that `--step` names: a step, best, or None for the newest.

    Raises:
        InvalidInput: it is neither.
    """
    if step is None:
        return None
    if step == "best":
        return "best"
    if not step.isdecimal():
        raise InvalidInput(f"--step {step} is neither a step nor best; give a whole number, or best")
    return int(step)


def run_with_code(address: str, run_file: Path | None, overrides: list[str] | None, *, trust_code: bool) -> OpenedRun:
    """Open a run with the code that builds its model; see `open_with_code`."""
    return open_with_code(
        address,
        overrides,
        run_file=run_file,
        trust_code=trust_code,
        note=lambda text: say(f"note: {text}", aside=True),
    )
