"""`baton audit`: executes committed steps again, and compares the bits with the log."""

import os
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.admission.checks import preflight
from flows.auditing.audit import AuditSetup, audit_run
from flows.auditing.receipt import AuditedStretch, AuditedVariable, AuditReceipt, store
from flows.commands.options import AsJson, Overrides
from flows.commands.output import aligned, say, say_json
from flows.proving.interrupts import termination_as_interrupt
from flows.proving.trial_processes import FreshProcesses
from flows.run import Run, holds_a_log
from tasks.foundation.accelerator.cluster import cluster_of
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import DamagedCheckpoint, InvalidInput, NoSuchRun
from tasks.foundation.storage.temporary_files import PROOF_PREFIX, temporary_folder
from tasks.foundation.telemetry.console import Console
from tasks.foundation.telemetry.formatting import number_words

# What each result of the second execution suggests. None of them is a proof.
_SUGGESTS = {
    "log": "a second execution agrees with the log: this machine computed the first one wrongly, or the training is "
    "rarely not deterministic; test this machine's memory and processor, and audit again on another one",
    "first": "a second execution agrees with the first: the logged commit was computed wrongly, or something outside "
    "the identity has changed since: code, files that it reads, data, libraries, devices; audit on another machine, "
    "and compare the code with that of the training",
    "neither": "a second execution agrees with neither: the training is not deterministic; `baton prove` names usual "
    "causes. A machine that often computes wrongly looks the same",
}


def audit(
    file: Annotated[Path, typer.Argument(help="the run file", metavar="FILE")],
    overrides: Overrides = None,
    *,
    last: Annotated[bool, typer.Option("--last", help="execute the newest steps")] = False,
    every: Annotated[bool, typer.Option("--all", help="execute all steps between retained checkpoints")] = False,
    sample: Annotated[int, typer.Option(metavar="N", help="how many stretches to draw")] = 1,
    seed: Annotated[int | None, typer.Option(help="draws the sample; left out: a new one each time")] = None,
    as_json: AsJson = False,
) -> int:
    """Execute committed steps again, from one retained checkpoint to the next, and compare every bit with the log.

    Nothing of the run is touched; the receipt goes into its home. Exits 4 if they differ, and says where.
    """
    if last and every:
        raise InvalidInput("--last and --all exclude each other; use one of them")
    loaded = load_run_file(file, overrides or [])
    run = Run.open(loaded)
    preflight(run)
    if not holds_a_log(run.home):
        raise NoSuchRun(f"no run is at {run.home.uri}: there is nothing to audit; start it with: baton run {file}")
    hosts = len(cluster_of(os.environ).addresses) if run.spec.accelerator.kind == "multi_worker" else 1
    with (
        Console(sys.stderr if as_json else sys.stdout) as console,
        termination_as_interrupt(),
        temporary_folder(PROOF_PREFIX) as folder,
    ):
        receipt = audit_run(
            run,
            tuple(overrides or ()),
            choice="last" if last else "all" if every else "sample",
            count=sample,
            seed=secrets.randbelow(2**31) if seed is None else seed,
            setup=AuditSetup(folder=folder, processes=FreshProcesses(folder / "said", hosts=hosts), telemetry=console),
        )
    if not as_json:
        _say(receipt)
    address = store(receipt, run.home)  # last, so that the verdict is printed even if the storage refuses the receipt
    if as_json:
        say_json({**receipt.model_dump(), "receipt": address})
    else:
        say(f"receipt: {address}")
    return 0 if receipt.verdict == "same" else DamagedCheckpoint.exit_code


def _say(receipt: AuditReceipt) -> None:
    for stretch in receipt.stretches:
        for line in stretch.environment:
            say(f"warning: another environment: {line}")
    how = f"{len(receipt.stretches)} of {receipt.auditable} stretches between retained checkpoints"
    drawn = "" if receipt.seed is None else f", drawn with --seed {receipt.seed}"
    verdict = "the same bits" if receipt.verdict == "same" else "NOT the same bits"
    say(f"audited: {receipt.run}: {how}{drawn}: {verdict}")
    for stretch in receipt.stretches:
        for line in aligned(_lines(stretch)):
            say(line)
    for text in receipt.left_out:
        say(f"cannot be executed again: {text}")


def _lines(stretch: AuditedStretch) -> list[tuple[str, str]]:
    what = f"{stretch.start} to {stretch.end}, {stretch.compared} of {stretch.commits} commits compared"
    lines = [("steps", f"{what}: {stretch.verdict}")]
    if stretch.second_agrees_with is None:
        return lines
    lines.append(("differs", f"first at the commit of step {stretch.first_differing_step}"))
    found = stretch.first_difference
    if found is not None:
        lines.append(("variables", f"{stretch.differing} of {stretch.variables} differ at step {stretch.end}"))
        lines.append(("first", _variable(found)))
        if found.path.startswith("metrics/"):
            lines.append(("", "only sums of metrics differ: was train.log_every_steps changed since?"))
    lines.append(("suggests", _SUGGESTS[stretch.second_agrees_with]))
    return lines


def _variable(found: AuditedVariable) -> str:
    what = f"{found.path}  {found.dtype}{list(found.shape)}"
    if found.only_in:
        return f"{what}: only in the {found.only_in}"
    bits = "" if found.bits is None else f" in {found.bits} bits"
    largest = "" if found.largest is None else f", by up to {number_words(found.largest)}"
    return f"{what}: {found.values} of its values differ{bits}{largest}"
