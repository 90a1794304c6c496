"""The newest checkpoint that was read whole outlives those that nobody has read, whatever dies and whoever rivals."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from baton.tasks.foundation.checkpoint.retention import KeepLast, KeepVerified, RetentionPolicy, apply_retention
from baton.tasks.foundation.contracts.log_entry import Entry, Quarantine, Rewind
from baton.tasks.foundation.log.appends import commit, quarantine_older
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.counting_storage import Counting
from tests.support.crashing_store import Died
from tests.support.interleaving import Execution, Writer
from tests.support.rival_writers import Scene
from tests.support.small_logs import Act, assert_sound, begin, committing, folders, head_of, stage, train

POLICIES: list[RetentionPolicy] = [KeepLast(1), KeepVerified()]


def start(store: Storage) -> RunLog:
    """The log of a process that starts: it restores the tip."""
    log = RunLog(store)
    log.note_read(head_of(log).retained[-1].path)
    return log


def train_to(log: RunLog, *steps: int) -> None:
    for step in steps:
        train(log, step, attempt=f"a{step}")
        apply_retention(log, POLICIES, attempt="keeper")


def retained(store: Storage) -> list[int]:
    return [ref.step for ref in head_of(RunLog(store)).retained]


def assert_one_stays(entries: Sequence[Entry]) -> None:
    """Once a checkpoint was read whole, one is retained that was: this one or a newer one."""
    for before, entry in pairwise(entries):
        reads = entry.head.read
        assert set(reads) <= {ref.path for ref in entry.head.retained}
        if before.head.read and not isinstance(entry.body, Quarantine | Rewind):
            assert reads
            assert reads[-1] >= before.head.read[-1], "their names sort by step"


def test_restored_one_stays_until_a_newer_one_is_read(store: Storage) -> None:
    log = begin(store)
    train_to(log, 10, 20)
    assert retained(store) == [20], "nobody has read any, so the newest stays alone"
    log = start(store)
    train_to(log, 30, 40, 50, 60)
    assert retained(store) == [20, 60]
    log.note_read(head_of(log).retained[-1].path)  # an evaluation
    train_to(log, 70, 80, 90)
    assert retained(store) == [60, 90]
    train_to(start(store), 100, 110)
    assert retained(store) == [90, 110]
    assert_one_stays(assert_sound(store))
    assert {ref.path for ref in head_of(RunLog(store)).retained} <= folders(store)


def test_damaged_one_gives_way_to_the_one_read_before(store: Storage) -> None:
    log = start(begin(store).home)
    policies = [KeepLast(2), KeepVerified()]
    for step in (10, 20, 30):
        train(log, step)
        apply_retention(log, policies, attempt="keeper")
        log.note_read(head_of(log).retained[-1].path)
    assert list(head_of(log).read) == [ref.path for ref in head_of(log).retained[:-1]]
    damaged = head_of(log).retained[-2]
    assert quarantine_older(log, damaged, "flipped", attempt="doctor")
    assert not quarantine_older(log, damaged, "flipped", attempt="doctor"), "it is not retained"
    assert not quarantine_older(log, head_of(log).retained[-1], "flipped", attempt="doctor"), "it is the tip"
    head = head_of(log)
    assert [ref.step for ref in head.quarantined] == [20]
    train(log, 40)
    apply_retention(log, POLICIES, attempt="keeper")
    assert retained(store) == [30, 40]
    assert damaged.path in folders(store), "a quarantined checkpoint is not deleted"
    assert_sound(store)


def test_a_rewind_restores_so_it_counts(store: Storage) -> None:
    log = begin(store)
    for step in (10, 20, 30):
        train(log, step)
    log = start(store)
    train(log, 40)
    to = head_of(log).retained[-3]
    assert to.step == 20
    log.append(lambda _: Rewind(to=to, blown_up_at=45, reason="NaN", skip_batches=3), attempt="a")
    assert head_of(log).read == (), "what was read is not in the lineage any more"
    train_to(start(store), 50, 60, 70)
    assert retained(store) == [20, 70]
    assert_one_stays(assert_sound(store))


@pytest.mark.parametrize("effect", [False, True], ids=["before", "after"])
def test_a_death_at_any_call_keeps_one_that_was_read(memory: MemoryStorage, effect: bool) -> None:
    number, ends = 0, False
    while not ends:
        store = memory.at(f"died-{number}-{effect}")
        log = begin(store)
        train_to(log, 10)
        train_to(start(store), 20, 30)
        assert retained(store) == [10, 30]
        dying = Counting(store)
        dying.fails = lambda call, _, number=number: (Died(), effect) if call == number else None  # type: ignore[misc]
        try:
            train_to(start(dying), 40, 50, 60)
            ends = True  # it had fewer calls
        except Died:
            pass
        assert_one_stays(assert_sound(store))
        assert head_of(RunLog(store)).read
        step = retained(store)[-1]
        train_to(start(store), step + 10, step + 20, step + 30)
        assert retained(store) == [step, step + 30]
        assert_one_stays(assert_sound(store))
        store.delete("")
        number += 1
    assert number > 30


def goes_on(scene: Scene, rival: int) -> Act:
    """Restore the tip, commit on top of it and on top of that, and retire what is not kept."""

    def work(store: Storage) -> None:
        log = RunLog(store)
        log.note_read(scene.parent.path)
        staged, parent = scene.rivals[rival], scene.parent.path
        for step in (50, 60):
            entry = commit(log, committing(staged, parent=parent))
            apply_retention(log, POLICIES, attempt=f"keeper{rival}")
            staged, parent = stage(store, step, entry.head.base, f"rival{rival}"), staged.path

    return work


def finds_damage() -> Act:
    def work(store: Storage) -> None:
        log = RunLog(store)
        quarantine_older(log, head_of(log).retained[0], "flipped", attempt="doctor")

    return work


def test_rivals_that_die_keep_one_that_was_read(scene: Scene, memory: MemoryStorage) -> None:
    def check(_: Execution, entries: list[Entry]) -> None:
        assert_one_stays(entries)
        if len(entries) > len(scene.entries):
            assert entries[-1].head.read

    def writers(dies_after: int | None) -> list[Writer]:
        return [Writer(goes_on(scene, 0), dies_after=dies_after), Writer(goes_on(scene, 1))]

    for dies_after in (None, *range(8)):
        scene.play(memory, lambda dies_after=dies_after: writers(dies_after), check, drawn=25)  # type: ignore[misc]


def test_quarantine_of_an_older_one_refuses_no_commit(scene: Scene, memory: MemoryStorage) -> None:
    def check(execution: Execution, entries: list[Entry]) -> None:
        assert not execution.faults
        assert_one_stays(entries)
        assert entries[-1].head.tip is not None
        assert entries[-1].head.tip.step == 50
        found = [entry for entry in entries if isinstance(entry.body, Quarantine)]
        assert len(found) == len(entries[-1].head.quarantined) <= 1

    scene.play(memory, lambda: [Writer(goes_on(scene, 0)), Writer(finds_damage())], check, drawn=200)
