"""Heads, ledgers and attempt records with invented numbers."""

from datetime import timedelta
from typing import Any

from baton.tasks.foundation.contracts.attempt import AttemptRecord
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Environment, Head, Retained, SetIn
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.telemetry.ledger import Ledger
from tests.support.clock import NOON, FakeClock


def ledger_of(clock: FakeClock, age: float = 0.0) -> Ledger:
    return Ledger(whole_process=True, clock=clock, now=clock.now, age=lambda: age)


def head_at(step: int, *, evaluated: bool = False, path: str = "") -> Head:
    path = path or f"checkpoints/{step:08d}-00000001-a"
    tip = CheckpointRef(path=path, step=step, base=1, attempt="a", state_digest="d", manifest_digest="m", size=8)
    environment = Environment(accelerator="cpu", replicas=1, intra_op_threads=1, inter_op_threads=1, versions={})
    return Head(
        number=2, base=2, commits=1, checkpoints=(Retained(ref=tip, evaluated=evaluated),), identity={},
        identity_in=SetIn(entry=0, digest="0" * 32), environment=environment,
        environment_in=SetIn(entry=0, digest="0" * 32),
    )  # fmt: skip


def record_of(name: str, **changes: Any) -> AttemptRecord:
    """The record of an attempt that was killed at noon while it trained from step 100."""
    facts: dict[str, Any] = {
        "attempt": name, "host": "host", "pid": 1, "began": (NOON - timedelta(seconds=60)).isoformat(),
        "alive": NOON.isoformat(), "mark": "100", "from_step": 100, "step": 130, "committed_step": 100,
        "doing": "train", "seconds": {"start-up": 10.0, "compile": 20.0, "train": 30.0}, "uncommitted_seconds": 30.0,
    }  # fmt: skip
    return AttemptRecord.model_validate({**facts, **changes})


def written(home: Storage, name: str) -> AttemptRecord:
    """The record that a ledger wrote to the store."""
    return AttemptRecord.model_validate_json(home.read(f"attempts/{name}.json"))
