"""`baton audit`: executes committed steps again, and compares the bits with the log."""

import secrets
import sys
from typing import Annotated

import typer

from baton.flows.admit import require_free_servers
from baton.flows.commands.options import RUN_FILE, Address, AsJson, CodeOf, Overrides, TrustCode, run_with_code
from baton.flows.commands.output import Output, Painted, say, say_json
from baton.flows.opened_run import hint_at_other_files, write_run_file
from baton.flows.proof.execute import termination_as_interrupt
from baton.flows.proof.receipt import audit_in_scratch, receipt_parts
from baton.tasks.foundation.errors import DamagedCheckpoint, InvalidInput
from baton.tasks.foundation.log.receipts import store_receipt
from baton.tasks.foundation.telemetry.console import Console
from baton.tasks.foundation.telemetry.formatting import BAD, GOOD, Style


def audit(
    address: Address = RUN_FILE,
    overrides: Overrides = None,
    *,
    run_file: CodeOf = None,
    trust_code: TrustCode = False,
    last: Annotated[bool, typer.Option("--last", help="execute the newest steps")] = False,
    every: Annotated[bool, typer.Option("--all", help="execute all steps between retained checkpoints")] = False,
    sample: Annotated[int, typer.Option(metavar="N", help="how many stretches to draw")] = 1,
    seed: Annotated[int | None, typer.Option(help="draws the sample; left out: a new one each time")] = None,
    as_json: AsJson = False,
) -> int:
    """Execute committed steps again; compare every bit with the log.

    Nothing of the run is touched; the receipt goes into its home. Exits 4 if they differ, and says where.
    """
    if last and every:
        raise InvalidInput("--last and --all exclude each other; use one of them")
    run = run_with_code(address, run_file, overrides, trust_code=trust_code)
    with (
        hint_at_other_files(run.run_file.path),
        Console(sys.stderr if as_json else sys.stdout, doing="auditing") as console,
        termination_as_interrupt(),
    ):
        require_free_servers(run, console)
        write_run_file(run)
        receipt = audit_in_scratch(
            run,
            tuple(overrides or ()),
            choice="last" if last else "all" if every else "sample",
            count=sample,
            seed=secrets.randbelow(2**31) if seed is None else seed,
            telemetry=console,
        )
    if not as_json:
        out = Output.to(sys.stdout)
        for part in receipt_parts(receipt):
            if isinstance(part, str):
                style: Style = "" if not part.startswith("audited: ") else GOOD if receipt.verdict == "same" else BAD
                out.line(Painted(part, style) if style else part)
            else:
                out.facts(part)
    address = store_receipt(receipt, run.home)  # last, so that a storage that refuses it does not hide the verdict
    if as_json:
        say_json({**receipt.model_dump(exclude={"format"}), "receipt": address})
    else:
        say(f"receipt: {address}")
    return 0 if receipt.verdict == "same" else DamagedCheckpoint.exit_code
