"""Retained checkpoints are read again beside the training; damage is logged, and disturbs no commit."""

import threading
from collections.abc import Callable, Iterator

import pytest

from tasks.foundation.checkpoint import second_look
from tasks.foundation.checkpoint.second_look import SecondLook
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Quarantine, Retire
from tasks.foundation.errors import StorageError
from tasks.foundation.runlog.commits import commit
from tasks.foundation.runlog.history import commit_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import FileStat, Storage
from tasks.foundation.storage.gcs.storage import CloudStorage
from tasks.foundation.storage.memory import MemoryStorage
from tasks.foundation.telemetry.events import Committed, Note, Silent, Training
from tests.fakes.gcs.server import FakeGcs
from tests.support.event_recorder import EventRecorder
from tests.support.sent_requests import requests_of
from tests.support.small_logs import assert_sound, begin, committing, head_of, stage, staged_content, train

LONGEST_SECONDS = 120.0
COMMITTED = Committed(step=1, path="", size=0, metrics={})
TRAINING = Training(step=1, target=2, epoch=None, metrics={}, examples_per_second=1.0, input_wait_seconds=0.0)


def run_with(store: Storage, *steps: int) -> RunLog:
    log = begin(store)
    for step in steps:
        train(log, step)
    return log


def ref_at(log: RunLog, step: int) -> CheckpointRef:
    return next(ref for ref in head_of(log).retained if ref.step == step)


def flip(store: Storage, path: str) -> None:
    data = bytearray(store.read(path))
    data[len(data) // 2] ^= 1
    store.write(path, bytes(data))


def notes_of(recorder: EventRecorder) -> list[str]:
    assert all(isinstance(event, Note) and event.warning for event in recorder.events)
    return [event.text for event in recorder.events if isinstance(event, Note)]


def test_newest_is_read_first_and_each_once(store: Storage) -> None:
    log = run_with(store, 10, 20)
    log.whole_reads.add(ref_at(log, 10))  # it was restored
    look = SecondLook(log, telemetry=Silent())
    assert [look.look() for _ in range(3)] == [True, True, False]
    entry = train(log, 30)
    steps = [read.path.split("-")[0].removeprefix("checkpoints/000000") for read in commit_of(entry).read_whole]
    assert steps == ["00", "10", "20"]
    assert [read.path for read in entry.head.read_whole] == [ref_at(log, 10).path, ref_at(log, 20).path]
    assert [look.look() for _ in range(2)] == [True, False]  # the new one
    another = SecondLook(RunLog(store), telemetry=Silent())
    assert [another.look() for _ in range(3)] == [True, True, False], "the log says that two were read"


def lengthen(store: Storage, path: str) -> None:
    store.write(path, store.read(path) + b"x")


@pytest.mark.parametrize("damage", [flip, lengthen, lambda store, path: store.write(path, b"")])
def test_damage_is_quarantined_and_the_next_commit_lands(
    store: Storage, damage: Callable[[Storage, str], None]
) -> None:
    log = run_with(store, 10, 20)
    damaged = ref_at(log, 10)
    damage(store, f"{damaged.path}/ckpt.data")
    recorder = EventRecorder()
    staged = stage(store, 30, head_of(log).base, "a")  # trained on the tip before the damage is found
    look = SecondLook(log, telemetry=recorder)
    assert [look.look() for _ in range(4)] == [True, True, True, False]
    [note] = notes_of(recorder)
    assert f"checkpoint {damaged.path} is damaged and quarantined: " in note
    assert "ckpt.data has" in note
    entry = commit(log, committing(staged, parent=head_of(log).tip.path))  # type: ignore[union-attr]
    assert [ref.step for ref in entry.head.retained] == [0, 20, 30]
    assert [ref.step for ref in entry.head.quarantined] == [10]
    assert damaged.path not in {read.path for read in commit_of(entry).read_whole}
    [found] = [each.body for each in assert_sound(store) if isinstance(each.body, Quarantine)]
    assert (found.path, found.reason in note) == (damaged.path, True)


def test_a_damaged_tip_is_said_and_quarantined_later(store: Storage) -> None:
    log = run_with(store, 10, 20)
    tip = ref_at(log, 20)
    store.delete(f"{tip.path}/manifest.json")
    recorder = EventRecorder()
    look = SecondLook(log, telemetry=recorder)
    assert [look.look() for _ in range(4)] == [True, True, True, False]
    assert head_of(log).tip == tip, "the training goes on from memory"
    train(log, 30)
    while look.look():
        pass
    first, second = notes_of(recorder)
    assert f"checkpoint {tip.path}, the newest, is damaged: " in first
    assert "The training goes on from memory, and the next commit replaces it" in first
    assert f"checkpoint {tip.path} is damaged and quarantined: " in second
    assert [ref.step for ref in head_of(log).retained] == [0, 10, 30]
    assert_sound(store)


class Wrong(MemoryStorage):
    """A store whose answers differ from what it holds, or fail, as often as a test says."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.faults: list[Callable[[str], bytes]] = []

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        return self.faults.pop()(path) if self.faults else super().read_range(path, begin, size)


def refuse(path: str) -> bytes:
    raise StorageError(f"{path}: 503")


@pytest.fixture
def wrong(memory: MemoryStorage) -> Iterator[Wrong]:
    store = Wrong(memory.root)
    yield store
    store.delete("")


def test_one_read_that_differs_is_no_damage(wrong: Wrong) -> None:
    log, recorder = run_with(wrong), EventRecorder()
    for other in (b"other bytes", b"", b"state at 0 by a0 and more"):
        wrong.faults = [lambda _, other=other: other]  # type: ignore[misc]
        log = RunLog(wrong)
        assert SecondLook(log, telemetry=recorder).look()
        assert head_of(log).tip is not None
        assert ref_at(log, 0).path in log.whole_reads
    assert recorder.events == []


def test_refused_reads_are_said_and_tried_after_a_commit(wrong: Wrong) -> None:
    log, recorder = run_with(wrong, 10), EventRecorder()
    wrong.faults = [refuse]
    look = SecondLook(log, telemetry=recorder)
    assert [look.look() for _ in range(3)] == [True, True, False]
    [note] = notes_of(recorder)
    assert note.startswith(f"checkpoint {ref_at(log, 10).path} could not be read a second time: ")
    assert "503" in note
    assert ref_at(log, 10).path not in log.whole_reads
    assert head_of(log).quarantined == ()


def test_what_is_retired_meanwhile_is_no_damage(memory: MemoryStorage) -> None:
    log, recorder = run_with(memory, 10, 20), EventRecorder()
    going = ref_at(log, 10)
    rival = RunLog(memory)

    def retire() -> bool:
        rival.append(lambda _: Retire(paths=(going.path,), deleted=()), attempt="rival")
        memory.delete(going.path)
        return False

    reads = iter([None, retire])  # while the second one is about to be read

    def paused() -> bool:
        act = next(reads, None)
        return False if act is None else act()

    look = SecondLook(log, telemetry=recorder, paused=paused)
    assert look.look()
    while look.look():
        pass
    assert recorder.events == []
    assert head_of(log).quarantined == ()


def test_entries_of_its_own_say_what_was_read(store: Storage) -> None:
    """Where other processes commit, no commit of this one says it."""
    log = run_with(store, 10)
    look = SecondLook(log, telemetry=Silent(), own_entries=True)
    while look.look():
        pass
    said = [entry.body for entry in assert_sound(store) if isinstance(entry.body, Retire)]
    assert [(body.paths, body.deleted, len(body.read_whole)) for body in said] == [((), (), 1)] * 2
    assert [read.path for read in head_of(log).read_whole] == [ref.path for ref in head_of(log).retained]
    assert log.whole_reads.waiting() == ()


def thread_of() -> threading.Thread:
    """The newest one; one of an earlier test may be ending."""
    return [each for each in threading.enumerate() if each.name == "baton-second-look"][-1]


def test_it_begins_with_the_training_and_follows_commits(store: Storage) -> None:
    log = run_with(store, 10)
    with SecondLook(log, telemetry=Silent(), own_entries=True) as look:
        thread = thread_of()
        assert log.whole_reads.waiting() == ()
        look.emit(TRAINING)
        wait_until(lambda: len(head_of(RunLog(store)).read_whole) == 2)
        train(RunLog(store), 20)
        look.emit(COMMITTED)
        wait_until(lambda: head_of(RunLog(store)).read_whole[-1].path == ref_at(log, 20).path)
    thread.join(LONGEST_SECONDS)
    assert not thread.is_alive()


def wait_until(is_so: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(int(LONGEST_SECONDS / 0.05)):
        if is_so():
            return
        waiting.wait(0.05)
    raise AssertionError("it did not happen")


class Held(MemoryStorage):
    """A store that does not answer one kind of call until a test lets it."""

    def __init__(self, address: str, held: str) -> None:
        super().__init__(address)
        self.asked, self.answers = threading.Event(), threading.Event()
        self._held = held

    def read_range(self, path: str, begin: int, size: int) -> bytes:
        self._wait("first read")
        return super().read_range(path, begin, size)

    def checksum(self, path: str, *, begin: int = 0, size: int | None = None) -> FileStat:
        self._wait("second read")
        return super().checksum(path, begin=begin, size=size)

    def _wait(self, call: str) -> None:
        if call == self._held:
            self.asked.set()
            assert self.answers.wait(LONGEST_SECONDS)


@pytest.mark.parametrize("call", ["first read", "second read"])
def test_a_stop_waits_for_no_answer_of_the_store(memory: MemoryStorage, call: str) -> None:
    held = Held(memory.root, call)
    log = run_with(held, 10)
    damaged = ref_at(log, 0)
    flip(held, f"{damaged.path}/ckpt.data")
    log.whole_reads.add(ref_at(log, 10))
    before = sorted(held.files(""))
    with SecondLook(log, telemetry=Silent(), own_entries=True) as look:
        look.emit(COMMITTED)
        assert held.asked.wait(LONGEST_SECONDS)
        thread = thread_of()
    assert thread.is_alive(), "the end came before the answer"
    held.answers.set()
    thread.join(LONGEST_SECONDS)
    assert not thread.is_alive()
    assert sorted(held.files("")) == before, "nothing is appended after the end"
    assert head_of(log).quarantined == ()


@pytest.mark.parametrize("pauses", [False, True], ids=["by its rate", "for a save"])
def test_a_stop_ends_a_read_that_waits(store: Storage, pauses: bool) -> None:
    log, waits = run_with(store, 10), threading.Event()

    def paused() -> bool:
        waits.set()
        return pauses

    with SecondLook(log, telemetry=Silent(), paused=paused, bytes_per_second=0.001) as look:
        look.emit(COMMITTED)
        assert waits.wait(LONGEST_SECONDS)
        thread = thread_of()
    thread.join(LONGEST_SECONDS)
    assert not thread.is_alive()
    assert log.whole_reads.waiting() == ()


def test_a_checkpoint_in_a_bucket_takes_few_requests(cloud: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of the log, the manifest, and its one file in parts."""
    monkeypatch.setattr(second_look, "_REQUEST_BYTES", 10)
    log = run_with(CloudStorage("bucket", "runs/run"), 10)
    looking = SecondLook(log, telemetry=Silent())
    with requests_of(cloud) as requests:
        assert looking.look()
    parts = -(-len(staged_content(10, "a")) // 10)
    assert parts == 2
    assert len(requests.sent) == 2 + parts, requests.words()
    assert ref_at(log, 10).path in log.whole_reads
