"""A clock that is told the time, a head to begin from, and attempts' records with invented numbers."""

from datetime import UTC, datetime, timedelta
from typing import Any

from tasks.foundation.contracts.attempt import AttemptRecord
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Environment, Head
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.ledger import Ledger

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


class Clock:
    """Seconds and the time of day, both moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.day = NOON

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return self.day

    def passes(self, seconds: float) -> None:
        self.seconds += seconds
        self.day += timedelta(seconds=seconds)


def ledger_of(clock: Clock, age: float = 0.0) -> Ledger:
    return Ledger(whole_process=True, clock=clock, now=clock.now, age=lambda: age)


def head_at(step: int, *, evaluated: bool = False, path: str = "") -> Head:
    path = path or f"checkpoints/{step:08d}-00000001-a"
    tip = CheckpointRef(path=path, step=step, base=1, attempt="a", state_digest="d", manifest_digest="m", size=8)
    environment = Environment(accelerator="cpu", replicas=1, intra_op_threads=1, inter_op_threads=1, versions={})
    return Head(
        number=2, base=2, commits=1, tip=tip, retained=(tip,), retired=(), quarantined=(), best=None,
        evaluated=(path,) if evaluated else (), skipped_batches=0, identity={}, environment=environment,
    )  # fmt: skip


def record_of(name: str, **changes: Any) -> AttemptRecord:
    """An attempt that died without a word at noon, in train, on its way from step 100."""
    facts: dict[str, Any] = {
        "attempt": name, "host": "host", "pid": 1, "began": (NOON - timedelta(seconds=60)).isoformat(),
        "alive": NOON.isoformat(), "mark": "100", "from_step": 100, "step": 130, "committed_step": 100,
        "doing": "train", "seconds": {"start-up": 10.0, "compile": 20.0, "train": 30.0}, "uncommitted_seconds": 30.0,
    }  # fmt: skip
    return AttemptRecord.model_validate({**facts, **changes})


def written(home: Storage, name: str) -> AttemptRecord:
    """A record as the ledger left it in the store."""
    return AttemptRecord.model_validate_json(home.read(f"attempts/{name}.json"))
