"""`baton prove`: tests on this machine that cuts and kills do not change the bits of a run."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from baton.flows.admit import preflight, require_free_servers, require_lasting_storage
from baton.flows.commands.options import RUN_FILE, AsJson, Overrides, RunFilePath, Verbose
from baton.flows.commands.output import Output, Painted, say, say_json
from baton.flows.opened_run import OpenedRun
from baton.flows.proof.compare import difference_words
from baton.flows.proof.execute import FreshProcesses, Laboratory, hosts_of, termination_as_interrupt
from baton.flows.proof.receipt import prove as proof_of
from baton.tasks.foundation.contracts.home_files import ProofReceipt
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.log.receipts import store_receipt
from baton.tasks.foundation.storage.local_files import PROOF_PREFIX, temporary_folder
from baton.tasks.foundation.telemetry.console import Console
from baton.tasks.foundation.telemetry.formatting import BAD, GOOD
from baton.tasks.foundation.text import counted

_DIFFERENT = 1
# Odd, so that the metrics hold partial sums at the end. Few, because importing TensorFlow takes most of the time.
_STEPS = 31


def prove(
    file: RunFilePath = Path(RUN_FILE),
    overrides: Overrides = None,
    *,
    steps: Annotated[int, typer.Option(help="number of steps to train; at least 4")] = _STEPS,
    share_data: Annotated[
        bool, typer.Option("--share-data", help="prepare the data once, not for each training")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="keep the scratch folder")] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> int:
    """Train straight, and again cut and killed; compare every bit.

    Nothing of the run itself is touched; the receipt goes into its home. Exits 1 if the two differ, and says where.
    """
    run = load_run_file(file, overrides or [])
    opened = OpenedRun.open(run)
    preflight(opened)
    require_lasting_storage(opened)
    stream = sys.stderr if as_json else sys.stdout
    with Console(stream, doing="proving") as console, termination_as_interrupt(), _scratch(keep) as folder:
        require_free_servers(opened, console)
        processes = FreshProcesses(hosts=hosts_of(run.spec))
        laboratory = Laboratory(folder=folder, processes=processes, telemetry=console)
        receipt = proof_of(run, tuple(overrides or ()), steps=steps, share_data=share_data, laboratory=laboratory)
    kept_folder = str(folder) if keep else None
    if not as_json:
        _say(receipt, kept_folder, Output.to(sys.stdout, verbose=verbose))
    # Last, so that the verdict is printed even if the storage refuses the receipt.
    address = store_receipt(receipt, opened.home)
    if as_json:
        say_json({**receipt.model_dump(exclude={"format"}), "receipt": address, "kept": kept_folder})
    else:
        say(f"receipt: {address}")
    return 0 if receipt.verdict == "same" else _DIFFERENT


@contextmanager
def _scratch(keep: bool) -> Iterator[Path]:
    if keep:
        yield Path(tempfile.mkdtemp(prefix="baton-prove-"))
        return
    with temporary_folder(PROOF_PREFIX) as folder:
        yield folder


def _say(receipt: ProofReceipt, kept: str | None, out: Output) -> None:
    cuts = ", ".join(map(str, receipt.cuts))
    how = (
        f"{counted(receipt.steps, 'step')} straight, and again cut at {cuts} with a SIGKILL at {receipt.killed_at_step}"
    )
    if receipt.verdict == "same":
        out.line(Painted(f"proved: {receipt.run}: {how}: the same bits", GOOD))
    else:
        out.line(Painted(f"NOT the same: {receipt.run}: {how}", BAD))
    environment = receipt.environment
    threads = f"{environment.intra_op_threads}/{environment.inter_op_threads}"
    hosts = f", {environment.hosts} processes for the hosts" if environment.hosts > 1 else ""
    facts = [
        ("digest", _pair(receipt.straight.state_digest, receipt.cut.state_digest, out)),
        ("examples", _pair(receipt.straight.content_digest, receipt.cut.content_digest, out)),
        ("variables", _variables(receipt)),
        ("first", "" if receipt.first_difference is None else difference_words(receipt.first_difference)),
        ("metrics", _metrics(receipt)),
        *(("cause", cause) for cause in receipt.causes),
        ("environment", f"{environment.accelerator}, replicas {environment.replicas}, threads {threads}{hosts}"),
        ("kept", kept or ""),
    ]
    out.facts(facts)


def _pair(straight: str, cut: str, out: Output) -> str:
    return out.id(straight) if straight == cut else f"{straight[:16]}… straight, {cut[:16]}… cut"


def _variables(receipt: ProofReceipt) -> str:
    if not receipt.differing:
        return f"{receipt.variables} compared, all the same"
    return f"{receipt.differing} of {receipt.variables} differ"


def _metrics(receipt: ProofReceipt) -> str:
    if receipt.first_differing_step is not None:
        return f"first differ at step {receipt.first_differing_step}"
    return "1 row, the same" if receipt.metric_rows == 1 else f"{receipt.metric_rows} rows, all the same"
