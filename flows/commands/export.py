"""`baton export`: writes a committed checkpoint as a Keras or TensorFlow file."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.commands.options import Address, AsJson, Overrides
from flows.commands.output import aligned, say, say_json
from flows.run import Run, RunHome, names_run_file, open_run
from tasks.evaluate.export.target import FORMS, require_free_target
from tasks.foundation.accelerator.environment import quiet_tensorflow
from tasks.foundation.checkpoint.selection import read_selected, select_checkpoint
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.errors import InvalidInput
from tasks.foundation.user_code import require_function


def export(
    address: Address,
    overrides: Overrides = None,
    *,
    to: Annotated[Path, typer.Option(metavar="PATH", help="the file or folder to write; must not exist")],
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help=f"one of {', '.join(FORMS)}")],
    step: Annotated[
        str | None,
        typer.Option(metavar="N|best", help="a step, or best (checkpoint.keep_best); left out: the newest"),
    ] = None,
    run_file: Annotated[
        Path | None, typer.Option(help="the run file that builds the model, where RUN is a run's home")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a committed checkpoint for plain Keras or TensorFlow: .keras, .weights.h5, SavedModel or checkpoint."""
    chosen = _chosen(step)
    require_free_target(form, to)
    opened, run = _opened(address, run_file, overrides)
    require_function(run.spec.model.build, run.folder)
    head = opened.require_head()
    select_checkpoint(opened.home, chosen, error=InvalidInput)  # refuses a wrong step before TensorFlow is imported
    quiet_tensorflow()
    from tasks.evaluate.export.exporting import Exported  # imports TensorFlow
    from tasks.evaluate.export.exporting import export as export_checkpoint

    def write(ref: CheckpointRef) -> tuple[CheckpointRef, Exported]:
        return ref, export_checkpoint(run, head, ref, root=opened.root, home=opened.home, form=form, target=to)

    ref, done = read_selected(opened.home, chosen, write, error=InvalidInput)
    for text in done.warnings:
        say(f"warning: {text}", aside=True)
    if as_json:
        say_json(
            {
                "run": opened.name,
                "home": opened.home.uri,
                "step": ref.step,
                "checkpoint": f"{opened.home.uri}/{ref.path}",
                "state_digest": ref.state_digest,
                "format": form,
                "path": str(done.path),
                "load_with": list(done.load_with),
                "warnings": list(done.warnings),
            }
        )
        return
    rows = [("checkpoint", f"{opened.home.uri}/{ref.path}"), ("written", f"{done.path}  ({form})")]
    labels = ("load with", *("" for _ in done.load_with[1:]))
    for line in aligned([*rows, *zip(labels, done.load_with, strict=True)]):
        say(line)


def _chosen(step: str | None) -> int | Literal["best"] | None:
    if step is None:
        return None
    if step == "best":
        return "best"
    if not step.isdecimal():
        raise InvalidInput(f"--step {step} is neither a step nor best; give a whole number, or best")
    return int(step)


def _opened(address: str, run_file: Path | None, overrides: list[str] | None) -> tuple[RunHome, RunFile]:
    """The run and its run file, which names the model's code; the log does not."""
    if names_run_file(address) or run_file is None:
        opened = open_run(address, overrides)
        if not isinstance(opened, Run) or opened.file is None:
            raise InvalidInput(
                f"{address} is a run's home, which has no code; name the run file that builds the model with --run-file"
            )
        if run_file is not None:
            raise InvalidInput(f"--run-file {run_file}: {address} is a run file already; leave --run-file out")
        return opened, RunFile(path=opened.file, spec=opened.spec)
    return open_run(address), load_run_file(run_file, overrides or ())
