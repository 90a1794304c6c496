"""Reading and forking a checkpoint while its run continues and retires it."""

import uuid
from collections.abc import Callable, Iterator

import pytest

from baton.tasks.foundation.checkpoint.fork import Fork, fork, refuse_unfinished_fork
from baton.tasks.foundation.checkpoint.retention import KeepBestEvaluated, KeepLast, apply_retention
from baton.tasks.foundation.checkpoint.selection import read_selected
from baton.tasks.foundation.checkpoint.verify import verify_checkpoint
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Lineage, Origin
from baton.tasks.foundation.errors import (
    DamagedCheckpoint,
    FileMissing,
    InvalidInput,
    RunLogError,
    StorageError,
    WeightsError,
)
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.small_logs import assert_sound, begin, evaluation, folders, head_of, train


def train_on(log: RunLog, *steps: int) -> None:
    """Train, and retain two checkpoints and the best."""
    for step in steps:
        train(log, step)
        apply_retention(log, [KeepLast(2), KeepBestEvaluated()], attempt="keeper")


def reading(log: RunLog, meanwhile: Callable[[], None]) -> Callable[[CheckpointRef], int]:
    """Reads a checkpoint's files; `meanwhile` runs before the first read."""
    first = iter([meanwhile])

    def read(ref: CheckpointRef) -> int:
        next(first, lambda: None)()
        verify_checkpoint(log.home, ref)
        return ref.step

    return read


def test_a_reader_of_the_newest_follows_the_run(store: Storage) -> None:
    log = begin(store)
    read = reading(log, lambda: train_on(log, 10, 20, 30, 40, 50))
    assert read_selected(store, None, read, error=InvalidInput) == 50


def test_a_reader_of_the_best_follows_the_run(store: Storage) -> None:
    log = begin(store)

    def evaluated(step: int, accuracy: float) -> None:
        train_on(log, step)
        tip = head_of(log).tip
        assert tip is not None
        log.append(lambda _: evaluation(tip, accuracy=accuracy), attempt="e")

    def better() -> None:
        evaluated(20, 0.9)
        train_on(log, 30, 40, 50, 60, 70)

    evaluated(10, 0.5)
    assert read_selected(store, "best", reading(log, better), error=InvalidInput) == 20


@pytest.mark.parametrize("error", [InvalidInput, WeightsError])
def test_a_reader_of_a_retired_step_is_refused(store: Storage, error: type[InvalidInput]) -> None:
    log = begin(store)
    train_on(log, 10)
    read = reading(log, lambda: train_on(log, 20, 30, 40, 50))
    with pytest.raises(error, match=r"step 10 was retired while it was being read.*it now has: 40, 50") as caught:
        read_selected(store, 10, read, error=error)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("step", [10, None])
def test_a_missing_retained_file_is_damage(store: Storage, step: int | None) -> None:
    log = begin(store)
    train_on(log, 10)
    tip = head_of(log).tip
    assert tip is not None
    store.delete(f"{tip.path}/ckpt.data")
    with pytest.raises(DamagedCheckpoint, match=r"ckpt\.data is missing"):
        read_selected(store, step, reading(log, lambda: None), error=InvalidInput)
    with pytest.raises(FileMissing):
        read_selected(store, step, lambda ref: store.read(f"{ref.path}/ckpt.data"), error=InvalidInput)


class CallingBeforeCopy(MemoryStorage):
    """A storage root that calls a function before a copy."""

    def __init__(self) -> None:
        super().__init__(f"storage-{uuid.uuid4().hex}")
        self.meanwhile: list[Callable[[], None]] = []

    def copy(self, path: str, target: str) -> None:
        if self.meanwhile:
            self.meanwhile.pop()()
        super().copy(path, target)


@pytest.fixture
def root() -> Iterator[CallingBeforeCopy]:
    storage = CallingBeforeCopy()
    yield storage
    storage.delete("")


def make_fork(root: Storage, at_step: int | None, new: str = "new") -> Fork:
    return fork(root, "old", new, at_step=at_step, attempt=uuid.uuid4().hex)


def assert_forked(root: Storage, made: Fork, step: int) -> None:
    new = RunLog(root.at("new"))
    tip = assert_sound(new.home)[-1].head.tip
    assert tip is not None
    assert (tip.step, made.head.tip, made.lineage.step) == (step, tip, step)
    verify_checkpoint(new.home, tip)
    train(new, 1000)
    apply_retention(new, [KeepLast(2)], attempt="keeper")
    assert sorted(root.files("new")) == sorted(
        [*root.files(f"new/{tip.path}"), *root.files(f"new/{head_of(new).retained[-1].path}"), *root.files("new/log")]
    ), "nothing else is left"


def test_a_fork_of_the_newest_follows_the_run(root: CallingBeforeCopy) -> None:
    log = begin(root.at("old"))
    train_on(log, 10)
    root.meanwhile.append(lambda: train_on(log, 20, 30, 40, 50))
    assert_forked(root, make_fork(root, None), 50)


def test_a_fork_of_a_retired_step_leaves_nothing(root: CallingBeforeCopy) -> None:
    log = begin(root.at("old"))
    train_on(log, 10)
    root.meanwhile.append(lambda: train_on(log, 20, 30, 40, 50))
    with pytest.raises(
        InvalidInput, match=r"step 10 was retired while it was being read.*it now has: 40, 50"
    ) as caught:
        make_fork(root, 10)
    assert caught.value.exit_code == 2
    assert list(root.files("new")) == []
    assert_forked(root, make_fork(root, 40), 40)


class Killed(BaseException):
    """A process that dies runs no handler of errors."""


def die() -> None:
    raise Killed


def test_a_fork_that_died_copying_can_use_another_step(root: CallingBeforeCopy) -> None:
    log = begin(root.at("old"))
    train_on(log, 10)
    root.meanwhile.append(die)
    with pytest.raises(Killed):
        make_fork(root, 10)
    train_on(log, 20, 30, 40, 50)
    with pytest.raises(InvalidInput, match=r"is a fork without a whole checkpoint.*--at-step 10 --as new"):
        refuse_unfinished_fork(RunLog(root.at("new")))
    with pytest.raises(InvalidInput, match=r"--at-step 10: .*it retains steps 40, 50"):
        make_fork(root, 10)
    assert_forked(root, make_fork(root, 50), 50)


def test_a_copied_fork_is_finished_without_its_source(root: CallingBeforeCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    log = begin(root.at("old"))
    train_on(log, 10)
    create = MemoryStorage.create

    def dying(store: MemoryStorage, path: str, data: bytes) -> None:
        if store.uri.endswith("/new") and path == "log/00000001.json":
            raise StorageError("killed")
        create(store, path, data)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryStorage, "create", dying)
        with pytest.raises(StorageError, match="killed"):
            make_fork(root, 10)
    assert isinstance(RunLog(root.at("new")).entry(0).body, Origin)
    train_on(log, 20, 30, 40, 50)
    assert_forked(root, make_fork(root, 10), 10)
    assert make_fork(root, 10).already_there


def test_an_origin_without_a_copy_is_refused_with_hints(root: CallingBeforeCopy) -> None:
    """Older versions left such homes: they wrote the origin before they copied."""
    log = begin(root.at("old"))
    train_on(log, 10)
    head = head_of(log)
    assert head.tip is not None
    lineage = Lineage(home=log.home.uri, path=head.tip.path, step=10, state_digest=head.tip.state_digest, entry=2)
    body = Origin(forked_from=lineage, identity=head.identity, environment=head.environment)
    RunLog(root.at("new")).append(lambda _: body, attempt="older")
    train_on(log, 20, 30, 40, 50)
    with pytest.raises(InvalidInput, match=r"holds no whole copy of step 10.*\nhint: take another name.*, or remove "):
        make_fork(root, 10)
    root.delete("new")  # as the hint says
    assert_forked(root, make_fork(root, 40), 40)


def test_checkpoints_without_a_log_may_be_an_unfinished_fork(root: CallingBeforeCopy) -> None:
    log = begin(root.at("old"))
    train_on(log, 10)
    make_fork(root, 10)
    new = RunLog(root.at("new"))
    train(new, 20)
    root.write("new/fork.json", b"{}")
    for lost in list(root.files("new/log")):
        root.delete(lost)
    assert folders(new.home)
    with pytest.raises(RunLogError, match=r"has checkpoints .* but no log"):
        make_fork(root, 10)
