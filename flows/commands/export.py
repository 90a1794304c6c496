"""`baton export`: writes a committed checkpoint as a file of Keras, TensorFlow, LiteRT, ONNX or OpenVINO."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

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
from baton.flows.commands.output import Output, say, say_json
from baton.flows.opened_run import hint_at_other_files
from baton.flows.process_start import fast_imports
from baton.tasks.evaluate.export_target import (
    FORMS,
    TOLERANCE,
    TOLERANCE_OF_ROUNDED,
    VALUES,
    form_of,
    require_free_target,
    require_runtime,
)
from baton.tasks.foundation.checkpoint.selection import read_selected, select_checkpoint
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.home_files import SAVED_CODE
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.machine.environment import quiet_tensorflow
from baton.tasks.foundation.text import counted
from baton.tasks.foundation.user_functions import require_function


def export(
    address: Address = RUN_FILE,
    overrides: Overrides = None,
    *,
    to: Annotated[Path, typer.Option(metavar="PATH", help="the file or folder to write; must not exist")],
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help=f"one of {', '.join(FORMS)}; left out: by the ending of PATH"),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="the largest difference to the model's predictions, relative to the largest one or to 1; left out: "
            f"{TOLERANCE:g}, or {TOLERANCE_OF_ROUNDED:g} for saved_model and keras of a model that computes in 16 bits",
        ),
    ] = None,
    step: ChosenStep = None,
    run_file: CodeOf = None,
    trust_code: TrustCode = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Write a committed checkpoint for plain Keras or TensorFlow.

    As .keras, .weights.h5, SavedModel or checkpoint; or as .tflite, .onnx or a folder of OpenVINO. It is read back
    without Baton, and refused if it lacks a variable, or predicts something else than the model.
    """
    chosen = step_of(step)
    form = form_of(to) if form is None else form
    require_free_target(form, to)
    require_runtime(form, tolerance)
    run = run_with_code(address, run_file, overrides, trust_code=trust_code)
    require_function(run.spec.model.build, run.folder)
    head, code, uri = run.require_head(), run.run_file, run.home.uri
    saved = None if code.path.exists() else f"{uri}/{head.identity[SAVED_CODE]}"
    select_checkpoint(run.home, chosen, error=InvalidInput)  # refuses a wrong step before TensorFlow is imported
    quiet_tensorflow()
    with fast_imports():
        from baton.tasks.evaluate.export import Exported  # imports TensorFlow
        from baton.tasks.evaluate.export import export as export_checkpoint

    def write(ref: CheckpointRef) -> tuple[CheckpointRef, Exported]:
        done = export_checkpoint(
            code, head, ref, root=run.root, home=run.home, form=form, target=to, tolerance=tolerance
        )
        return ref, done

    with hint_at_other_files(code.path):
        ref, done = read_selected(run.home, chosen, write, error=InvalidInput)
    if saved is not None:
        done = replace(done, load_with=_with_code_of(saved, done.load_with, run.folder))
    for text in done.warnings:
        say(f"warning: {text}", aside=True)
    compared = done.compared
    if as_json:
        say_json(
            {
                "run": run.name,
                "home": uri,
                "step": ref.step,
                "checkpoint": f"{uri}/{ref.path}",
                "state_digest": ref.state_digest,
                "format": form,
                "path": str(done.path),
                "load_with": list(done.load_with),
                "warnings": list(done.warnings),
                "serving": str(done.serving),
                "compared": None
                if compared is None
                else {
                    "examples": compared.examples,
                    "largest_difference": compared.largest_difference,
                    "tolerance": compared.tolerance,
                },
            }
        )
        return
    out = Output.to(sys.stdout, verbose=verbose)
    rows = [
        ("checkpoint", out.path(f"{uri}/{ref.path}")),
        ("written", f"{done.path}  ({form})"),
        ("described in", str(done.serving)),
    ]
    if compared is not None:
        words = f"largest difference {compared.largest_difference:.2g} (--tolerance {compared.tolerance:g})"
        rows.append(("compared", f"{words} to Keras on {counted(compared.examples, 'example')}"))
    elif form in VALUES:
        rows.append(("compared", "every variable, loaded again"))
    labels = ("load with", *("" for _ in done.load_with[1:]))
    out.facts([*rows, *zip(labels, done.load_with, strict=True)])


def _with_code_of(saved: str, lines: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Lines that load an export, where the code was loaded from the home into a folder that ends with this process."""
    where = f"sys.path.insert(0, 'FOLDER')  # where the run's code is; {saved} has it"
    return tuple(where if repr(str(folder)) in line else line for line in lines)
