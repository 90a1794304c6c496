"""Reading and forking a checkpoint while its run goes on, and retires it."""

import uuid
from collections.abc import Callable, Iterator

import pytest

from tasks.foundation.checkpoint.retention import KeepBestEvaluated, KeepLast, clear_away
from tasks.foundation.checkpoint.selection import read_chosen
from tasks.foundation.checkpoint.verify import check
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Lineage, Origin
from tasks.foundation.errors import (
    DamagedCheckpoint,
    FileMissing,
    InvalidInput,
    RunLogError,
    StorageError,
    WeightsError,
)
from tasks.foundation.runlog.fork import fork
from tasks.foundation.runlog.fork_status import Fork, refuse_unfinished_fork
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.memory import MemoryStorage
from tests.support.small_logs import assert_sound, begin, evaluation, folders, head_of, train


def goes_on(log: RunLog, *steps: int) -> None:
    """Training, which keeps two checkpoints, and the best."""
    for step in steps:
        train(log, step)
        clear_away(log, [KeepLast(2), KeepBestEvaluated()], attempt="keeper")


def reading(log: RunLog, meanwhile: Callable[[], None]) -> Callable[[CheckpointRef], int]:
    """Reads a checkpoint's files; before the first reading something else happens."""
    first = iter([meanwhile])

    def read(ref: CheckpointRef) -> int:
        next(first, lambda: None)()
        check(log.home, ref)
        return ref.step

    return read


def test_the_newest_is_chosen_anew(store: Storage) -> None:
    log = begin(store)
    read = reading(log, lambda: goes_on(log, 10, 20, 30, 40, 50))
    assert read_chosen(store, None, read, error=InvalidInput) == 50


def test_the_best_is_chosen_anew(store: Storage) -> None:
    log = begin(store)

    def evaluated(step: int, accuracy: float) -> None:
        goes_on(log, step)
        tip = head_of(log).tip
        assert tip is not None
        log.append(lambda _: evaluation(tip, accuracy=accuracy), attempt="e")

    def better() -> None:
        evaluated(20, 0.9)
        goes_on(log, 30, 40, 50, 60, 70)

    evaluated(10, 0.5)
    assert read_chosen(store, "best", reading(log, better), error=InvalidInput) == 20


@pytest.mark.parametrize("error", [InvalidInput, WeightsError])
def test_one_that_was_named_is_said_to_be_retired(store: Storage, error: type[InvalidInput]) -> None:
    log = begin(store)
    goes_on(log, 10)
    read = reading(log, lambda: goes_on(log, 20, 30, 40, 50))
    with pytest.raises(error, match=r"step 10 was retired while it was being read.*it now has: 40, 50") as told:
        read_chosen(store, 10, read, error=error)
    assert told.value.exit_code == 2


@pytest.mark.parametrize("step", [10, None])
def test_what_is_retained_and_gone_is_damage(store: Storage, step: int | None) -> None:
    log = begin(store)
    goes_on(log, 10)
    tip = head_of(log).tip
    assert tip is not None
    store.delete(f"{tip.path}/ckpt.data")
    with pytest.raises(DamagedCheckpoint, match=r"ckpt\.data is missing"):
        read_chosen(store, step, reading(log, lambda: None), error=InvalidInput)
    with pytest.raises(FileMissing):
        read_chosen(store, step, lambda ref: store.read(f"{ref.path}/ckpt.data"), error=InvalidInput)


class Busy(MemoryStorage):
    """A storage root on which something else happens before a copy."""

    def __init__(self) -> None:
        super().__init__(f"busy-{uuid.uuid4().hex}")
        self.meanwhile: list[Callable[[], None]] = []

    def copy(self, path: str, target: str) -> None:
        if self.meanwhile:
            self.meanwhile.pop()()
        super().copy(path, target)


@pytest.fixture
def root() -> Iterator[Busy]:
    busy = Busy()
    yield busy
    busy.delete("")


def forks(root: Storage, at_step: int | None, new: str = "new") -> Fork:
    return fork(root, "old", new, at_step=at_step, attempt=uuid.uuid4().hex)


def is_forked(root: Storage, made: Fork, step: int) -> None:
    new = RunLog(root.at("new"))
    tip = assert_sound(new.home)[-1].head.tip
    assert tip is not None
    assert (tip.step, made.head.tip, made.lineage.step) == (step, tip, step)
    check(new.home, tip)
    train(new, 1000)
    clear_away(new, [KeepLast(2)], attempt="keeper")
    assert sorted(root.files("new")) == sorted(
        [*root.files(f"new/{tip.path}"), *root.files(f"new/{head_of(new).retained[-1].path}"), *root.files("new/log")]
    ), "nothing else is left"


def test_a_fork_of_the_newest_follows_the_run(root: Busy) -> None:
    log = begin(root.at("old"))
    goes_on(log, 10)
    root.meanwhile.append(lambda: goes_on(log, 20, 30, 40, 50))
    is_forked(root, forks(root, None), 50)


def test_a_fork_whose_step_is_retired_meanwhile_leaves_nothing(root: Busy) -> None:
    log = begin(root.at("old"))
    goes_on(log, 10)
    root.meanwhile.append(lambda: goes_on(log, 20, 30, 40, 50))
    with pytest.raises(InvalidInput, match=r"step 10 was retired while it was being read.*it now has: 40, 50") as told:
        forks(root, 10)
    assert told.value.exit_code == 2
    assert list(root.files("new")) == []
    is_forked(root, forks(root, 40), 40)


def dies() -> None:
    raise StorageError("killed")


def test_a_fork_that_died_while_copying_can_be_made_anew_of_another_step(root: Busy) -> None:
    log = begin(root.at("old"))
    goes_on(log, 10)
    root.meanwhile.append(dies)
    with pytest.raises(StorageError, match="killed"):
        forks(root, 10)
    goes_on(log, 20, 30, 40, 50)
    with pytest.raises(InvalidInput, match=r"is a fork that has no checkpoint yet.*--at-step 10 --as new"):
        refuse_unfinished_fork(RunLog(root.at("new")))
    with pytest.raises(InvalidInput, match=r"--at-step 10: .*it keeps those of steps 40, 50"):
        forks(root, 10)
    is_forked(root, forks(root, 50), 50)


def test_a_fork_that_died_before_its_commit_is_finished_without_the_other_run(
    root: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = begin(root.at("old"))
    goes_on(log, 10)
    create = MemoryStorage.create

    def dying(store: MemoryStorage, path: str, data: bytes) -> None:
        if store.uri.endswith("/new") and path == "log/00000001.json":
            raise StorageError("killed")
        create(store, path, data)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryStorage, "create", dying)
        with pytest.raises(StorageError, match="killed"):
            forks(root, 10)
    assert isinstance(RunLog(root.at("new")).entry(0).body, Origin)
    goes_on(log, 20, 30, 40, 50)
    is_forked(root, forks(root, 10), 10)
    assert forks(root, 10).already_there


def test_an_origin_without_a_copy_is_refused_with_what_helps(root: Busy) -> None:
    """As older versions left it: they wrote the origin before they copied."""
    log = begin(root.at("old"))
    goes_on(log, 10)
    head = head_of(log)
    assert head.tip is not None
    lineage = Lineage(home=log.home.uri, path=head.tip.path, step=10, state_digest=head.tip.state_digest, entry=2)
    body = Origin(forked_from=lineage, identity=head.identity, environment=head.environment)
    RunLog(root.at("new")).append(lambda _: body, attempt="older")
    goes_on(log, 20, 30, 40, 50)
    with pytest.raises(InvalidInput, match=r"holds no whole copy of step 10.*\nhint: take another name.*, or remove "):
        forks(root, 10)
    root.delete("new")  # as it says
    is_forked(root, forks(root, 40), 40)


def test_checkpoints_without_a_log_are_a_fork_only_where_nothing_was_trained(root: Busy) -> None:
    log = begin(root.at("old"))
    goes_on(log, 10)
    forks(root, 10)
    new = RunLog(root.at("new"))
    train(new, 20)
    root.write("new/fork.json", b"{}")
    for lost in list(root.files("new/log")):
        root.delete(lost)
    assert folders(new.home)
    with pytest.raises(RunLogError, match=r"holds checkpoints .* but no log"):
        forks(root, 10)
