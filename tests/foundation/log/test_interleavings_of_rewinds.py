"""Rewinds and accepted changes against commits: every order of storage calls, with crashes and lost responses."""

import pytest

from baton.tasks.foundation.contracts.log_entry import Change, Commit, Entry, Quarantine, Rewind
from baton.tasks.foundation.errors import BlowUp, FileAlreadyThere, StaleWriter, StorageError
from baton.tasks.foundation.log.appends import commit
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from tests.support.interleaving import Execution, Writer
from tests.support.rival_writers import (
    Scene,
    assert_only_committed_folders_are_kept,
    commits_on,
    first_mover,
    in_memory,
    report_interleavings,
    retried,
)
from tests.support.small_logs import committing, folders, head_of, stage, train

TO_THE_TIP, FURTHER_BACK = 35, 30
LOST = [FileAlreadyThere("the first answer got lost"), StorageError("timed out")]


def assert_one_moved_the_tip(scene: Scene, execution: Execution, entries: list[Entry], rivals: list[int]) -> None:
    """Assert that at most one rival on a base succeeded, and that the others got StaleWriter unless they died."""
    moved = [*commits_on(entries, scene.base), *(entry.body for entry in entries if isinstance(entry.body, Rewind))]
    assert len(moved) <= 1, "two moved the tip away from the same base"
    losers = [number for number in rivals if number in execution.faults]
    assert all(isinstance(execution.faults[number], StaleWriter) for number in losers), execution.faults
    winners = [number for number in rivals if number in execution.results]
    assert len(winners) <= len(moved)
    if set(rivals) - execution.dead:
        mover = first_mover(entries, scene.base)
        assert mover is not None
        assert mover.body in moved
        for number in winners:
            assert execution.results[number] == mover
    assert set(winners) | set(losers) | execution.dead >= set(rivals)
    assert_only_committed_folders_are_kept(execution.store, scene.rivals)


@in_memory
@pytest.mark.parametrize("blown_up_at", [TO_THE_TIP, FURTHER_BACK])
def test_commit_and_rewind_on_one_base(
    request: pytest.FixtureRequest, scene: Scene, home: Storage, blown_up_at: int
) -> None:
    count = scene.play_deaths(
        home,
        (scene.commits(0), scene.rewinds(blown_up_at)),
        lambda execution, entries: assert_one_moved_the_tip(scene, execution, entries, [0, 1]),
        changes=3,
    )
    report_interleavings(request, count, at_least=20)


@in_memory
@pytest.mark.parametrize(("one", "other"), [(TO_THE_TIP, TO_THE_TIP), (TO_THE_TIP, FURTHER_BACK)])
def test_two_rewinds_on_one_base_append_one(
    request: pytest.FixtureRequest, scene: Scene, home: Storage, one: int, other: int
) -> None:
    def check(execution: Execution, entries: list[Entry]) -> None:
        assert_one_moved_the_tip(scene, execution, entries, [0, 1])
        if set(execution.results):
            rewinds = [entry.body for entry in entries if isinstance(entry.body, Rewind)]
            assert len(rewinds) == 1
            skipped = rewinds[0].skip_batches
            assert entries[-1].head.skipped_batches == skipped, "batches were skipped twice for one blow-up"
            assert entries[-1].head.rewinds == 1

    count = scene.play_deaths(home, (scene.rewinds(one, "one"), scene.rewinds(other, "other")), check, changes=3)
    report_interleavings(request, count, at_least=20)


@in_memory
def test_commit_and_accepted_change(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    """Work from before the change is committed before it or never."""

    def check(execution: Execution, entries: list[Entry]) -> None:
        changes = [entry for entry in entries if isinstance(entry.body, Change)]
        committed = [entry for entry in entries[scene.base + 1 :] if isinstance(entry.body, Commit)]
        assert len(changes) <= 1
        assert len(committed) <= 1
        assert 1 not in execution.faults
        if changes and committed:
            assert committed[0].number < changes[0].number
        if 0 in execution.faults:
            assert isinstance(execution.faults[0], StaleWriter)
            assert changes
            assert not committed
        if 0 in execution.results:
            assert committed
        if 1 in execution.results:
            assert entries[-1].head.identity == {"seed": 1}
        assert_only_committed_folders_are_kept(execution.store, scene.rivals)

    count = scene.play_deaths(home, (scene.commits(0), scene.changes_seed), check, changes=3)
    report_interleavings(request, count, at_least=20)


@in_memory
@pytest.mark.slow
def test_rewind_and_housekeeping(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    """The rewind finds a border whose files exist, or reports that there is none, even if a border is retired first."""

    def check(execution: Execution, entries: list[Entry]) -> None:
        assert 1 not in execution.faults, "housekeeping disturbs nobody and is disturbed by nobody"
        rewound = [entry for entry in entries if isinstance(entry.body, Rewind)]
        if 0 in execution.faults:
            assert isinstance(execution.faults[0], BlowUp)
            assert "no checkpoint on a segment border" in str(execution.faults[0])
            assert rewound == []
        assert entries[-1].head.tip is not None
        assert entries[-1].head.tip.path in folders(execution.store)

    count = scene.play_deaths(home, (scene.rewinds(FURTHER_BACK), scene.retires), check, changes=4)
    report_interleavings(request, count, at_least=20)


@in_memory
@pytest.mark.parametrize("lost", LOST, ids=type)
@pytest.mark.parametrize("blown_up_at", [TO_THE_TIP, FURTHER_BACK])
def test_lost_response_never_appends_twice(
    request: pytest.FixtureRequest, scene: Scene, home: Storage, lost: Exception, blown_up_at: int
) -> None:
    retries = retried(scene.rewinds(blown_up_at))

    def check(execution: Execution, entries: list[Entry]) -> None:
        moved = [*commits_on(entries, scene.base), *(entry.body for entry in entries if isinstance(entry.body, Rewind))]
        assert len(moved) == 1
        assert all(isinstance(fault, StaleWriter | StorageError) for fault in execution.faults.values())
        assert not any(type(fault) is FileAlreadyThere for fault in execution.faults.values())
        assert_only_committed_folders_are_kept(execution.store, scene.rivals)

    count = scene.play(home, lambda: [Writer(retries, loses=lost), Writer(scene.commits(0))], check)
    count += scene.play(home, lambda: [Writer(retries), Writer(scene.commits(0), loses=lost)], check)
    report_interleavings(request, count, at_least=10)


@pytest.mark.slow
@in_memory
def test_commit_rewind_and_quarantine(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    def check(execution: Execution, entries: list[Entry]) -> None:
        new = [entry.body for entry in entries[scene.base + 1 :]]
        assert sum(isinstance(body, Commit | Rewind) for body in new) <= 1
        # A rewind to the tip itself keeps the tip, so it may still be quarantined; nothing else may follow.
        assert sum(isinstance(body, Commit | Quarantine) for body in new) <= 1
        assert 2 not in execution.faults
        assert all(isinstance(fault, StaleWriter) for fault in execution.faults.values())
        assert_only_committed_folders_are_kept(execution.store, scene.rivals)

    writers = [scene.commits(0), scene.rewinds(TO_THE_TIP), scene.quarantines]
    report_interleavings(request, scene.play(home, lambda: [Writer(work) for work in writers], check), at_least=100)


@pytest.mark.slow
@in_memory
def test_two_commits_and_a_rewind(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    writers = [scene.commits(0), scene.commits(1), scene.rewinds(FURTHER_BACK)]
    count = scene.play(
        home,
        lambda: [Writer(work) for work in writers],
        lambda execution, entries: assert_one_moved_the_tip(scene, execution, entries, [0, 1, 2]),
    )
    report_interleavings(request, count, at_least=40)


def test_writer_from_before_rewind_is_refused(scene: Scene, home: Storage) -> None:
    store = scene.set_up(home)
    log = RunLog(store)
    zombie = stage(store, 40, scene.base, "zombie")
    scene.rewinds(TO_THE_TIP)(store)
    assert head_of(log).tip == scene.parent
    with pytest.raises(StaleWriter, match=f"step 40 was trained on top of log entry {scene.base}"):
        commit(log, committing(zombie, parent=scene.parent.path))
    train(log, 40, attempt="again")
    with pytest.raises(StaleWriter):
        commit(log, committing(zombie, parent=scene.parent.path))
    assert_only_committed_folders_are_kept(store, [*scene.rivals, zombie])
