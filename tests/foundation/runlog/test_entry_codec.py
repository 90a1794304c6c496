"""Entries in files: lean, and the same when they are read as when they were folded."""

import json
import random
import uuid

import pytest

from tasks.foundation.checkpoint.retention import KeepEvery, KeepLast, apply_retention
from tasks.foundation.contracts.checkpoint import CheckpointRef, WholeRead, checkpoint_folder
from tasks.foundation.contracts.lean_entry import KeptPage, PageRef
from tasks.foundation.contracts.log_entry import (
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
)
from tasks.foundation.errors import RunLogError
from tasks.foundation.runlog import page_layout
from tasks.foundation.runlog.folding import fold
from tasks.foundation.runlog.kept_pages import PageStore, page_digest
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.memory import MemoryStorage
from tests.support.counting_storage import Counting
from tests.support.random_logs import reads
from tests.support.small_logs import ENVIRONMENT, edit_entry, evaluation, head_of, on_test, origin

ENTRY_TIME = "2026-01-01T00:00:00+00:00"
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
    return commit.model_copy(update={"read_whole": reads(head, chance)})


def without_order(head: Head) -> Head:
    """A head to compare: the order of what was evaluated means nothing, and a file does not keep it."""
    return head.model_copy(update={"evaluated": tuple(sorted(head.evaluated))})


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
        read = head_of(RunLog(memory) if number % 10 == 0 else log)
        assert without_order(read) == without_order(whole)
    assert [repr(entry.body) for entry in RunLog(memory).entries()] == [repr(body) for body in bodies]
    before: Head | None = None
    for entry in RunLog(memory).entries():
        before = fold(before, entry.body)
        assert without_order(entry.head) == without_order(before)


def long_run(home: Storage, commits: int) -> RunLog:
    chance, log = random.Random(0), RunLog(home)
    log.append(lambda _: Origin(identity=LARGE, environment=ENVIRONMENT), attempt="a")
    policies = [KeepLast(3), KeepEvery(1000)]
    for number in range(commits):
        head = head_of(log)
        read = tuple(WholeRead(path=ref.path, time=ENTRY_TIME) for ref in head.retained[-1:])
        body = commit_of(head, number * 500, chance).model_copy(update={"read_whole": read})
        log.append(lambda _, body=body: body, attempt="a")  # type: ignore[misc]
        log.append(lambda _, body=body: evaluation(body.checkpoint, accuracy=0.5), attempt="a")  # type: ignore[misc]
        apply_retention(log, policies, attempt="a")
    return log


@pytest.mark.slow
def test_entries_stay_small_however_many_are_kept(memory: MemoryStorage) -> None:
    log = long_run(memory, 600)
    sizes = {path: len(memory.read(path)) for path in memory.files("log")}
    head = head_of(log)
    assert len(head.retained) >= 300
    assert sizes.pop("log/00000000.json") < 1_100_000  # it sets the identity, once
    assert max(size for path, size in sizes.items() if path.startswith("log/0")) < 4096 + 256  # with what was read
    paged = sum(size for path, size in sizes.items() if "/retained/" in path)
    assert paged < 5 * 300 * 300  # a checkpoint is written a few times


def test_head_of_a_long_log_reads_no_pages(memory: MemoryStorage) -> None:
    long_run(memory, 100)
    counted = Counting(memory)
    head = head_of(RunLog(counted))
    assert head.tip is not None
    assert head.tip.path in head.evaluated
    assert whole_ref(10**6, 10**6) not in head.retained
    assert len(head.retained) > 50
    # HINT, the newest entry, and the one after it
    assert (counted.calls["read"], counted.calls["exists"]) == (2, 1)
    assert head.identity["data.folder"] == "datasets/x"
    assert (counted.calls["read"], counted.calls["exists"]) == (3, 1)  # and the origin
    assert [ref.step for ref in head.retained if ref.step % 1000 == 0] == [*range(0, 50_000, 1000)]
    assert counted.calls["read"] < 3 + 12


def test_entry_with_another_identity_is_refused(memory: MemoryStorage) -> None:
    log = long_run(memory, 2)
    newest = head_of(log).number
    edit_entry(memory, newest, lambda entry: entry["head"]["identity"].update(digest="0" * 32))
    with pytest.raises(
        RunLogError, match=rf"{newest:08d}\.json: entry 0 does not have its identity, which has the digest 000"
    ):
        dict(head_of(RunLog(memory)).identity)
    edit_entry(memory, newest, lambda entry: entry["head"]["identity"].update(entry=9999))
    with pytest.raises(RunLogError, match="entry 9999 does not have its identity"):
        RunLog(memory).head()


def test_changed_origin_is_refused(memory: MemoryStorage) -> None:
    long_run(memory, 2)
    edit_entry(memory, 0, lambda entry: entry["body"]["identity"].update(seed=7))
    with pytest.raises(RunLogError, match=r"log/00000000\.json: entry 0 does not have its identity"):
        dict(head_of(RunLog(memory)).identity)


@pytest.mark.parametrize("data", [None, b"", b'{"format":1,"checkpoints":[]}'], ids=["missing", "empty", "other"])
def test_damaged_page_is_named(memory: MemoryStorage, data: bytes | None) -> None:
    long_run(memory, 40)
    head = head_of(RunLog(memory))
    for path in list(memory.files("log/retained")):
        memory.delete(path)
        if data is not None:
            memory.write(path, data)
    words = "is missing; restore it" if data is None else "is damaged: its digest is another one; restore it"
    with pytest.raises(RunLogError, match=rf"log/retained/[0-9a-f]{{32}}\.json {words} from a backup"):
        tuple(head_of(RunLog(memory)).retained)
    assert head.tip == head_of(RunLog(memory)).tip  # a run goes on without what it kept for good


def test_pages_do_not_grow_beyond_what_readers_read(memory: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight pages become one, until they are large; then there are more pages."""
    monkeypatch.setattr(page_layout, "_LARGE", 24)
    log, chance = RunLog(memory), random.Random(1)
    log.append(lambda _: origin(), attempt="a")
    for step in range(260):
        log.append(lambda head, step=step: commit_of(require(head), step, chance), attempt="a")  # type: ignore[misc]
    pages = [KeptPage.model_validate_json(memory.read(path)) for path in memory.files("log/retained")]
    assert max(len(page.checkpoints) for page in pages) == 24
    assert [ref.step for ref in head_of(RunLog(memory)).retained] == list(range(260))


def require(head: Head | None) -> Head:
    assert head is not None
    return head


def test_a_page_whose_paths_say_too_little_is_refused(memory: MemoryStorage) -> None:
    kept = {"path": "checkpoints/x", "state_digest": "d", "manifest_digest": "m", "size": 1}
    data = json.dumps({"format": 1, "checkpoints": [kept]}).encode()
    store, page = PageStore(memory), PageRef(digest=page_digest(data), count=1)
    memory.write(f"log/retained/{page.digest}.json", data)
    with pytest.raises(RunLogError, match=rf"log/retained/{page.digest}\.json: not a readable KeptPage: "):
        store.page(page)
