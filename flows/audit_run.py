"""The flow audit: executes committed steps of a run again, as `baton audit` does, and fails if a bit differs.

As a scheduled check, it finds what no checksum sees. `python -m flows.audit_run FILE` is `baton audit FILE`.
"""

import secrets
import sys

if __name__ == "__main__":  # before Prefect is imported: the command needs none
    from flows.commands.main import main

    sys.argv[1:1] = ["audit"]
    sys.exit(main())

from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.opened_run import run_of_deployment, write_run_file
from flows.prefect_compat.flow_run_beside import failed
from flows.prefect_ui.run_logger import PrefectRunLogger, tag_flow_run, tags_of
from flows.proof.audit import audit_in_scratch, receipt_lines
from flows.proof.choose import Choice
from flows.train_run import run_name
from tasks.foundation.contracts.home_files import AuditReceipt
from tasks.foundation.errors import BatonError
from tasks.foundation.runlog.receipts import store_receipt
from tasks.foundation.telemetry.events import Note, warnings_as_notes


@flow(name="audit", flow_run_name=run_name, validate_parameters=True)
def audit(
    run_file: str,
    overrides: list[str] | None = None,
    choice: Choice = "sample",
    count: int = 1,
    seed: int | None = None,
    *,
    trust_code: bool = False,
) -> State[AuditReceipt]:
    """Execute committed steps again in processes of this machine, and compare every bit with the log.

    A receipt goes into the run's home, whatever the audit finds. If a bit differs, the flow run ends as `Differs`,
    which Prefect counts as failed; its message is what `baton audit` prints.

    Args:
        run_file: path of the run file; or the address of the run's home, whose run file and code are used.
        overrides: settings that replace those of the file, each as a.b=c.
        choice: "sample", "last" or "all", as `baton audit` has them.
        count: size of the sample.
        seed: draws the sample; null: a new one each time.
        trust_code: run the code of a home that is in a bucket, or that another user can write to.
    """
    notes: list[str] = []
    try:
        run = run_of_deployment(run_file, overrides, trust_code=trust_code, note=notes.append)
        with tags(*tags_of(run.spec)):
            telemetry = PrefectRunLogger()
            for text in notes:
                telemetry.emit(Note(text=text))
            tag_flow_run(run.spec, telemetry)
            with warnings_as_notes(telemetry):
                write_run_file(run)  # for the processes that execute it
                receipt = audit_in_scratch(
                    run,
                    tuple(overrides or ()),
                    choice=choice,
                    count=count,
                    seed=secrets.randbelow(2**31) if seed is None else seed,
                    telemetry=telemetry,
                )
            address = store_receipt(receipt, run.home)
    except BatonError as fault:
        return failed(fault)
    return ended(receipt, address)


def ended(receipt: AuditReceipt, address: str) -> State[AuditReceipt]:
    """The last state of a flow run that has audited; Prefect's pages show its message."""
    message = "\n".join([*receipt_lines(receipt), f"receipt: {address}"])
    if receipt.verdict == "same":
        return Completed(message=message, data=receipt)
    return Failed(name="Differs", message=message)
