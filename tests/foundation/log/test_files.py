"""Entries in files: lean, and the same when they are read as when they were folded."""

import json
import random
import uuid

import pytest

from baton.tasks.foundation.checkpoint.retention import KeepBestEvaluated, KeepLast, KeepVerified, apply_retention
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef, checkpoint_folder
from baton.tasks.foundation.contracts.log_entry import (
    Body,
    Change,
    Commit,
    Finish,
    Head,
    MetricRow,
    Origin,
    Quarantine,
    Retire,
    Rewind,
    WorkerStats,
)
from baton.tasks.foundation.errors import RunLogError
from baton.tasks.foundation.log.files import entry_path
from baton.tasks.foundation.log.fold import fold
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.counting_storage import Counting
from tests.support.random_logs import reads
from tests.support.small_logs import ENVIRONMENT, edit_entry, evaluation, head_of, on_test, origin

LARGE = {"data.folder": "datasets/x", "model.config": ["layer " * 16] * 10_000}  # 1 MB


def whole_ref(step: int, base: int, attempt: str | None = None) -> CheckpointRef:
    """A reference as large as real ones."""
    attempt = uuid.UUID(int=step).hex if attempt is None else attempt
    digest = f"{step:064x}"
    return CheckpointRef(
        path=checkpoint_folder(step=step, base=base, attempt=attempt),
        step=step, base=base, attempt=attempt, state_digest=digest, manifest_digest=digest, size=10**9 + step,
    )  # fmt: skip


def commit_of(head: Head, step: int, chance: random.Random) -> Commit:
    causes = ("restore", "compile", "train", "input wait", "stage", "commit")
    rows = tuple(
        MetricRow(step=step + row, metrics={"loss": chance.random(), "gain": chance.random()}) for row in (1, 2)
    )
    return Commit(
        checkpoint=whole_ref(step, head.base, chance.choice([None, "a-b"])),
        parent=None if head.tip is None else head.tip.path,
        exit_reason=chance.choice(["segment_end", "interval"]),
        history=rows,
        examples=1000,
        seconds={cause: chance.random() for cause in causes},
    )


def anything(head: Head, chance: random.Random) -> Body:  # noqa: PLR0911 - one return per kind
    """A body that can follow a head."""
    refs = list(head.retained)
    kinds = ["commit"] * 6 + ["change", "identity"]
    if head.tip is not None:
        kinds += ["evaluate", "evaluate", "test", "finish", "quarantine", "retire"]
        kinds += ["rewind"] if len(refs) > 1 else []
    kind = chance.choice(kinds)
    if kind == "evaluate":
        return evaluation(chance.choice([refs[-1], chance.choice(refs)]), accuracy=chance.random())
    if kind == "test":
        return on_test(chance.choice(refs), accuracy=chance.random())
    if kind == "quarantine":
        return Quarantine(path=chance.choice([refs[-1], *refs]).path, reason="damaged")
    if kind == "retire":
        paths = tuple(ref.path for ref in refs[:-1] if chance.random() < chance.choice([0.05, 0.5]))
        return Retire(paths=paths, deleted=tuple(old.path for old in head.retired[:2]))
    if kind == "rewind":
        to = chance.choice(refs[-5:-1]) if chance.random() < 0.9 else chance.choice(refs[:-1])
        return Rewind(to=to, blown_up_at=to.step + 5, reason="NaN", skip_batches=3)
    if kind == "finish":
        return Finish(checkpoint=refs[-1], reason="EarlyStopping")
    if kind == "change":
        return Change(environment=ENVIRONMENT.model_copy(update={"replicas": chance.randrange(1, 9)}))
    if kind == "identity":
        return Change(environment=ENVIRONMENT, identity={"seed": chance.randrange(99)}, accepted=("train.seed",))
    commit = commit_of(head, 10 + (head.tip.step if head.tip else 0) + chance.randrange(100) * 10, chance)
    return commit.model_copy(update={"read": reads(head, chance)})


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, *range(2, 12)))])
def test_log_reads_as_it_was_folded(memory: MemoryStorage, seed: int) -> None:
    chance = random.Random(seed)
    log, whole = RunLog(memory), fold(None, origin())
    log.append(lambda _: origin(), attempt="a")
    bodies: list[Body] = [origin()]
    for number in range(120):
        body = anything(whole, chance)
        whole = fold(whole, body)
        bodies.append(body)
        if chance.random() < 0.1:
            log = RunLog(memory)  # another process goes on
        log.append(lambda _, body=body: body, attempt="a")  # type: ignore[misc]
        assert head_of(RunLog(memory) if number % 10 == 0 else log) == whole
    assert [repr(entry.body) for entry in RunLog(memory).entries()] == [repr(body) for body in bodies]
    before: Head | None = None
    for entry in RunLog(memory).entries():
        before = fold(before, entry.body)
        assert entry.head == before


def long_run(home: Storage, commits: int) -> RunLog:
    """A run with 20 metrics and 8 hosts."""
    chance, log = random.Random(0), RunLog(home)
    log.append(lambda _: Origin(identity=LARGE, environment=ENVIRONMENT), attempt="a")
    names = [f"metric_{number:02}" for number in range(20)]
    for number in range(commits):
        head = head_of(log)
        row = MetricRow(step=max(number * 500, 1), metrics={name: chance.random() for name in names})
        hosts = tuple(
            WorkerStats(host=host, replicas=8, steps=500, examples=10**6, train_seconds=chance.random() * 1000,
                        input_wait_seconds=chance.random(), losses=tuple(chance.random() for _ in range(8)))
            for host in range(8)
        )  # fmt: skip
        read = (head.tip.path,) if head.tip is not None else ()
        body = commit_of(head, number * 500, chance)
        body = body.model_copy(
            update={"checkpoint": whole_ref(number * 500, head.base), "history": (row,), "workers": hosts, "read": read}
        )
        log.append(lambda _, body=body: body, attempt="a")  # type: ignore[misc]
        metrics = {f"accuracy_{name}": chance.random() for name in names} | {"accuracy": chance.random()}
        log.append(lambda _, body=body, metrics=metrics: evaluation(body.checkpoint, **metrics), attempt="a")  # type: ignore[misc]
        apply_retention(log, [KeepLast(3), KeepVerified(), KeepBestEvaluated()], attempt="a")
    return log


def test_head_is_small_whatever_the_model_and_the_length(memory: MemoryStorage) -> None:
    log = long_run(memory, 100)
    sizes = [
        len(json.dumps(json.loads(memory.read(entry_path(number)))["head"], separators=(",", ":")))
        for number in range(head_of(log).number + 1)
    ]
    assert max(sizes) < 4096
    assert max(sizes[-100:]) < max(sizes[:100]) + 64, "it does not grow"
    assert len(memory.read(entry_path(0))) > 900_000


def test_a_start_reads_the_entry_that_has_the_identity_once(memory: MemoryStorage) -> None:
    long_run(memory, 30)
    counted = Counting(memory)
    log = RunLog(counted)
    assert head_of(log).identity["data.folder"] == "datasets/x"
    # HINT, the newest entry, the first one, and whether there is one after the newest
    assert (counted.calls["read"], counted.calls["exists"]) == (3, 1)
    assert log.entry(head_of(log).number - 1).head.identity is head_of(log).identity


def test_a_list_reads_the_newest_entry_alone(memory: MemoryStorage) -> None:
    newest = long_run(memory, 30).newest()
    counted = Counting(memory)
    stored = RunLog(counted).newest_stored()
    assert stored is not None
    assert newest is not None
    assert (counted.calls["read"], counted.calls["exists"]) == (2, 1)  # HINT and the entry
    assert (stored.head.tip, stored.totals) == (newest.head.tip, newest.totals)


@pytest.mark.parametrize("what", ["identity", "environment"])
def test_entry_with_another_identity_is_refused(memory: MemoryStorage, what: str) -> None:
    log = long_run(memory, 2)
    newest = head_of(log).number
    edit_entry(memory, newest, lambda entry: entry["head"][what].update(digest="0" * 32))
    words = rf"{newest:08d}\.json: entry 0 does not have its {what}, which has the digest 000"
    with pytest.raises(RunLogError, match=words):
        RunLog(memory).head()
    edit_entry(memory, newest, lambda entry: entry["head"][what].update(entry=9999))
    with pytest.raises(RunLogError, match=f"entry 9999 does not have its {what}"):
        RunLog(memory).head()


def test_changed_origin_is_refused(memory: MemoryStorage) -> None:
    long_run(memory, 2)
    edit_entry(memory, 0, lambda entry: entry["body"]["identity"].update(seed=7))
    with pytest.raises(RunLogError, match=r"log/00000000\.json: entry 0 does not have its identity"):
        RunLog(memory).head()


def test_keys_of_a_newer_environment_are_ignored(memory: MemoryStorage) -> None:
    log = long_run(memory, 2)
    edit_entry(memory, 0, lambda entry: entry["body"]["environment"].update(watts=7))
    assert head_of(RunLog(memory)) == head_of(log)
