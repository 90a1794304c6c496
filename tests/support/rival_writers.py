"""A run to set rivals on, played in every order of their storage calls."""

import uuid
from collections.abc import Callable

import pytest

from tasks.foundation.checkpoint.retention import KeepBestEvaluated, KeepLast, clear_away
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Commit, Entry
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import BlowUp, StaleWriter
from tasks.foundation.runlog.commits import commit, quarantine, rewind
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.memory import MemoryStorage
from tests.support.interleaving import Execution, Writer, explore
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

# Three writers on a disk: three commits show it; the rest of the long ones run in memory.
in_memory = pytest.mark.parametrize("home", ["memory"], indirect=True)


class Scene:
    """A run of four commits, of which the eldest is long retired and the next is to be; and two rivals for its base."""

    def __init__(self) -> None:
        home = MemoryStorage(f"scene-{uuid.uuid4().hex}")
        log = begin(home)
        for step in (10, 20, 30):
            train(log, step)
            clear_away(log, [KeepLast(2)], attempt="keeper")
        self.base = head_of(log).base
        self.tip = head_of(log).tip
        assert self.tip is not None
        self.rivals = [stage(home, 40, self.base, f"rival{number}") for number in range(3)]
        self.stale = stage(home, 11, 1, "stale")
        self.state = {path: home.read(path) for path in home.files("")}
        self.entries = {path for path in self.state if path.startswith("log/0")}
        home.delete("")

    def set_up(self, home: Storage) -> Storage:
        """Make the home what it was: remove what is new, restore what is gone. Nothing else is ever written anew."""
        there = set(home.files(""))
        for path in there - self.state.keys():
            home.delete(path)
        # On a disk an emptied folder stays, and is seen.
        for folder in set(home.folders("checkpoints")) - {path.rsplit("/", 1)[0] for path in self.state}:
            home.delete(folder)
        for path in (self.state.keys() - there) | {"log/HINT"}:
            home.write(path, self.state[path])
        return home

    def commits(self, rival: int) -> Act:
        return lambda store: commit(RunLog(store), committing(self.rivals[rival], parent=self.parent.path))

    def commits_twice(self, rival: int) -> Act:
        """Commit, stage the next on top of it, commit that."""

        def work(store: Storage) -> Entry:
            log = RunLog(store)
            first = commit(log, committing(self.rivals[rival], parent=self.parent.path))
            staged = stage(store, 50, first.head.base, f"rival{rival}")
            return commit(log, committing(staged, parent=self.rivals[rival].path))

        return work

    def keeps_house(self, store: Storage) -> None:
        log = RunLog(store)
        log.append(lambda head: None if head is None else evaluation(self.parent, accuracy=0.5), attempt="keeper")
        clear_away(log, [KeepLast(1), KeepBestEvaluated()], attempt="keeper")

    def clears_away(self, store: Storage) -> None:
        clear_away(RunLog(store), [KeepLast(1)], attempt="keeper")

    def quarantines(self, store: Storage) -> None:
        quarantine(RunLog(store), self.parent, "crc32c differs", attempt="doctor")

    def rewinds(self, blown_up_at: int, attempt: str = "steersman") -> Act:
        """The loss blew up at a step: at 35 the tip, at step 30, is the place to go back to; at 30 the one before."""
        fault = BlowUp(f"the loss blew up at step {blown_up_at}", step=blown_up_at)
        return lambda store: rewind(RunLog(store), fault, base=self.base, spec=SPEC, attempt=attempt)

    def accepts_another_seed(self, store: Storage) -> object:
        return RunLog(store).append(change_of_seed, attempt="owner")

    @property
    def parent(self) -> CheckpointRef:
        assert self.tip is not None
        return self.tip

    def play(
        self, home: Storage, writers: Callable[[], list[Writer]], check: Callable[[Execution, list[Entry]], None]
    ) -> int:
        def look(execution: Execution) -> None:
            for path in self.entries:
                assert execution.store.read(path) == self.state[path], "an entry of the log was changed"
            check(execution, assert_sound(execution.store))

        return explore(lambda: Execution(self.set_up(home), writers()), look)


def on(entries: list[Entry], base: int) -> list[Commit]:
    return [entry.body for entry in entries if isinstance(entry.body, Commit) and entry.body.checkpoint.base == base]


def assert_one_winner(execution: Execution, entries: list[Entry], rivals: list[int], base: int) -> None:
    """Of the rivals that lived exactly one came through, unless a dead one did; the others were told."""
    won = on(entries, base)
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
    """The entry that moved the tip away from a base; there is one history, so there is one at most."""
    return next((entry for entry in entries[base + 1 :] if moves_base(entry.body)), None)


def assert_rivals_folders_are_kept_or_swept(store: Storage, rivals: list[CheckpointRef]) -> None:
    """After the next clearing away: what was committed is whole, and what lost is gone, by the base in its name."""
    clear_away(RunLog(store), [KeepLast(9)], attempt="sweeper")
    head = head_of(RunLog(store))
    committed = {ref.path for ref in head.retained}
    there = folders(store)
    assert committed <= there
    for ref in rivals:
        if ref.path in committed | {old.path for old in head.retired}:
            assert ref.path in there
        elif ref.base != head.base:
            assert ref.path not in there


def moments(changes: int) -> list[tuple[int | None, int | None]]:
    """Nobody dies; or one of two dies, after so many of its changes."""
    return [(None, None), *((count, None) for count in range(changes)), *((None, count) for count in range(changes))]


def played(request: pytest.FixtureRequest, count: int, at_least: int) -> None:
    print(f"{request.node.name}: {count} interleavings")  # noqa: T201 - shown by pytest -rP
    assert count >= at_least
