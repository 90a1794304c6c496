"""Forking: a copy of a committed checkpoint with its lineage, through crashes and races."""

import contextlib
import os
import uuid
from pathlib import Path

import pytest

from baton.tasks.foundation.checkpoint.fork import Fork, fork, refuse_unfinished_fork
from baton.tasks.foundation.checkpoint.retention import KeepLast, apply_retention
from baton.tasks.foundation.checkpoint.verify import verify_checkpoint
from baton.tasks.foundation.contracts.log_entry import Change, Commit, Origin, Rewind
from baton.tasks.foundation.errors import BatonError, DamagedCheckpoint, InvalidInput, RunLogError, StorageError
from baton.tasks.foundation.log.appends import commit, quarantine
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.counting_storage import Counting
from tests.support.interleaving import Execution, Writer, explore, sample
from tests.support.small_logs import ENVIRONMENT, assert_sound, begin, committing, folders, head_of, stage, train


def source_run(root: Storage) -> RunLog:
    log = begin(root.at("old"))
    for step in (10, 20):
        train(log, step)
    return log


def make_fork(root: Storage, at_step: int | None = 10, new: str = "new") -> Fork:
    return fork(root, "old", new, at_step=at_step, attempt=uuid.uuid4().hex)


def below(root: Storage, folder: str = "") -> dict[str, bytes]:
    return {path: root.read(path) for path in root.files(folder)}


def test_a_fork_is_an_independent_run(store: Storage) -> None:
    source = source_run(store)
    before = below(store, "old")
    made = make_fork(store)
    assert below(store, "old") == before, "the other run is only read"
    origin, first = assert_sound(store.at("new"))
    wanted = head_of(source).retained[1]
    assert isinstance(origin.body, Origin)
    assert isinstance(first.body, Commit)
    assert origin.body.forked_from == made.lineage
    assert (made.lineage.home, made.lineage.path, made.lineage.entry) == (source.home.uri, wanted.path, 2)
    assert (first.body.exit_reason, first.body.parent) == ("forked", None)
    assert (origin.head.identity, origin.head.environment) == ({"seed": 0}, ENVIRONMENT)
    tip = first.head.tip
    assert tip is not None
    assert (tip.step, tip.base, tip.state_digest) == (10, 0, wanted.state_digest)
    manifest = verify_checkpoint(store.at("new"), tip)
    assert (manifest.base, manifest.attempt) == (tip.base, tip.attempt)
    assert first.head.borders == (tip.path,)
    # It does not need the source run.
    store.delete("old")
    train(RunLog(store.at("new")), 30)
    assert_sound(store.at("new"))


def test_a_fork_of_a_fork_knows_the_first_run(store: Storage) -> None:
    source_run(store)
    first = make_fork(store).lineage
    train(RunLog(store.at("new")), 30)
    second = fork(store, "new", "newer", at_step=30, attempt=uuid.uuid4().hex).lineage
    assert second.generations == (second, first)
    assert (second.step, first.step) == (30, 10)


def test_a_run_that_is_forked_each_night_keeps_the_nearest_generations(memory: MemoryStorage) -> None:
    source_run(memory)
    lineages, source = [], "old"
    for night in range(40):
        lineages.append(fork(memory, source, f"night-{night}", at_step=None, attempt=uuid.uuid4().hex).lineage)
        source = f"night-{night}"
    origin = RunLog(memory.at(source)).entry(0).body
    assert isinstance(origin, Origin)
    assert origin.forked_from == lineages[-1]
    assert [each.home for each in lineages[-1].generations] == [each.home for each in reversed(lineages[-32:])]
    assert lineages[5].generations == tuple(each.nearest(number + 1) for number, each in enumerate(lineages[:6]))[::-1]


def test_the_tip_is_forked_by_default(store: Storage) -> None:
    source_run(store)
    assert make_fork(store, at_step=None).lineage.step == 20


def test_a_fork_skips_the_batches_of_a_later_rewind(memory: MemoryStorage) -> None:
    source = source_run(memory)
    first, second = head_of(source).retained[:2]
    body = Rewind(to=second, blown_up_at=20, reason="loss", skip_batches=7)
    source.append(lambda _: body, attempt="a")
    train(source, 30)
    assert first.step == 0
    for step, skipped in ((0, 0), (10, 7), (30, 7)):
        assert make_fork(memory, step, new=f"from-{step}").head.skipped_batches == skipped


def test_a_fork_takes_identity_changes_from_its_step_on(memory: MemoryStorage) -> None:
    source = source_run(memory)
    change = Change(environment=ENVIRONMENT, identity={"seed": 1}, accepted=("train.seed",))
    source.append(lambda _: change, attempt="a")
    assert make_fork(memory, 10, new="before").head.identity == {"seed": 0}
    assert make_fork(memory, 20, new="after").head.identity == {"seed": 1}


def test_forking_twice_changes_nothing(store: Storage) -> None:
    source = source_run(store)
    first = make_fork(store)
    files = below(store)
    assert make_fork(store) == Fork(lineage=first.lineage, head=first.head, already_there=True)
    train(RunLog(store.at("new")), 40)
    train(source, 30)
    train(source, 40)
    apply_retention(source, [KeepLast(1)], attempt="keeper")
    again = make_fork(store)  # although the source run no longer retains that step
    assert (again.already_there, again.lineage) == (True, first.lineage)
    assert below(store, "new").keys() >= {path for path in files if path.startswith("new/")}


def test_a_step_not_retained_is_refused_with_the_retained_steps(store: Storage) -> None:
    source_run(store)
    files = below(store)
    for step in (15, -1):
        with pytest.raises(InvalidInput, match=f"--at-step {step}: .*old retains no .* it retains steps 0, 10, 20"):
            make_fork(store, step)
    assert below(store) == files


def test_a_taken_name_is_refused(store: Storage) -> None:
    source_run(store)
    begin(store.at("new"))
    files = below(store)
    with pytest.raises(InvalidInput, match=r"--as: .*new holds a run already, at step 0; take another name"):
        make_fork(store)
    with pytest.raises(InvalidInput, match=r"--as: .*old holds a run already, at step 20"):
        make_fork(store, new="old")
    assert below(store) == files


def test_a_fork_of_another_checkpoint_is_refused(store: Storage) -> None:
    source_run(store)
    make_fork(store)
    files = below(store)
    for step in (20, None):
        with pytest.raises(InvalidInput, match=r"holds a fork of .*old at step 10 already; .* of .*old at step 20"):
            make_fork(store, step)
    assert below(store) == files


def test_a_damaged_checkpoint_is_not_forked(store: Storage) -> None:
    source = source_run(store)
    store.write(f"old/{head_of(source).retained[1].path}/ckpt.data", b"other bytes")
    files = below(store)
    with pytest.raises(DamagedCheckpoint, match=r"ckpt\.data has 11 bytes"):
        make_fork(store)
    assert below(store) == files


FAULTS = {
    "changed bytes": lambda file: file.write_bytes(b"other bytes"),
    "no file": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a link out": lambda file: (file.unlink(), file.symlink_to("/etc/passwd")),
}


@pytest.mark.parametrize("name", ["ckpt.data", "manifest.json"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_refused_fork_leaves_no_file_and_no_folder(fault: str, name: str, tmp_path: Path) -> None:
    root = LocalStorage(tmp_path)
    source = source_run(root)
    FAULTS[fault](root.root / "old" / head_of(source).retained[1].path / name)
    before = set(root.root.rglob("*"))
    with pytest.raises(BatonError) as found:
        make_fork(root)
    assert name in str(found.value)
    assert set(root.root.rglob("*")) == before


def test_a_fork_that_finds_a_full_disk_leaves_nothing(memory: MemoryStorage) -> None:
    source_run(memory)
    before = below(memory)
    for verb in ("write", "copy", "create"):
        counting = Counting(memory)
        counting.at = lambda folder, root=counting: _Below(root, folder)  # type: ignore[attr-defined]
        counting.fails = lambda _, called, verb=verb: (  # type: ignore[misc]
            (StorageError("disk full"), False) if called == verb else None
        )
        with pytest.raises(StorageError, match="disk full"):
            make_fork(counting)  # type: ignore[arg-type]
        assert below(memory) == before, verb


def test_a_log_without_its_origin_is_refused(store: Storage) -> None:
    source_run(store)
    begin(store.at("new"))
    for lost in ("log/00000000.json", "log/HINT"):
        store.at("new").delete(lost)
    with pytest.raises(RunLogError, match=r"00000000\.json is missing"):
        make_fork(store)


def test_a_run_without_whole_checkpoints_is_refused(memory: MemoryStorage) -> None:
    log = begin(memory.at("old"))
    tip = head_of(log).tip
    assert tip is not None
    quarantine(log, tip, "damaged", attempt="a")
    with pytest.raises(InvalidInput, match="has no checkpoint to fork"):
        make_fork(memory, None)


def test_a_fork_with_a_damaged_copy_is_copied_again(store: Storage) -> None:
    source_run(store)
    first = make_fork(store)
    assert first.head.tip is not None
    new = RunLog(store.at("new"))
    quarantine(new, first.head.tip, "damaged", attempt="a")
    with pytest.raises(
        InvalidInput,
        match=r"fork without a whole checkpoint; copy it again: baton fork .*old --at-step 10 --as new",
    ):
        refuse_unfinished_fork(new)
    again = make_fork(store)
    assert not again.already_there
    assert again.head.tip is not None
    assert again.head.tip.state_digest == first.head.tip.state_digest
    assert_sound(store.at("new"))


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "response-lost"])
def test_a_fork_that_failed_at_any_storage_call_can_be_repeated(memory: MemoryStorage, lost: bool) -> None:
    source = source_run(memory)
    before = below(memory, "old")
    calls = 0
    while True:
        counting = Counting(memory)
        at = calls
        counting.fails = lambda number, _, at=at: (StorageError("timed out"), lost) if number == at else None  # type: ignore[misc]
        counting.at = lambda folder, root=counting: _Below(root, folder)  # type: ignore[attr-defined]
        with contextlib.suppress(StorageError):
            make_fork(counting)  # type: ignore[arg-type]
        written = below(memory, "new")
        if written:
            # After a failure at any call, init-or-restore does not begin a new run there.
            head = RunLog(memory.at("new")).head()
            if head is None or head.tip is None:
                with pytest.raises(InvalidInput, match="is a fork without a whole checkpoint"):
                    refuse_unfinished_fork(RunLog(memory.at("new")))
        made = make_fork(memory)
        assert made.head.tip is not None
        assert made.head.tip.step == 10
        assert len(assert_sound(memory.at("new"))) == 2
        verify_checkpoint(memory.at("new"), made.head.tip)
        assert below(memory, "old") == before
        memory.delete("new")
        if counting.calls.total() <= at:
            break
        calls += 1
    assert calls > 20
    assert head_of(source).tip is not None


class _Below:
    """A folder of a counting store; its calls count as the store's."""

    def __init__(self, root: Counting, folder: str) -> None:
        self._root, self._folder = root, folder

    @property
    def uri(self) -> str:
        return f"{self._root.uri}/{self._folder}"

    def with_deadline(self, _seconds: float) -> "_Below":
        return self

    def __getattr__(self, verb: str) -> object:
        inner = getattr(self._root, verb)
        if not callable(inner):
            return inner
        if verb in {"files", "folders"}:
            return lambda folder: [
                path.removeprefix(f"{self._folder}/") for path in inner(f"{self._folder}/{folder}".rstrip("/"))
            ]
        return lambda path, *rest, **options: inner(f"{self._folder}/{path}", *rest, **options)


def test_leftovers_of_a_killed_fork_are_deleted_later(memory: MemoryStorage) -> None:
    source_run(memory)
    counting = Counting(memory)
    counting.at = lambda folder: _Below(counting, folder)  # type: ignore[attr-defined]
    seen: list[int] = []
    counting.fails = lambda number, verb: (
        (OSError("killed"), True) if verb == "copy" and not seen.append(number) else None  # type: ignore[func-returns-value]
    )
    with pytest.raises(OSError, match="killed"):
        make_fork(counting)  # type: ignore[arg-type]
    made = make_fork(memory)
    new = RunLog(memory.at("new"))
    assert len(folders(new.home)) == 2
    apply_retention(new, [KeepLast(1)], attempt="keeper")
    assert made.head.tip is not None
    assert folders(new.home) == {made.head.tip.path}


def small_source(root: Storage) -> None:
    log = begin(root.at("old"))
    assert head_of(log).tip is not None


class TwoForks:
    """Two processes that make the same fork; the first may die."""

    def __init__(self, *, dies_after: int | None) -> None:
        self.root = MemoryStorage(f"forks-{uuid.uuid4().hex}")
        self.dies_after = dies_after
        small_source(self.root)

    def start(self) -> Execution:
        self.root.delete("new")
        return Execution(self.root, [Writer(self.work, dies_after=self.dies_after), Writer(self.work)])

    @staticmethod
    def work(store: Storage) -> Fork:
        return fork(store, "old", "new", at_step=0, attempt=uuid.uuid4().hex)

    def check(self, execution: Execution) -> None:
        assert execution.faults == {}
        entries = assert_sound(self.root.at("new"))
        assert [entry.body.kind for entry in entries] == ["origin", "checkpoint"]
        made = [result for result in execution.results.values() if isinstance(result, Fork)]
        assert 1 in execution.results
        assert {each.head.tip for each in made} == {entries[-1].head.tip}
        assert sum(not each.already_there for each in made) == 1 or execution.dead
        tip = entries[-1].head.tip
        assert tip is not None
        verify_checkpoint(self.root.at("new"), tip)


@pytest.mark.parametrize("death", [1, 2, 3])
def test_two_forks_to_one_name_in_every_order(death: int) -> None:
    forks = TwoForks(dies_after=death)
    assert explore(forks.start, forks.check) > 1
    forks.root.delete("")


@pytest.mark.parametrize("death", [None, *range(4, 24, 2)])
def test_two_forks_to_one_name_in_random_orders(death: int | None) -> None:
    """There are too many orders to try all of them: a fork makes about twenty calls."""
    forks = TwoForks(dies_after=death)
    sample(forks.start, forks.check, executions=200 if death is None else 40, seed=death or 0)
    forks.root.delete("")


@pytest.mark.parametrize("orders", [300, pytest.param(None, marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_a_fork_and_a_new_run_of_one_name_in_any_order(orders: int | None) -> None:
    """Some orders of their calls, or all of them."""
    root = MemoryStorage(f"forks-{uuid.uuid4().hex}")
    small_source(root)

    def begins(store: Storage) -> object:
        """Begin a new run as init-or-restore does."""
        log = RunLog(store.at("new"))
        if log.head() is None:
            refuse_unfinished_fork(log)
        log.append(
            lambda head: Origin(identity={"seed": 0}, environment=ENVIRONMENT) if head is None else None, attempt="f"
        )
        if head_of(log).tip is None:
            refuse_unfinished_fork(log)
            return commit(log, committing(stage(log.home, 0, head_of(log).base, "fresh")))
        return None

    def start() -> Execution:
        root.delete("new")
        return Execution(root, [Writer(lambda store: make_fork(store, 0)), Writer(begins)])

    def check(execution: Execution) -> None:
        origin, *_ = assert_sound(root.at("new"))
        assert isinstance(origin.body, Origin)
        if origin.body.forked_from is None:
            assert isinstance(execution.faults.pop(0), InvalidInput)
        elif 1 in execution.faults:
            assert isinstance(execution.faults.pop(1), InvalidInput)
        assert execution.faults == {}
        committed = [entry.body for entry in assert_sound(root.at("new")) if isinstance(entry.body, Commit)]
        forked = origin.body.forked_from is not None
        assert [body.exit_reason for body in committed] == ["forked" if forked else "segment_end"]

    if orders is None:
        assert explore(start, check) > 1
    else:
        sample(start, check, executions=orders, seed=0)
    root.delete("")


def test_a_fork_on_one_disk_hard_links_its_files(tmp_path: Path) -> None:
    root = LocalStorage(tmp_path)
    source = source_run(root)
    made = make_fork(root)
    assert made.head.tip is not None
    old = root.root / "old" / head_of(source).retained[1].path / "ckpt.data"
    assert old.samefile(root.root / "new" / made.head.tip.path / "ckpt.data")
