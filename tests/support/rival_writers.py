"""A run with rival writers, in every order of their storage calls."""

import uuid
from collections.abc import Callable
from functools import partial

import pytest

from baton.tasks.foundation.checkpoint.retention import KeepBestEvaluated, KeepLast, apply_retention
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Commit, Entry
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BlowUp, FileAlreadyThere, StaleWriter, StorageError
from baton.tasks.foundation.log.appends import commit, quarantine, rewind
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.interleaving import Execution, Writer, explore, sample
from tests.support.small_logs import (
    Act,
    assert_sound,
    begin,
    change_of_seed,
    committing,
    evaluation,
    folders,
    head_of,
    moves_base,
    stage,
    train,
)

SPEC = RunSpec.model_validate(
    {
        "run": "scene",
        "storage": "unused",
        "data": {"source": "digits"},
        "model": {"build": "model.py:build_model"},
        "train": {"steps": 100, "global_batch_size": 8, "on_blowup": "rewind"},
    }
)

# On a disk run two commits, one whose answer is lost, and two origins: what the others do is the same on any storage.
in_memory = pytest.mark.parametrize("home", ["memory"], indirect=True)


class Scene:
    """A run with four commits, and checkpoints that three rivals staged on top of its tip.

    Retention keeps the last two commits, so the older two are retired.

    Attributes:
        base: the base of the rivals' checkpoints.
        tip: the parent of the rivals' checkpoints.
        rivals: the staged checkpoints at step 40.
        stale: a checkpoint that was staged on an older base.
        state: the bytes of every file of the home.
        entries: paths of the log's entries.
    """

    def __init__(self) -> None:
        home = MemoryStorage(f"scene-{uuid.uuid4().hex}")
        log = begin(home)
        for step in (10, 20, 30):
            train(log, step)
            apply_retention(log, [KeepLast(2)], attempt="keeper")
        self.base = head_of(log).base
        self.tip = head_of(log).tip
        assert self.tip is not None
        self.rivals = [stage(home, 40, self.base, f"rival{number}") for number in range(3)]
        self.stale = stage(home, 11, 1, "stale")
        self.state = {path: home.read(path) for path in home.files("")}
        self.entries = {path for path in self.state if path.startswith("log/0")}
        home.delete("")

    def set_up(self, home: Storage) -> Storage:
        """Restore the home: delete new files and write missing ones. Other files never change, except the HINT."""
        there = set(home.files(""))
        for path in there - self.state.keys():
            home.delete(path)
        # On a disk an empty folder stays.
        for folder in set(home.folders("checkpoints")) - {path.rsplit("/", 1)[0] for path in self.state}:
            home.delete(folder)
        for path in (self.state.keys() - there) | {"log/HINT"}:
            home.write(path, self.state[path])
        return home

    def commits(self, rival: int) -> Act:
        return lambda store: commit(RunLog(store), committing(self.rivals[rival], parent=self.parent.path))

    def commits_twice(self, rival: int) -> Act:
        """Commit, then stage and commit another checkpoint on top of it."""

        def work(store: Storage) -> Entry:
            log = RunLog(store)
            first = commit(log, committing(self.rivals[rival], parent=self.parent.path))
            staged = stage(store, 50, first.head.base, f"rival{rival}")
            return commit(log, committing(staged, parent=self.rivals[rival].path))

        return work

    def evaluates_and_retires(self, store: Storage) -> None:
        log = RunLog(store)
        log.append(lambda head: None if head is None else evaluation(self.parent, accuracy=0.5), attempt="keeper")
        apply_retention(log, [KeepLast(1), KeepBestEvaluated()], attempt="keeper")

    def retires(self, store: Storage) -> None:
        apply_retention(RunLog(store), [KeepLast(1)], attempt="keeper")

    def quarantines(self, store: Storage) -> None:
        quarantine(RunLog(store), self.parent, "crc32c differs", attempt="doctor")

    def rewinds(self, blown_up_at: int, attempt: str = "rewinder") -> Act:
        """Rewind after a blow-up at a step: 35 returns to the tip, at step 30; 30 returns to the commit before it."""
        fault = BlowUp(f"the loss blew up at step {blown_up_at}", step=blown_up_at)
        return lambda store: rewind(RunLog(store), fault, base=self.base, spec=SPEC, attempt=attempt)

    def changes_seed(self, store: Storage) -> object:
        return RunLog(store).append(change_of_seed, attempt="owner")

    @property
    def parent(self) -> CheckpointRef:
        assert self.tip is not None
        return self.tip

    def play(
        self,
        home: Storage,
        writers: Callable[[], list[Writer]],
        check: Callable[[Execution, list[Entry]], None],
        *,
        drawn: int | None = None,
    ) -> int:
        """Run the writers in every order of their storage calls, or in some that are drawn; returns the number."""

        def check_all(execution: Execution) -> None:
            for path in self.entries:
                assert execution.store.read(path) == self.state[path], "an entry of the log was changed"
            check(execution, assert_sound(execution.store))

        def start() -> Execution:
            return Execution(self.set_up(home), writers())

        if drawn is None:
            return explore(start, check_all)
        sample(start, check_all, executions=drawn, seed=drawn)
        return drawn

    def play_deaths(
        self, home: Storage, acts: tuple[Act, Act], check: Callable[[Execution, list[Entry]], None], *, changes: int
    ) -> int:
        """Run two writers in every order; none dies, or one of them after each number of its changes.

        Args:
            home: the run's home.
            acts: what the writers do.
            check: called with each finished execution.
            changes: number of changes after which a writer may die, from 0.
        """
        counts = range(changes)
        deaths = [(None, None), *((count, None) for count in counts), *((None, count) for count in counts)]

        def writers(dies_after: tuple[int | None, int | None]) -> list[Writer]:
            return [Writer(act, dies_after=count) for act, count in zip(acts, dies_after, strict=True)]

        return sum(self.play(home, partial(writers, each), check) for each in deaths)


def commits_on(entries: list[Entry], base: int) -> list[Commit]:
    return [entry.body for entry in entries if isinstance(entry.body, Commit) and entry.body.checkpoint.base == base]


def assert_one_winner(execution: Execution, entries: list[Entry], rivals: list[int], base: int) -> None:
    """Assert that one rival committed on the base, and that all others that did not die got `StaleWriter`."""
    won = commits_on(entries, base)
    assert len(won) <= 1
    winners = [number for number in rivals if number in execution.results]
    losers = [number for number in rivals if number in execution.faults]
    assert all(isinstance(execution.faults[number], StaleWriter) for number in losers), execution.faults
    assert set(winners) | set(losers) | execution.dead >= set(rivals)
    for number in winners:
        entry = execution.results[number]
        assert isinstance(entry, Entry)
        assert entry in entries
        assert isinstance(entry.body, Commit)
        assert entry.body in won
    if losers or set(rivals) - execution.dead:
        assert len(won) == 1
    assert len(winners) + len(set(rivals) & execution.dead) >= 1
    assert len(winners) <= 1


def first_mover(entries: list[Entry], base: int) -> Entry | None:
    """The first entry after a base that moves the base, if any."""
    return next((entry for entry in entries[base + 1 :] if moves_base(entry.body)), None)


def assert_only_committed_folders_are_kept(store: Storage, rivals: list[CheckpointRef]) -> None:
    """Apply retention; assert that committed checkpoints are kept, and that others on an older base are deleted."""
    apply_retention(RunLog(store), [KeepLast(9)], attempt="sweeper")
    head = head_of(RunLog(store))
    committed = {ref.path for ref in head.retained}
    there = folders(store)
    assert committed <= there
    recent = {old.path for old in head.retired if head.commits - old.at_commit < 2}
    for ref in rivals:
        if ref.path in committed | recent:
            assert ref.path in there
        elif ref.base != head.base:
            assert ref.path not in there


def retried(act: Act) -> Act:
    """Try again after a timeout, as a process does."""

    def work(store: Storage) -> object:
        try:
            return act(store)
        except FileAlreadyThere:
            raise
        except StorageError:
            return act(store)

    return work


def report_interleavings(request: pytest.FixtureRequest, count: int, at_least: int) -> None:
    """Print the number of interleavings, and assert that there were enough."""
    print(f"{request.node.name}: {count} interleavings")  # noqa: T201 - shown by pytest -rP
    assert count >= at_least
