"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from flows.commands.output import say
from flows.run import Run, RunHome, names_run_file, open_run
from flows.saved_run import saved_run
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.contracts.saved_code import SAVED_CODE
from tasks.foundation.errors import InvalidInput
from tasks.foundation.messages import message

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


def opened_with_run_file(address: str, run_file: Path | None, overrides: list[str] | None) -> tuple[RunHome, RunFile]:
    """Open a run and its run file, which names the model's code; a home's own, if none is named.

    Args:
        address: a run file, or a run's home.
        run_file: the run file, if `address` is a home.
        overrides: changes of the run file.

    Raises:
        InvalidInput: there is no run file, not in the home either, or there are two; or see `open_run`.
    """
    if names_run_file(address):
        opened = open_run(address, overrides)
        if run_file is not None:
            raise InvalidInput(f"--run-file {run_file}: {address} is a run file already; leave --run-file out")
    elif run_file is not None:
        return open_run(address), load_run_file(run_file, overrides or ())
    else:
        opened = _with_saved_code(open_run(address, overrides))
    if not isinstance(opened, Run) or opened.file is None:
        raise AssertionError("the run has no run file")
    return opened, RunFile(path=opened.file, spec=opened.spec)


def _with_saved_code(home: RunHome) -> RunHome:
    """The run at a home with the run file and the code that the home has, and a line that says so.

    Raises:
        InvalidInput: it has none.
    """
    head = home.require_head()
    run = saved_run(home, head)
    say(f"note: run file and code are those in {home.home.uri}/{head.identity[SAVED_CODE]}", aside=True)
    return run
