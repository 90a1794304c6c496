"""The receipts below `proofs/` and `audits/` in a run's home, and what the newest audit says."""

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from baton.tasks.foundation.contracts.home_files import AuditReceipt, ProofReceipt
from baton.tasks.foundation.errors import AnotherVersion, FileMissing, FileTooLarge, RunLogError
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.text import counted, time_words

_AUDITS = "audits"
_PROOFS = "proofs"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastAudit:
    """The newest audit of a run.

    Attributes:
        path: of its receipt, relative to the home.
        receipt: None if it cannot be read.
    """

    path: str
    receipt: AuditReceipt | None

    @property
    def steps(self) -> int:
        """Number of steps that were executed again and compared."""
        return 0 if self.receipt is None else sum(each.end - each.start for each in self.receipt.stretches)

    @property
    def first_differing_step(self) -> int | None:
        """Step of the first compared commit that differs; None: none does."""
        stretches = () if self.receipt is None else self.receipt.stretches
        return next((each.first_differing_step for each in stretches if each.verdict == "different"), None)


def store_receipt(receipt: AuditReceipt | ProofReceipt, home: Storage) -> str:
    """Write a receipt under a new name in `home`, and return its address.

    Raises:
        StorageError: the storage refuses or fails.
    """
    moment = datetime.fromisoformat(receipt.time).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = _AUDITS if isinstance(receipt, AuditReceipt) else _PROOFS
    path = f"{folder}/{moment}-{uuid.uuid4().hex[:8]}.json"
    home.create(path, receipt.to_json())
    return f"{home.uri}/{path}"


def last_audit(home: Storage) -> LastAudit | None:
    """Read the newest receipt; None if the run was never audited. This is one listing, and at most one read.

    Raises:
        StorageError: the storage fails.
    """
    path = max((each for each in home.files(_AUDITS) if each.endswith(".json")), default=None)  # names begin with UTC
    if path is None:
        return None
    try:
        receipt = AuditReceipt.from_json(home.read(path), where=f"{home.uri}/{path}", error=RunLogError)
    except (AnotherVersion, FileMissing, FileTooLarge, RunLogError):
        return LastAudit(path=path, receipt=None)  # informational: a run is shown without it
    return LastAudit(path=path, receipt=receipt)


def audit_words(audit: LastAudit) -> str:
    """What the newest audit found, on one line."""
    receipt = audit.receipt
    if receipt is None:
        return f"{audit.path} cannot be read"
    count = counted(audit.steps, "step", thousands=",")
    time = time_words(receipt.time)
    if receipt.verdict == "same":
        return f"{time} UTC, {count} executed again: the same bits"
    return f"{time} UTC, {count} executed again: NOT the same bits, first at step {audit.first_differing_step}"
