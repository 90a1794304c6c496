"""Seeded plans of what goes wrong on gs://: workers that die, pause and overtake each other while the store misbehaves.

A worker goes the real way of a commit without TensorFlow (`run_commits.py`). All workers of a plan are threads of this
process, each with a store of its own, against a fake Cloud Storage with faults drawn from the same seed. Dying is an
error that nothing catches, raised before or after a call of the store has taken effect.

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

from tasks.foundation.checkpoint.retention import clear_away, policies_of
from tasks.foundation.checkpoint.verify import damage
from tasks.foundation.contracts.checkpoint import base_in_folder_name
from tasks.foundation.contracts.log_entry import Commit, Entry, Quarantine
from tasks.foundation.errors import DamagedCheckpoint, StaleWriter, StorageError
from tasks.foundation.runlog.commits import evaluation_due, sound_tip
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.gcs.retrying import RetryPolicy
from tasks.foundation.storage.gcs.storage import CloudStorage
from tasks.foundation.telemetry.events import Silent
from tests.fakes.gcs.fake_gcs import FakeGcs, FaultPlan
from tests.support.run_commits import SPEC, STEPS, begin, evaluate, train

UNTIL_STEP = 6 * STEPS
_CALLS = {
    *("read", "exists", "create", "write", "upload", "copy", "stat", "checksum", "download", "read_range"),
    *("files", "folders", "delete"),
}
_LIVES = 4  # of each worker; then one that nothing happens to ends the run
RATES = {
    "status": 0.03,
    "reset-before-body": 0.01,
    "reset-in-body": 0.01,
    "reset-after-body": 0.01,
    "answer-lost": 0.03,
    "reset-in-answer": 0.01,
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


class Died(BaseException):
    """The worker is dead; nothing of it happens any more."""


class Mortal:
    """A store that its worker dies of, or pauses in, at given calls."""

    def __init__(self, store: Any, chance: random.Random, counter: list[int], dies_at: int, pauses_at: int) -> None:
        self._store, self._chance, self._counter = store, chance, counter
        self._dies_at, self._pauses_at = dies_at, pauses_at
        self._after = chance.random() < 0.5

    def at(self, folder: str) -> "Mortal":
        return Mortal(self._store.at(folder), self._chance, self._counter, self._dies_at, self._pauses_at)

    def with_deadline(self, seconds: float) -> "Mortal":
        return Mortal(self._store.with_deadline(seconds), self._chance, self._counter, self._dies_at, self._pauses_at)

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._store, name)
        if name not in _CALLS:
            return inner

        def call(*arguments: Any, **options: Any) -> Any:
            number = self._counter[0]
            self._counter[0] += 1
            if number == self._pauses_at:
                time.sleep(self._chance.uniform(0, 0.2))
            if number > self._dies_at or (number == self._dies_at and not self._after):
                raise Died
            answer = inner(*arguments, **options)
            answer = iter(list(answer)) if name in {"files", "folders"} else answer
            if number == self._dies_at:
                raise Died
            return answer

        return call


@dataclass
class Outcome:
    """What one plan came to.

    Attributes:
        faults: what the store did, by kind.
        ends: how the workers ended, by name of what ended them.
        off: what must not be.
    """

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    off: list[str] = field(default_factory=list)


def play(server: FakeGcs, seed: int) -> Outcome:
    """One plan, from the beginning of a run to its end, and a look at what is there then."""
    chance = random.Random(seed)
    outcome = Outcome(seed)
    prefix = f"plan-{seed}"
    rates = {kind: rate * chance.choice((0, 1, 2)) for kind, rate in RATES.items()}
    server.faults = FaultPlan.random(seed, rates, stall_seconds=0.3, delay_seconds=0.002)
    entries: dict[str, bytes] = {}
    threads = [
        threading.Thread(target=_live, args=(prefix, random.Random(f"{seed}/{worker}"), outcome))
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
    _examine(home, outcome)
    return outcome


def _live(prefix: str, chance: random.Random, outcome: Outcome) -> None:
    """A worker's lives: each ends by dying, by losing, by a store that is too bad, or with the run."""
    for _ in range(_LIVES):
        patience = RetryPolicy(total_seconds=chance.choice((0.05, 1, 20)), stall_seconds=0.2, first_wait_seconds=0.005)
        store = Mortal(
            CloudStorage("bucket", prefix, patience), chance, [0], chance.randrange(20, 160), chance.randrange(160)
        )
        try:
            _work(store)
        except (Died, StaleWriter, StorageError, DamagedCheckpoint) as end:
            outcome.ends[type(end).__name__] += 1
        except BaseException as fault:  # noqa: BLE001 - anything else is off
            outcome.off.append(f"a worker ended with {type(fault).__name__}: {fault}")
            return
        else:
            outcome.ends["done"] += 1
            return


def _work(home: Any) -> None:
    """As the relay does: from wherever the log says that the run stands."""
    log = RunLog(home)
    log.require_whole()
    suspicious = False
    while True:
        head = sound_tip(log, attempt=uuid.uuid4().hex, telemetry=Silent(), suspicious=suspicious)
        if head is None or head.tip is None:
            head = begin(log)
        if head.tip is None:
            raise AssertionError("a run that was begun has a tip")
        try:
            if evaluation_due(head, SPEC):
                evaluate(log, head.tip)
            if head.tip.step >= UNTIL_STEP:
                return
            train(log, head)
        except DamagedCheckpoint:
            if suspicious:
                raise
            suspicious = True
            continue
        suspicious = False


def _watch(server: FakeGcs, prefix: str, entries: dict[str, bytes], outcome: Outcome) -> None:
    """An entry that could once be read stays as it is."""
    for name in server.store.names("bucket"):
        if name.startswith(f"{prefix}/log/0") and name not in entries:
            data = _bytes_of(server, name)
            if data is not None:
                entries[name] = data
    for name, data in entries.items():
        if _bytes_of(server, name) != data:
            outcome.off.append(f"lost: {name} is gone or was changed")


def _bytes_of(server: FakeGcs, name: str) -> bytes | None:
    try:
        return bytes(server.store.bytes("bucket", name))
    except Exception:  # noqa: BLE001 - taken away between the two looks; the next one tells
        return None


def _examine(home: CloudStorage, outcome: Outcome) -> None:
    try:
        entries = list(RunLog(home).entries())
    except Exception as fault:  # noqa: BLE001 - whatever it is, it is off
        outcome.off.append(f"lost: {fault}")
        return
    _lineage(entries, outcome)
    # What a worker had staged that died after the last commit is swept by the next one.
    clear_away(RunLog(home), policies_of(SPEC), attempt="keeper")
    head = RunLog(home).require_head()
    for ref in head.retained:
        fault = damage(home, ref, read=True)
        if fault is not None:
            outcome.off.append(f"lost: {fault}")
    named = {ref.path for ref in (*head.retained, *head.quarantined)} | {old.path for old in head.retired}
    for path in home.files(""):
        folder = "/".join(path.split("/")[:2])
        # On a base that is still current somebody may be at work.
        if not path.startswith("log/") and folder not in named and base_in_folder_name(folder) != head.base:
            outcome.off.append(f"left behind: {path}")


def _lineage(entries: list[Entry], outcome: Outcome) -> None:
    before: Any = None
    known = _known_digests()
    steps = []
    for entry in entries:
        body = entry.body
        if isinstance(body, Quarantine):
            outcome.off.append(f"lost: {body.path} was quarantined, though no byte of it was ever wrong in the store")
        if isinstance(body, Commit):
            tip = before.tip.path if before is not None and before.tip is not None else None
            if body.parent != tip or body.checkpoint.base != (before.base if before is not None else 0):
                outcome.off.append(f"wrong: entry {entry.number} stands on {body.parent}, the tip was {tip}")
            if known[body.checkpoint.step] != body.checkpoint.state_digest:
                outcome.off.append(f"wrong: entry {entry.number} holds another state at step {body.checkpoint.step}")
            steps.append(body.checkpoint.step)
        before = entry.head
    if steps != list(range(0, UNTIL_STEP + 1, STEPS)):
        outcome.off.append(f"doubled or lost: the commits are of steps {steps}")


def _known_digests() -> dict[int, str]:
    """A checkpoint's content is a function of its parent's."""
    import hashlib

    content, known = hashlib.sha256(b"0").digest(), {}
    for step in range(0, UNTIL_STEP + 1, STEPS):
        known[step] = content.hex()
        content = hashlib.sha256(content).digest()
    return known


def play_all(seeds: range, say: Callable[[str], None]) -> list[Outcome]:
    """All plans, one after the other, on one server."""
    outcomes = []
    with FakeGcs(md5=False) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        # So that small files go up by resumable uploads, and come down in parts.
        patch.setattr("tasks.foundation.storage.gcs.storage._PART_BYTES", 4096)
        for seed in seeds:
            outcomes.append(play(server, seed))
            for line in outcomes[-1].off:
                say(f"OFF  plan {seed}: {line}")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("tasks").setLevel(logging.ERROR)  # waits are what this is about
    outcomes = play_all(range(options.first, options.first + options.plans), lambda line: print(line, flush=True))  # noqa: T201
    faults = sum((outcome.faults for outcome in outcomes), Counter[str]())
    ends = sum((outcome.ends for outcome in outcomes), Counter[str]())
    off = sum(bool(outcome.off) for outcome in outcomes)
    told = [f"{len(outcomes)} plans, {off} of them OFF", f"store faults: {faults.total()}, {dict(faults)}"]
    sys.stdout.write("\n".join([*told, f"lives of workers ended by: {dict(ends)}"]) + "\n")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
