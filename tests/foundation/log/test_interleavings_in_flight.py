"""Processes that train on while their save is in flight: every order of their threads and of rivals, with faults."""

import os
from collections.abc import Callable
from functools import partial

import pytest

from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Quarantine, Rewind
from baton.tasks.foundation.errors import StaleWriter, StorageError
from baton.tasks.foundation.storage.interface import Storage
from tests.support.interleaving import Execution, Writer
from tests.support.rival_writers import Scene, in_memory, report_interleavings
from tests.support.small_logs import Act, assert_sound
from tests.support.training_writers import Process, assert_same_bits, step_processes

pytestmark = in_memory


@pytest.fixture(autouse=True)
def _stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    step_processes(monkeypatch)


def commits_of(entries: list[Entry], process: Process) -> list[str]:
    """The attempts of a process that the log names."""
    bodies = [entry.body for entry in entries if isinstance(entry.body, Commit)]
    return [body.checkpoint.attempt for body in bodies if body.checkpoint.attempt in process.begun]


def process_of(execution: Execution, number: int) -> Process:
    process = execution.writers[number].work.__self__  # type: ignore[attr-defined]
    assert isinstance(process, Process)
    return process


def assert_promises(scene: Scene, execution: Execution, entries: list[Entry], *processes: int) -> None:
    """Assert what holds whatever happens: soundness is asserted by the scene."""
    assert_same_bits(entries, since=scene.base)
    for number in processes:
        process = process_of(execution, number)
        made = commits_of(entries, process)
        assert made == process.begun[: len(made)], "committed on top of a save that failed"
        if number in execution.results:
            assert made == process.begun, "a save is lost"
            assert entries[-1].number >= execution.results[number].number  # type: ignore[attr-defined]


class Restarts:
    """Trains to the end in a new process, once from each home that executions leave.

    Attributes:
        steps: committed by all processes, since those of the scene.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.steps: set[tuple[int, ...]] = set()
        self._seen: set[object] = set()

    def check(self, store: Storage, entries: list[Entry], until_step: int = 50) -> None:
        """Assert that the new process continues from the log."""
        home = (frozenset(store.files("checkpoints")), *((entry.body.kind, entry.attempt) for entry in entries))
        if home in self._seen:
            return
        self._seen.add(home)
        again = Execution(store, [Writer(Process("again", until_step).work)])
        again.run()
        again.end()
        assert again.faults == {}
        after = assert_sound(store)
        assert after[: len(entries)] == entries
        assert_same_bits(after, since=self.scene.base)
        tip = after[-1].head.tip
        assert tip is not None
        assert tip.step == until_step
        self.steps.add(tuple(steps_of(after, self.scene)))


@pytest.fixture
def restarts(scene: Scene) -> Restarts:
    return Restarts(scene)


def steps_of(entries: list[Entry], scene: Scene) -> list[int]:
    return [entry.body.checkpoint.step for entry in entries[scene.base + 1 :] if isinstance(entry.body, Commit)]


def changes_alone(scene: Scene, home: Storage, make: Callable[[], Process]) -> int:
    """Number of changing calls of a process that nothing disturbs."""
    execution = Execution(scene.set_up(home), [Writer(make().work)])
    execution.run()
    execution.end()
    assert execution.faults == {}
    assert execution.results
    return execution.changes(0)


Saves = tuple[Callable[[], Process], int | None]
# `make chaos` plays every order, except those of commits within a segment, which are too many.
WHOLE = "BATON_TEST_WHOLE_TABLE" in os.environ
SAVES = [
    pytest.param((lambda: Process("a", 45), None if WHOLE else 8), id="borders"),
    pytest.param((lambda: Process("a", 50, commits_within=True), 20 if WHOLE else 4), id="intervals"),
]


@pytest.mark.slow
@pytest.mark.parametrize("saves", SAVES)
def test_killed_process_loses_nothing_committed(
    request: pytest.FixtureRequest,
    scene: Scene,
    home: Storage,
    restarts: Restarts,
    saves: Saves,
) -> None:
    (make, drawn), deaths = saves, 0

    def check(execution: Execution, entries: list[Entry]) -> None:
        nonlocal deaths
        deaths += len(execution.dead)
        assert execution.faults == {}
        assert_promises(scene, execution, entries, 0)
        restarts.check(execution.store, entries)

    total = sum(
        scene.play(home, lambda count=count: [Writer(make().work, dies_after=count)], check, drawn=drawn)  # type: ignore[misc]
        for count in range(changes_alone(scene, home, make))
    )
    assert deaths > total / 4
    assert all(list(steps) == sorted(set(steps)) for steps in restarts.steps), "a step is committed twice"
    report_interleavings(request, total, at_least=70)


@pytest.mark.slow
@pytest.mark.parametrize("saves", SAVES)
def test_refused_call_commits_nothing_on_top(
    request: pytest.FixtureRequest,
    scene: Scene,
    home: Storage,
    restarts: Restarts,
    saves: Saves,
) -> None:
    (make, drawn), raised = saves, list[BaseException]()

    def check(execution: Execution, entries: list[Entry]) -> None:
        raised.extend(execution.faults.values())
        assert_promises(scene, execution, entries, 0)
        restarts.check(execution.store, entries)

    total = sum(
        scene.play(home, lambda count=count: [Writer(make().work, fails_at=count)], check, drawn=drawn)  # type: ignore[misc]
        for count in range(changes_alone(scene, home, make))
    )
    assert all(isinstance(fault, StorageError) for fault in raised)
    assert len(raised) > total / 4
    report_interleavings(request, total, at_least=70)


def test_lost_response_of_a_save_is_not_fatal(
    request: pytest.FixtureRequest, scene: Scene, home: Storage, restarts: Restarts
) -> None:
    def check(execution: Execution, entries: list[Entry]) -> None:
        assert_promises(scene, execution, entries, 0)
        restarts.check(execution.store, entries)

    count = scene.play(home, lambda: [Writer(Process("a", 45).work, loses=StorageError("timed out"))], check)
    report_interleavings(request, count, at_least=3)


def test_weights_in_flight_that_are_not_finite_are_rewound(
    request: pytest.FixtureRequest, scene: Scene, home: Storage
) -> None:
    """However far the training has come meanwhile, the log is the same."""
    logs: list[list[tuple[str, int]]] = []

    def check(execution: Execution, entries: list[Entry]) -> None:
        assert execution.faults == {}
        assert_same_bits(entries, since=scene.base)
        bodies = [entry.body for entry in entries[scene.base + 1 :]]
        logs.append(
            [(body.kind, body.checkpoint.step) for body in bodies if isinstance(body, Commit)]
            + [(body.kind, body.blown_up_at) for body in bodies if isinstance(body, Rewind)]
        )

    count = scene.play(home, lambda: [Writer(Process("a", 50, not_finite_at=40).work)], check)
    assert logs == [[("checkpoint", 40), ("checkpoint", 50), ("rewind", 40)]] * count
    report_interleavings(request, count, at_least=50)


RIVALS: dict[str, Callable[[Scene], Act]] = {
    "commits": lambda scene: scene.commits(0),
    "rewinds": lambda scene: scene.rewinds(35),
    "rewinds further": lambda scene: scene.rewinds(30),
    "quarantines": lambda scene: scene.quarantines,
    "changes": lambda scene: scene.changes_seed,
    "evaluates and retires": lambda scene: scene.evaluates_and_retires,
}


def overtaken(rival: Act) -> list[Writer]:
    return [Writer(Process("a", 50).work), Writer(rival)]


def later(act: Act, turns: int) -> Act:
    """Act after others may have taken some turns."""

    def work(store: Storage) -> object:
        for _ in range(turns):
            store.trains()  # type: ignore[attr-defined]
        return act(store)

    return work


@pytest.mark.slow
@pytest.mark.parametrize("rival", RIVALS)
def test_rival_while_a_save_is_in_flight(
    request: pytest.FixtureRequest, scene: Scene, home: Storage, restarts: Restarts, rival: str
) -> None:
    outcomes: set[str] = set()

    def check(execution: Execution, entries: list[Entry]) -> None:
        assert_promises(scene, execution, entries, 0)
        fault = execution.faults.get(0)
        outcomes.add(type(fault).__name__)
        assert fault is None or isinstance(fault, StaleWriter), fault
        moved = [entry for entry in entries[scene.base + 1 :] if isinstance(entry.body, Rewind | Quarantine)]
        assert len(moved) <= 1
        restarts.check(execution.store, entries)

    act, is_long = RIVALS[rival](scene), rival == "evaluates and retires"  # its orders are too many
    count = scene.play(home, lambda: [Writer(Process("a", 40).work), Writer(act)], check, drawn=12 if is_long else None)
    for turns in range(0, 30, 5):
        late = later(act, turns)
        count += scene.play(home, partial(overtaken, late), check, drawn=(10 if WHOLE else 1) * 6 + turns // 5)
    assert outcomes == ({"NoneType"} if is_long else {"NoneType", "StaleWriter"})
    report_interleavings(request, count, at_least=50)


@pytest.mark.slow
def test_two_processes_with_saves_in_flight(
    request: pytest.FixtureRequest, scene: Scene, home: Storage, restarts: Restarts
) -> None:
    """As after a restart that did not notice that the process before still lives."""
    winners: set[tuple[int, ...]] = set()

    def check(execution: Execution, entries: list[Entry]) -> None:
        assert_promises(scene, execution, entries, 0, 1)
        assert all(isinstance(fault, StaleWriter) for fault in execution.faults.values()), execution.faults
        winners.add(tuple(sorted(execution.results)))
        restarts.check(execution.store, entries)

    def two(until_step: int) -> list[Writer]:
        return [Writer(Process(name, until_step).work) for name in ("a", "b")]

    count = scene.play(home, lambda: two(40), check) + scene.play(
        home, lambda: two(50), check, drawn=200 if WHOLE else 20
    )
    assert winners >= {(0,), (1,)}
    assert restarts.steps == {(40, 50)}
    report_interleavings(request, count, at_least=60)
