"""Chaos on gs://: seeded plans with workers that die, pause and overtake each other, on a store with faults.

Workers make real commits without TensorFlow (`run_commits.py`), and read retained checkpoints again. The workers of a
plan are threads of this process. Each has its own store object, and all use one fake Cloud Storage, whose faults are
drawn from the same seed. A worker dies by an error that no handler catches. It is raised before or after a call of the
store takes effect.

`python -m tests.end_to_end.cloud_chaos [--plans 200] [--first 0]`, or `make chaos`.
"""

import argparse
import logging
import random
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.tasks.foundation.checkpoint.retention import apply_retention, quarantine_damaged_tips, retention_policies
from baton.tasks.foundation.checkpoint.verify import find_damage
from baton.tasks.foundation.contracts.checkpoint import base_in_folder_name
from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Quarantine
from baton.tasks.foundation.errors import DamagedCheckpoint, StaleWriter, StorageError
from baton.tasks.foundation.log.appends import evaluation_due
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage import interface
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.telemetry.events import Silent
from tests.fakes.gcs.server import FakeGcs, FaultPlan
from tests.protocol.model_checker import accept, missing_programs
from tests.support.crashing_store import CrashingStore, Died
from tests.support.run_commits import SPEC, STEPS, Segments, begin, evaluate, tip_of

UNTIL_STEP = 6 * STEPS
_ACCEPTED = 10  # one log in so many is replayed in the model of the protocol, which compiles it
_STARTS = 4  # of each worker; then a worker without faults finishes the run
RATES = {
    "status": 0.03,
    "reset-before-body": 0.01,
    "reset-in-body": 0.01,
    "reset-after-body": 0.01,
    "response-lost": 0.03,
    "reset-in-response": 0.01,
    "stall": 0.005,
    "truncate": 0.01,
    "truncate-quietly": 0.01,
    "corrupt-download": 0.02,
    "corrupt-upload": 0.02,
    "short-chunk": 0.1,
    "unread": 0.01,
    "duplicate": 0.03,
    "expired-token": 0.005,
    "slow": 0.01,
}


@dataclass
class Outcome:
    """The result of one plan.

    Attributes:
        seed: the seed of the plan.
        faults: number of the store's faults by kind.
        ends: number of workers' ends by name of the exception, or "done".
        in_flight: number of deaths while a save was in flight.
        errors: descriptions of what is wrong; empty if the plan passed.
    """

    seed: int
    in_flight: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


def play(server: FakeGcs, seed: int) -> Outcome:
    """Play one plan from the beginning of a run to its end, and check the home."""
    chance = random.Random(seed)
    outcome = Outcome(seed)
    prefix = f"plan-{seed}"
    rates = {kind: rate * chance.choice((0, 1, 2)) for kind, rate in RATES.items()}
    server.faults = FaultPlan.random(seed, rates, stall_seconds=0.3, delay_seconds=0.002)
    entries: dict[str, bytes] = {}
    threads = [
        threading.Thread(target=_run_worker, args=(prefix, random.Random(f"{seed}/{worker}"), outcome))
        for worker in range(chance.choice((1, 2, 2, 3)))
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.02)
        _watch(server, prefix, entries, outcome)
    outcome.faults.update(one["fault"] for one in server.fault_run.log)
    server.faults = None
    home = CloudStorage("bucket", prefix, RetryPolicy(first_wait_seconds=0.01))
    _work(home)
    _watch(server, prefix, entries, outcome)
    _check_home(home, outcome)
    return outcome


def _run_worker(prefix: str, chance: random.Random, outcome: Outcome) -> None:
    """Work until the run ends. A worker that died, lost or met too many faults starts again, up to `_STARTS` times."""
    for _ in range(_STARTS):
        retry_policy = RetryPolicy(
            total_seconds=chance.choice((0.05, 1, 20)), stall_seconds=0.2, first_wait_seconds=0.005
        )
        store = CrashingStore(
            CloudStorage("bucket", prefix, retry_policy),
            chance,
            dies_at=chance.randrange(20, 100),
            pauses_at=chance.randrange(160),
        )
        try:
            _work(store)
        except (Died, StaleWriter, StorageError, DamagedCheckpoint) as end:
            outcome.ends[type(end).__name__] += 1
            outcome.in_flight += store.died_in_flight
        except BaseException as fault:  # noqa: BLE001 - any other exception is an error of the plan
            outcome.errors.append(f"a worker ended with {type(fault).__name__}: {fault}")
            return
        else:
            outcome.ends["done"] += 1
            return


def _work(home: Any) -> None:
    """Continue the run from its head to its end, as the relay does."""
    log = RunLog(home)
    log.require_whole()
    verify_bytes = False
    head = None
    with Segments(log, on_restore=lambda ref: log.note_read(ref.path)) as segments:
        while True:
            if head is None:
                head = quarantine_damaged_tips(
                    log, attempt=uuid.uuid4().hex, telemetry=Silent(), verify_bytes=verify_bytes
                )
            if head is None or head.tip is None:
                head = begin(log)
            try:
                if evaluation_due(head, SPEC):
                    evaluate(log, tip_of(segments.land()))
                    head = log.require_head()
                if tip_of(head).step >= UNTIL_STEP:
                    return
                head = segments.train(head)
            except DamagedCheckpoint:
                if verify_bytes:
                    raise
                verify_bytes = True
                head = None
                continue
            verify_bytes = False


def _watch(server: FakeGcs, prefix: str, entries: dict[str, bytes], outcome: Outcome) -> None:
    """Check that no entry changes after it was first seen; adds new entries to `entries`."""
    for name in server.store.names("bucket"):
        if name.startswith(f"{prefix}/log/0") and name not in entries:
            data = _bytes_of(server, name)
            if data is not None:
                entries[name] = data
    for name, data in entries.items():
        if _bytes_of(server, name) != data:
            outcome.errors.append(f"lost: {name} is missing or was changed")


def _bytes_of(server: FakeGcs, name: str) -> bytes | None:
    try:
        return bytes(server.store.bytes("bucket", name))
    except Exception:  # noqa: BLE001 - deleted between listing and reading; the next call reports it
        return None


def _check_home(home: CloudStorage, outcome: Outcome) -> None:
    """Check the log, the bytes of the retained checkpoints, and that no other files are left."""
    try:
        entries = list(RunLog(home).entries())
    except Exception as fault:  # noqa: BLE001 - any exception is an error of the plan
        outcome.errors.append(f"lost: {fault}")
        return
    _check_lineage(entries, outcome)
    if outcome.seed % _ACCEPTED == 0 and not missing_programs():
        refused = accept(entries).fault
        outcome.errors += [f"the model of the protocol refuses the log: {refused}"] if refused else []
    # Whoever comes next is another process, which has not failed to delete anything yet.
    interface._FAILURES.clear()
    # Deletes the checkpoints that a worker staged but did not commit before it died.
    apply_retention(RunLog(home), retention_policies(SPEC), attempt="keeper")
    head = RunLog(home).require_head()
    for ref in head.retained:
        fault = find_damage(home, ref, read_bytes=True)
        if fault is not None:
            outcome.errors.append(f"lost: {fault}")
    named = {ref.path for ref in (*head.retained, *head.quarantined)} | {old.path for old in head.retired}
    for path in home.files(""):
        folder = "/".join(path.split("/")[:2])
        # A checkpoint staged on the current base may still be committed by its writer, so it is kept.
        if not path.startswith("log/") and folder not in named and base_in_folder_name(folder) != head.base:
            outcome.errors.append(f"left behind: {path}")


def _check_lineage(entries: list[Entry], outcome: Outcome) -> None:
    """Check the parent, base and digest of each commit, and that each step is committed once."""
    before: Any = None
    known = _known_digests()
    steps = []
    for entry in entries:
        body = entry.body
        if isinstance(body, Quarantine):
            outcome.errors.append(f"lost: {body.path} was quarantined, although its bytes in the store are right")
        if isinstance(body, Commit):
            tip = before.tip.path if before is not None and before.tip is not None else None
            if body.parent != tip or body.checkpoint.base != (before.base if before is not None else 0):
                outcome.errors.append(f"wrong: entry {entry.number} has the parent {body.parent}; the tip was {tip}")
            if known[body.checkpoint.step] != body.checkpoint.state_digest:
                outcome.errors.append(f"wrong: entry {entry.number} holds another state at step {body.checkpoint.step}")
            steps.append(body.checkpoint.step)
        if before is not None and before.read and not entry.head.read:
            outcome.errors.append(f"lost: entry {entry.number} retains no checkpoint that was read whole")
        before = entry.head
    if steps != list(range(0, UNTIL_STEP + 1, STEPS)):
        outcome.errors.append(f"doubled or lost: the committed steps are {steps}")


def _known_digests() -> dict[int, str]:
    """Digests by step. A checkpoint's content is a function of its parent's content."""
    import hashlib

    content, known = hashlib.sha256(b"0").digest(), {}
    for step in range(0, UNTIL_STEP + 1, STEPS):
        known[step] = content.hex()
        content = hashlib.sha256(content).digest()
    return known


def play_all(seeds: range, print_line: Callable[[str], None]) -> list[Outcome]:
    """Play the plans one after the other on one server; `print_line` receives each error."""
    outcomes = []
    with FakeGcs() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        # Small parts, so that small files use resumable uploads and are downloaded in parts.
        patch.setattr("baton.tasks.foundation.storage.gcs.storage._PART_BYTES", 4096)
        for seed in seeds:
            outcomes.append(play(server, seed))
            for line in outcomes[-1].errors:
                print_line(f"OFF  plan {seed}: {line}")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("baton").setLevel(logging.ERROR)  # each retry logs a warning
    outcomes = play_all(range(options.first, options.first + options.plans), lambda line: print(line, flush=True))  # noqa: T201
    faults = sum((outcome.faults for outcome in outcomes), Counter[str]())
    ends = sum((outcome.ends for outcome in outcomes), Counter[str]())
    failed = sum(bool(outcome.errors) for outcome in outcomes)
    lines = [f"{len(outcomes)} plans, {failed} of them OFF", f"store faults: {faults.total()}, {dict(faults)}"]
    in_flight = sum(outcome.in_flight for outcome in outcomes)
    lines.append(
        f"ends of workers: {dict(ends)}; {in_flight} deaths between the first file of a save and its log entry"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
