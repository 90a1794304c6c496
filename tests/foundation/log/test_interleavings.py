"""Two or three writers on one log: every order of their storage calls, with crashes and lost responses."""

import uuid
from collections.abc import Callable

import pytest

from baton.tasks.foundation.contracts.log_entry import Entry, Quarantine
from baton.tasks.foundation.errors import FileAlreadyThere, StaleWriter, StorageError
from baton.tasks.foundation.log.appends import commit, quarantine
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.interleaving import Execution, Writer, explore
from tests.support.rival_writers import Scene, assert_one_winner, commits_on, in_memory, report_interleavings, retried
from tests.support.small_logs import Act, assert_sound, committing, evaluation, folders, head_of, origin, stage, train


def test_two_commits_on_one_base(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    count = scene.play_deaths(
        home,
        (scene.commits(0), scene.commits(1)),
        lambda execution, entries: assert_one_winner(execution, entries, [0, 1], scene.base),
        changes=3,
    )
    report_interleavings(request, count, at_least=20)


@in_memory
@pytest.mark.slow
def test_three_commits_on_one_base(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    count = scene.play(
        home,
        lambda: [Writer(scene.commits(number)) for number in range(3)],
        lambda execution, entries: assert_one_winner(execution, entries, [0, 1, 2], scene.base),
    )
    report_interleavings(request, count, at_least=40)


@in_memory
def test_logs_that_remember_are_overtaken(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    """A log that has read its head commits, is refused, or goes on, whatever rivals append after that."""

    def reads_first(act: Callable[[RunLog], object]) -> Act:
        def work(store: Storage) -> object:
            log = RunLog(store)
            log.head()
            result = act(log)
            assert head_of(log).number >= head_of(RunLog(store)).number - 1  # a rival may append between the two
            return result

        return work

    writers = [
        reads_first(lambda log: commit(log, committing(scene.rivals[0], parent=scene.parent.path))),
        reads_first(lambda log: commit(log, committing(scene.rivals[1], parent=scene.parent.path))),
    ]
    count = scene.play(
        home,
        lambda: [Writer(work) for work in writers],
        lambda execution, entries: assert_one_winner(execution, entries, [0, 1], scene.base),
    )
    report_interleavings(request, count, at_least=10)


@in_memory
@pytest.mark.slow
def test_commit_and_housekeeping(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    def check(execution: Execution, entries: list[Entry]) -> None:
        assert_one_winner(execution, entries, [0], scene.base)
        assert 1 not in execution.faults, "housekeeping disturbs nobody and is disturbed by nobody"

    count = scene.play_deaths(home, (scene.commits(0), scene.evaluates_and_retires), check, changes=5)
    report_interleavings(request, count, at_least=100)


@in_memory
@pytest.mark.slow
def test_sweep_keeps_checkpoint_staged_on_new_commit(
    request: pytest.FixtureRequest, scene: Scene, home: Storage
) -> None:
    def check(execution: Execution, _: list[Entry]) -> None:
        assert execution.faults == {}
        entry = execution.results[0]
        assert isinstance(entry, Entry)
        tip = entry.head.tip
        assert tip is not None
        assert tip.step == 50
        assert tip.path in folders(execution.store)

    count = scene.play(home, lambda: [Writer(scene.commits_twice(0)), Writer(scene.retires)], check)
    report_interleavings(request, count, at_least=40)


@in_memory
def test_commit_and_quarantine_of_its_parent(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    def check(execution: Execution, entries: list[Entry]) -> None:
        committed = commits_on(entries, scene.base)
        removed = [entry for entry in entries if isinstance(entry.body, Quarantine)]
        assert len(committed) + len(removed) <= 1, "both moved the tip away from the same base"
        assert 1 not in execution.faults
        if 0 in execution.faults:
            assert isinstance(execution.faults[0], StaleWriter)
            assert removed
        if 0 in execution.results:
            assert committed
        if not execution.dead:
            assert len(committed) + len(removed) == 1

    count = scene.play_deaths(home, (scene.commits(0), scene.quarantines), check, changes=3)
    report_interleavings(request, count, at_least=20)


@in_memory
def test_two_quarantines_of_one_checkpoint_append_one(
    request: pytest.FixtureRequest, scene: Scene, home: Storage
) -> None:
    def check(execution: Execution, entries: list[Entry]) -> None:
        assert execution.faults == {}
        assert sum(isinstance(entry.body, Quarantine) for entry in entries) == 1

    report_interleavings(
        request, scene.play(home, lambda: [Writer(scene.quarantines), Writer(scene.quarantines)], check), 5
    )


@in_memory
def test_two_housekeepers_reach_the_same_state(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    alone = scene.set_up(home)
    scene.retires(alone)
    wanted, kept = head_of(RunLog(alone)), folders(alone)

    def check(execution: Execution, entries: list[Entry]) -> None:
        assert execution.faults == {}
        assert entries[-1].head == wanted
        assert folders(execution.store) == kept

    report_interleavings(request, scene.play(home, lambda: [Writer(scene.retires), Writer(scene.retires)], check), 5)


@pytest.mark.slow
@in_memory
def test_two_commits_and_a_quarantine(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    def check(execution: Execution, entries: list[Entry]) -> None:
        moved = [*commits_on(entries, scene.base), *(entry for entry in entries if isinstance(entry.body, Quarantine))]
        assert len(moved) == 1
        assert len([number for number in (0, 1) if number in execution.results]) == len(commits_on(entries, scene.base))
        assert all(isinstance(fault, StaleWriter) for fault in execution.faults.values())
        assert 2 not in execution.faults

    writers = [scene.commits(0), scene.commits(1), scene.quarantines]
    report_interleavings(request, scene.play(home, lambda: [Writer(work) for work in writers], check), at_least=40)


@pytest.mark.slow
@in_memory
def test_two_commits_and_an_evaluation(request: pytest.FixtureRequest, scene: Scene, home: Storage) -> None:
    def evaluates(store: Storage) -> object:
        return RunLog(store).append(lambda _: evaluation(scene.parent, accuracy=0.5), attempt="keeper")

    def check(execution: Execution, entries: list[Entry]) -> None:
        assert_one_winner(execution, entries, [0, 1], scene.base)
        assert 2 not in execution.faults

    writers = [scene.commits(0), scene.commits(1), evaluates]
    report_interleavings(request, scene.play(home, lambda: [Writer(work) for work in writers], check), at_least=100)


@pytest.mark.parametrize("lost", [FileAlreadyThere("the first answer got lost"), StorageError("timed out")], ids=type)
def test_commit_with_lost_response_is_recognized(
    request: pytest.FixtureRequest, scene: Scene, home: Storage, lost: Exception
) -> None:
    retries = retried(scene.commits(0))

    def check(execution: Execution, entries: list[Entry]) -> None:
        assert_one_winner(execution, entries, [0, 1], scene.base)

    count = scene.play(home, lambda: [Writer(retries, loses=lost), Writer(scene.commits(1))], check)
    count += scene.play(
        home,
        lambda: [Writer(retries, loses=lost), Writer(scene.retires)],
        lambda execution, entries: assert_one_winner(execution, entries, [0], scene.base),
    )
    report_interleavings(request, count, at_least=12)


def test_two_runs_of_one_name_have_one_origin(request: pytest.FixtureRequest, home: Storage) -> None:
    def begins(attempt: str) -> Act:
        return lambda store: RunLog(store).append(lambda head: origin() if head is None else None, attempt=attempt)

    def check(execution: Execution) -> None:
        assert execution.faults == {}
        assert len(assert_sound(execution.store)) == 1

    def start() -> Execution:
        home.delete("log")
        return Execution(home, [Writer(begins("a")), Writer(begins("b"))])

    report_interleavings(request, explore(start, check), at_least=3)


def test_writer_from_before_quarantine_is_refused(scene: Scene, home: Storage) -> None:
    store = scene.set_up(home)
    log = RunLog(store)
    zombie = stage(store, 40, scene.base, "zombie")
    quarantine(log, scene.parent, "damaged", attempt="doctor")
    train(log, scene.parent.step, attempt="again")
    for _ in range(2):
        with pytest.raises(StaleWriter, match=f"step 40 was trained on top of log entry {scene.base}") as error:
            commit(log, committing(zombie, parent=scene.parent.path))
    assert "attempt again" in str(error.value)
    with pytest.raises(StaleWriter):
        commit(log, committing(scene.stale))
    assert_sound(store)


def writes(*paths: str) -> Act:
    def work(store: Storage) -> None:
        for path in paths:
            store.write(path, b"")

    return work


def reads(*paths: str) -> Act:
    def work(store: Storage) -> None:
        for path in paths:
            store.exists(path)

    return work


@pytest.mark.parametrize(
    ("works", "orders", "all_orders"),
    [
        ([writes("a", "a"), writes("a", "a")], 6, 6),
        ([writes("a", "a"), writes("b", "b")], 1, 6),
        ([reads("a", "a"), reads("a", "a")], 1, 6),
        ([writes("a"), reads("a", "a")], 3, 3),
        ([writes("a", "b"), reads("b", "a")], 3, 6),
        ([writes("a"), writes("a"), writes("a")], 6, 6),
        ([writes("a/b"), lambda store: list(store.files("a"))], 2, 2),
        ([writes("a/b"), lambda store: store.delete("a")], 2, 2),
        ([writes("ab"), lambda store: store.delete("a")], 1, 2),
    ],
)
def test_explorer_runs_every_relevant_order(works: list[Act], orders: int, all_orders: int) -> None:
    def start() -> Execution:
        return Execution(MemoryStorage(f"explorer-{uuid.uuid4().hex}"), [Writer(work) for work in works])

    assert explore(start, lambda _: None) == orders
    assert explore(start, lambda _: None, reduced=False) == all_orders


def test_reduced_orders_reach_all_end_states() -> None:
    def start() -> Execution:
        store = MemoryStorage("explorer-states")
        store.delete("")
        return Execution(store, [Writer(lambda store, me=me: race(store, me)) for me in "xy"])  # type: ignore[misc]

    def race(store: Storage, me: str) -> None:
        for number in range(2):
            try:
                store.create(str(number), me.encode())
            except FileAlreadyThere:
                store.write(me, store.read(str(number)))

    def states(*, reduced: bool) -> tuple[set[tuple[tuple[str, bytes], ...]], int]:
        found = set()
        count = explore(
            start,
            lambda run: found.add(tuple(sorted((path, run.store.read(path)) for path in run.store.files("")))),
            reduced=reduced,
        )
        return found, count

    few, fewer = states(reduced=True)
    many, more = states(reduced=False)
    assert few == many
    assert len(few) > 3
    assert fewer < more


def test_explorer_loses_responses_and_kills() -> None:
    store = MemoryStorage(f"explorer-{uuid.uuid4().hex}")
    results: list[tuple[set[int], dict[int, BaseException]]] = []

    def creates(store: Storage) -> None:
        store.create("a", b"")
        store.create("b", b"")

    explore(
        lambda: Execution(store, [Writer(creates, dies_after=1)]),
        lambda run: results.append((run.dead, run.faults)),
    )
    assert results == [({0}, {})]
    assert list(store.files("")) == ["a"]
    store.delete("a")
    explore(
        lambda: Execution(store, [Writer(creates, loses=StorageError("x"))]),
        lambda run: results.append((run.dead, run.faults)),
    )
    assert [type(fault) for fault in results[1][1].values()] == [StorageError]
    assert list(store.files("")) == ["a"]
