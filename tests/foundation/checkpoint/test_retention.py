"""Retention: which checkpoints are kept and deleted, and that a crash at any call does not change the final state."""

from collections.abc import Iterator, Sequence

import pytest

from baton.tasks.foundation.checkpoint.retention import (
    KeepBestEvaluated,
    KeepBorders,
    KeepEvery,
    KeepLast,
    KeepVerified,
    RetentionPolicy,
    apply_retention,
    files_to_delete,
    retention_policies,
)
from baton.tasks.foundation.contracts.log_entry import Change, Head, Retire
from baton.tasks.foundation.contracts.run_spec import CheckpointSpec, KeepBest, RunSpec
from baton.tasks.foundation.errors import StorageError
from baton.tasks.foundation.log.appends import quarantine
from baton.tasks.foundation.log.fold import fold
from baton.tasks.foundation.log.history import commit_of, restorable
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage, discard
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.counting_storage import Counting
from tests.support.small_logs import (
    ENVIRONMENT,
    assert_sound,
    begin,
    committing,
    evaluation,
    folders,
    head_of,
    origin,
    ref,
    stage,
    train,
)


def head_with(*steps: int, best: int | None = None) -> Head:
    head = fold(None, origin())
    for step in steps:
        head = fold(head, committing(ref(step, head.base)))
        if step == best:
            assert head.tip is not None
            head = fold(head, evaluation(head.tip, accuracy=1.0))
    return head


@pytest.mark.parametrize(
    ("policy", "best", "kept"),
    [
        (KeepLast(1), None, {50}),
        (KeepLast(3), None, {30, 40, 50}),
        (KeepLast(99), None, {0, 10, 20, 30, 40, 50}),
        (KeepEvery(20), None, {0, 20, 40}),
        (KeepEvery(7), None, {0}),
        (KeepEvery(1), None, {0, 10, 20, 30, 40, 50}),
        (KeepBestEvaluated(), None, set()),
        (KeepBestEvaluated(), 20, {20}),
        (KeepBestEvaluated(), 50, {50}),
    ],
)
def test_policies_keep_the_right_checkpoints(policy: RetentionPolicy, best: int | None, kept: set[int]) -> None:
    head = head_with(0, 10, 20, 30, 40, 50, best=best)
    steps = {each.path: each.step for each in head.retained}
    assert {steps[path] for path in policy.keeps(head)} == kept


@pytest.mark.parametrize(
    ("spec", "policies"),
    [
        (CheckpointSpec(), (KeepLast(3), KeepVerified())),
        (CheckpointSpec(keep_last=1, keep_every_steps=5), (KeepLast(1), KeepVerified(), KeepEvery(5))),
        (
            CheckpointSpec(keep_best=KeepBest(metric="loss", mode="min"), keep_every_steps=9),
            (KeepLast(3), KeepVerified(), KeepEvery(9), KeepBestEvaluated()),
        ),
    ],
)
def test_a_run_file_selects_the_policies(spec: CheckpointSpec, policies: tuple[RetentionPolicy, ...]) -> None:
    run = RunSpec.model_validate(
        {
            "run": "r",
            "storage": "memory://r",
            "data": {"source": "digits"},
            "model": "model.py:build_model",
            "train": {"steps": 1, "global_batch_size": 1},
        }
    ).model_copy(update={"checkpoint": spec})
    assert retention_policies(run) == policies
    rewinding = run.model_copy(update={"train": run.train.model_copy(update={"on_blowup": "rewind"})})
    assert retention_policies(rewinding) == (*policies, KeepBorders())


def steps_on_disk(store: Storage) -> list[int]:
    return sorted(int(folder.removeprefix("checkpoints/").split("-")[0]) for folder in folders(store))


def test_retired_checkpoints_are_deleted_two_commits_later(store: Storage) -> None:
    log = begin(store)
    seen = []
    for step in (10, 20, 30, 40, 50):
        train(log, step)
        apply_retention(log, [KeepLast(1)], attempt="keeper")
        seen.append(steps_on_disk(store))
        assert [kept.step for kept in head_of(log).retained] == [step]
        assert_sound(store)
    assert seen == [[0, 10], [0, 10, 20], [10, 20, 30], [20, 30, 40], [30, 40, 50]]


def test_retiring_is_logged_before_anything_is_deleted(store: Storage) -> None:
    log = begin(store)
    for step in (10, 20, 30, 40):
        train(log, step)
        apply_retention(log, [KeepLast(1)], attempt="keeper")
    retired: set[str] = set()
    for entry in log.entries():
        if isinstance(entry.body, Retire):
            assert set(entry.body.deleted) <= retired
            retired |= set(entry.body.paths)
    assert retired


def test_retention_with_nothing_to_do_writes_nothing(store: Storage) -> None:
    apply_retention(RunLog(store), [KeepLast(1)], attempt="keeper")
    assert list(store.files("")) == []
    log = begin(store)
    before = sorted(store.files(""))
    apply_retention(log, [KeepLast(1)], attempt="keeper")
    assert sorted(store.files("")) == before


class RemoteMemory(MemoryStorage):
    """Memory as a remote store: what is due for deletion is listed beforehand."""

    transfers = 4  # type: ignore[assignment]


class Unlisted(RemoteMemory):
    def files(self, folder: str) -> Iterator[str]:
        raise StorageError(f"{folder}: 503")


class Undeletable(RemoteMemory):
    def delete(self, folder: str, *, files: Sequence[str] | None = None) -> None:  # noqa: ARG002 - as in `Storage`
        raise StorageError(f"{folder}: 403")


def test_files_are_listed_for_what_is_deleted_next(memory: MemoryStorage) -> None:
    log = begin(memory)
    for step in (10, 20, 30):
        train(log, step)
        apply_retention(log, [KeepLast(1)], attempt="keeper")
    head = head_of(log)
    gone, due, later = (old.path for old in head.retired)
    remote = RemoteMemory(memory.root)
    listed = {gone: (), due: (f"{due}/ckpt.data", f"{due}/manifest.json")}
    assert {path: tuple(sorted(files)) for path, files in files_to_delete(remote, head).items()} == listed
    assert later in folders(memory)
    assert files_to_delete(memory, head) == files_to_delete(remote, None) == {}
    assert files_to_delete(Unlisted(memory.root), head) == {}, "deletion lists them, or reports why it cannot"


def test_what_cannot_be_deleted_is_not_listed_at_each_commit(memory: MemoryStorage) -> None:
    log = begin(memory)
    for step in (10, 20, 30):
        train(log, step)
        apply_retention(log, [KeepLast(1)], attempt="keeper")
    head, remote = head_of(log), Undeletable(memory.root)
    due = head.retired[1].path
    assert due in files_to_delete(remote, head)
    assert not discard(remote, due, now=head.commits + 1)
    assert due not in files_to_delete(remote, head)
    assert due in files_to_delete(remote, head.model_copy(update={"commits": head.commits + 1}))


def test_retention_is_idempotent(store: Storage) -> None:
    log = begin(store)
    for step in (10, 20, 30):
        train(log, step)
        apply_retention(log, [KeepLast(1)], attempt="keeper")
    head, files = head_of(log), sorted(store.files(""))
    for _ in range(3):
        apply_retention(log, [KeepLast(1)], attempt="another")
    assert head_of(log) == head
    assert sorted(store.files("")) == files


def test_tip_best_and_kept_are_never_deleted(store: Storage) -> None:
    log = begin(store)
    policies = [KeepLast(1), KeepEvery(40), KeepBestEvaluated()]
    for step in range(10, 100, 10):
        entry = train(log, step)
        tip = entry.head.tip
        assert tip is not None
        accuracy = 0.9 if step == 30 else 0.1
        log.append(lambda _, tip=tip, accuracy=accuracy: evaluation(tip, accuracy=accuracy), attempt="e")  # type: ignore[misc]
        apply_retention(log, policies, attempt="keeper")
        assert_sound(store)
        assert step in steps_on_disk(store)
    assert steps_on_disk(store) == [0, 30, 40, 70, 80, 90]
    head = head_of(log)
    assert [ref.step for ref in head.retained] == [30, 90]
    assert [ref.step for ref in restorable(log, head)] == [0, 30, 40, 80, 90]


def test_folders_with_an_old_base_are_garbage(store: Storage) -> None:
    log = begin(store)
    old_base = head_of(log).base
    lost = stage(store, 10, old_base, "lost")
    apply_retention(log, [KeepLast(3)], attempt="keeper")
    assert lost.path in folders(store)  # its writer may still commit
    train(log, 10)
    current = stage(store, 20, head_of(log).base, "current")
    store.write(f"checkpoints/00000020-{old_base:08d}-torn/ckpt.data", b"half")  # without a manifest
    for foreign in ("checkpoints/checkpoint", "checkpoints/mine/file", "checkpoints/ckpt-10.index", "other/1-2-3/file"):
        store.write(foreign, b"x")
    apply_retention(log, [KeepLast(3)], attempt="keeper")
    assert lost.path not in folders(store)
    assert current.path in folders(store)
    assert not [path for path in store.files("checkpoints") if "torn" in path]
    assert store.exists("checkpoints/checkpoint")
    assert store.exists("checkpoints/mine/file")
    assert store.exists("other/1-2-3/file")


def test_quarantined_checkpoints_are_not_deleted(store: Storage) -> None:
    log = begin(store)
    train(log, 10)
    damaged = head_of(log).tip
    assert damaged is not None
    quarantine(log, damaged, "damaged", attempt="b")
    for step in (10, 20, 30, 40):
        train(log, step, attempt="b")
        apply_retention(log, [KeepLast(1)], attempt="keeper")
    assert damaged.path in folders(store)


def run_to_clean_up(store: Storage) -> RunLog:
    """A run with checkpoints to delete and to retire, and with garbage."""
    log = begin(store)
    garbage = stage(store, 5, head_of(log).base, "garbage")
    for step in (10, 20, 30):
        entry = train(log, step)
        if step == 10:
            best = evaluation(commit_of(entry).checkpoint, accuracy=1.0)
            log.append(lambda _, best=best: best, attempt="e")  # type: ignore[misc]
        if step == 20:
            apply_retention_except_garbage(log, store)
    log.append(lambda _: Change(environment=ENVIRONMENT), attempt="e")
    train(log, 40)
    assert garbage.path in folders(store)
    return log


def apply_retention_except_garbage(log: RunLog, store: Storage) -> None:
    """Retention in a process that died before it deleted garbage."""
    dying = Counting(store)
    dying.fails = lambda _, verb: (StorageError("died"), False) if verb == "folders" else None
    apply_retention(RunLog(dying), POLICIES, attempt=f"keeper-{log.home.uri.rpartition('/')[2]}")


class Died(BaseException):
    """The end of the process, which is no error of the store."""


POLICIES: list[RetentionPolicy] = [KeepLast(1), KeepBestEvaluated()]


@pytest.mark.parametrize("effect", [False, True], ids=["before", "after"])
def test_the_next_call_finishes_after_a_crash_at_any_call(memory: MemoryStorage, effect: bool) -> None:
    straight = memory.at("straight")
    log = run_to_clean_up(straight)
    counting = Counting(straight)
    apply_retention(RunLog(counting), POLICIES, attempt="keeper")
    wanted, files = head_of(log), sorted(straight.files(""))
    calls = counting.calls.total()
    assert counting.calls["delete"] >= 2
    assert counting.calls["create"] == 1

    for number in range(calls):
        store = memory.at(f"crashed-{number}-{effect}")
        log = run_to_clean_up(store)
        dying = Counting(store)
        dying.fails = lambda call, _, number=number: (Died(), effect) if call == number else None  # type: ignore[misc]
        with pytest.raises(Died):
            apply_retention(RunLog(dying), POLICIES, attempt="keeper")
        assert_sound(store)
        apply_retention(log, POLICIES, attempt="second-keeper")
        assert head_of(log) == wanted
        assert sorted(store.files("")) == files
        assert_sound(store)
