"""Finding the head and appending, despite a wrong HINT, lost responses and foreign files."""

import json
import math
import uuid
from collections.abc import Iterator

import pytest

from baton.tasks.foundation.contracts.log_entry import Commit, Head, MetricRow
from baton.tasks.foundation.errors import FileAlreadyThere, RunLogError, StaleWriter, StorageError
from baton.tasks.foundation.log.appends import commit
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.counting_storage import Counting
from tests.support.small_logs import (
    Act,
    assert_sound,
    begin,
    committing,
    evaluation,
    head_of,
    log_numbers,
    origin,
    ref,
    signed,
    stage,
    train,
)

HINTS = [
    None, b"", b"0", b"1", b"500", b"998", b"999", b"1000", b"1001", b"5000", b"999999999999", b"9" * 30, b"9" * 9000,
    b"-5", b"1e3", b"999\n", b" 999", b"0x3e7", b"abc", b"\xff\xfe\x00", "٣".encode(), "²".encode(), b"999.0",
]  # fmt: skip


def long_log(home: Storage, entries: int) -> Counting:
    """A log in which only the newest entry is valid, because finding it reads no other."""
    begin(home)
    newest = json.loads(home.read("log/00000001.json"))
    for number in range(2, entries):
        home.write(f"log/{number:08d}.json", signed(newest | {"number": number}) if number == entries - 1 else b"{}")
    return Counting(home)


def begin_at(store: Storage, entries: int) -> RunLog:
    log = RunLog(store)
    for _ in range(head_of(log).number + 1, entries):
        log.append(lambda _: evaluation(ref(0), accuracy=1.0), attempt="a")
    return log


@pytest.fixture(scope="module")
def thousand() -> Iterator[Counting]:
    home = MemoryStorage(f"thousand-{uuid.uuid4().hex}")
    yield long_log(home, 1000)
    home.delete("")


@pytest.mark.parametrize("hint", HINTS)
def test_wrong_hint_costs_only_a_few_calls(thousand: Counting, hint: bytes | None) -> None:
    store = thousand
    if hint is None:
        store.delete("log/HINT")
    else:
        store._store._put("log/HINT", hint)  # the store itself would not write one that is too long
    store.calls.clear()
    assert head_of(RunLog(store)).number == 999
    # doubling up to 1,000 and halving the last stride take 2 * log2(1000) probes, plus two for the hint
    assert store.calls["exists"] <= 2 * math.log2(1000) + 3
    assert store.calls["read"] <= 4  # the hint, the entry that it names, the newest entry, and the one of the identity
    assert store.calls.total() == store.calls["exists"] + store.calls["read"]


@pytest.mark.parametrize("entries", [2, 3, 4, 5, 8, 9, 16, 17, 127, 128, 129])
def test_newest_entry_is_found_from_every_hint(memory: MemoryStorage, entries: int) -> None:
    store = long_log(memory, entries)
    for hint in (*range(20), 126, 127, 128, 129, 10**6):
        store.write("log/HINT", str(hint).encode())
        assert head_of(RunLog(store)).number == entries - 1


def test_cost_with_good_hint_is_constant(memory: MemoryStorage) -> None:
    costs = []
    for entries in (10, 100, 10_000):
        store = long_log(memory.at(str(entries)), entries)
        store.write("log/HINT", str(entries - 1).encode())
        store.calls.clear()
        assert head_of(RunLog(store)).number == entries - 1
        costs.append(dict(store.calls))
    assert costs == [{"read": 3, "exists": 1}] * 3


def test_unusable_hint_is_harmless(store: Storage) -> None:
    broken = Counting(store)
    log = begin(store)
    train(log, 10)
    broken.fails = lambda number, verb: (StorageError("refused"), False) if (number, verb) == (0, "read") else None
    assert head_of(RunLog(broken)).number == 2
    broken.fails = lambda _, verb: (StorageError("disk full"), False) if verb == "write" else None
    entry = RunLog(broken).append(lambda _: evaluation(ref(10), accuracy=1.0), attempt="a")
    assert entry is not None
    assert head_of(log).number == 3


def test_warm_log_asks_only_for_the_next_entry(store: Storage) -> None:
    begin(store)
    counted = Counting(store)
    log = RunLog(counted)
    head_of(log)
    counted.calls.clear()
    assert head_of(log).number == 1
    assert counted.calls == {"read": 1, "local_path": 1}  # `local_path` sends no request
    counted.calls.clear()
    tip = head_of(RunLog(store)).tip
    assert tip is not None
    log.append(lambda _: evaluation(tip, accuracy=1.0), attempt="a")
    # The log still being there, the entry, and HINT.
    assert counted.calls == {"exists": 1, "create": 1, "write": 1}
    counted.calls.clear()
    assert [log.entry(number).number for number in range(3)] == [0, 1, 2]
    assert counted.calls == {}


@pytest.mark.parametrize("missed", [0, 1, 2, 5, 40])
def test_warm_log_sees_what_rivals_append(store: Storage, missed: int) -> None:
    log = begin(store)
    head_of(log)
    for number in range(missed):
        train(RunLog(store), 10 * number + 10, attempt="rival")
    assert head_of(log) == head_of(RunLog(store))
    assert head_of(log).number == 1 + missed


def test_only_the_newest_state_says_that_nothing_is_left(store: Storage) -> None:
    log = begin(store)
    head_of(log)
    rival = RunLog(store)
    train(rival, 10, attempt="rival")
    asked: list[int] = []

    def decide(head: Head | None) -> Commit | None:
        assert head is not None
        asked.append(head.number)
        if head.number == 1:
            raise StaleWriter("on an old state")
        return None

    assert log.append(decide, attempt="a") is None
    assert asked == [1, 2]
    assert log.append(lambda head: None if head is None else committing(stage(store, 20, head.base, "a")), attempt="a")
    assert_sound(store)


@pytest.mark.slow
def test_memory_of_a_log_is_bounded(memory: MemoryStorage) -> None:
    store = Counting(long_log(memory, 2))
    log = begin_at(store, 700)
    assert head_of(log).number == 699
    store.calls.clear()
    log.entry(690)
    assert not store.calls
    log.entry(5)
    assert store.calls == {"read": 1}


def test_home_without_run_has_no_head(store: Storage) -> None:
    assert RunLog(store).head() is None
    assert list(RunLog(store).entries()) == []
    store.write("log/HINT", b"7")
    assert RunLog(store).head() is None


def test_entries_have_no_gaps_and_carry_state(store: Storage) -> None:
    log = begin(store)
    for step in (10, 20, 30):
        train(log, step)
    assert [entry.number for entry in log.entries()] == [0, 1, 2, 3, 4]
    assert_sound(store)
    log.write_hint()  # as retention does after a commit
    assert store.read("log/HINT") == b"4"
    assert head_of(log).tip is not None
    assert [kept.step for kept in head_of(log).retained] == [0, 10, 20, 30]


def test_append_decides_again_after_rival(store: Storage) -> None:
    log = begin(store)
    numbers: list[int] = []

    def decide(head: Head | None) -> Commit | None:
        assert head is not None
        numbers.append(head.number)
        if len(numbers) <= 3:  # a rival appends first, three times
            RunLog(store).append(lambda _: evaluation(ref(0), accuracy=0.1), attempt="other")
        return committing(stage(store, 10, head.base, "slow"))

    entry = log.append(decide, attempt="slow")
    assert numbers == [1, 2, 3, 4]
    assert entry is not None
    assert entry.number == 5
    assert_sound(store)


def test_append_without_body_writes_nothing(store: Storage) -> None:
    log = begin(store)
    before = sorted(store.files(""))
    assert log.append(lambda _: None, attempt="a") is None
    assert sorted(store.files("")) == before


def test_stale_commit_is_refused_and_names_the_winner(store: Storage) -> None:
    log = begin(store)
    base = head_of(log).base
    late = stage(store, 10, base, "late")
    train(log, 10, attempt="quick")
    with pytest.raises(StaleWriter) as error:
        commit(log, committing(late))
    for part in ("step 10", f"log entry {base}", "entry 2, checkpoint, attempt quick", "run again to continue"):
        assert part in str(error.value)
    assert error.value.exit_code == 1
    assert head_of(log).number == 2


def test_commit_without_run_is_refused(store: Storage) -> None:
    with pytest.raises(StaleWriter, match="step 10"):
        commit(RunLog(store), committing(ref(10)))
    assert list(store.files("")) == []


def test_housekeeping_does_not_disturb_commit(store: Storage) -> None:
    log = begin(store)
    staged = stage(store, 10, head_of(log).base, "a")
    for _ in range(3):
        log.append(lambda _: evaluation(ref(0), accuracy=0.1), attempt="keeper")
    assert commit(log, committing(staged)).number == 5
    assert_sound(store)


ODD = (MetricRow(step=5, metrics={"loss": math.nan, "gain": -math.inf, "zero": -0.0, "third": 1 / 3}),)


@pytest.mark.parametrize("history", [(), ODD], ids=["plain", "not finite"])
@pytest.mark.parametrize("lost", [FileAlreadyThere("lost"), StorageError("timed out")], ids=["refused", "timed out"])
def test_lost_response_is_not_a_rival(store: Storage, history: tuple[MetricRow, ...], lost: StorageError) -> None:
    log = begin(store)
    body = committing(stage(store, 10, head_of(log).base, "a"), history=history)
    flaky = Counting(store)
    answers = [(lost, True)]
    flaky.fails = lambda _, verb: answers.pop() if verb == "create" and answers else None
    try:
        entry = commit(RunLog(flaky), body)
    except StorageError:
        assert type(lost) is StorageError
        train(log, 20, attempt="next")  # even if another commit follows it
        entry = commit(RunLog(flaky), body)
    assert not answers
    assert entry.number == 2
    assert log_numbers(store) == list(range(head_of(log).number + 1))
    assert sum(1 for each in assert_sound(store) if each.attempt == "a") == 1


def test_repeated_commit_is_harmless(store: Storage) -> None:
    log = begin(store)
    body = committing(stage(store, 10, head_of(log).base, "a"), history=ODD)
    first = commit(log, body)
    train(log, 20)
    assert repr(commit(log, body)) == repr(first)
    assert head_of(log).number == 3


@pytest.mark.parametrize("different", [{"attempt": "b"}, {"manifest_digest": "other"}])
def test_commit_that_differs_in_one_field_is_a_rival(store: Storage, different: dict[str, str]) -> None:
    log = begin(store)
    staged = stage(store, 10, head_of(log).base, "a")
    commit(log, committing(staged))
    with pytest.raises(StaleWriter):
        commit(log, committing(staged.model_copy(update=different)))


def test_foreign_and_temporary_files_are_ignored(store: Storage) -> None:
    log = begin(store)
    train(log, 10)
    before = head_of(log)
    store.write("log/.unfinished-abc", b'{"half')
    store.write("log/00000003.json.tmp", b'{"half')
    store.write("log/notes.txt", b"mine")
    store.write("checkpoints/checkpoint", b'model_checkpoint_path: "ckpt-99"')
    store.write(f"checkpoints/00000099-{before.base:08d}-dead/ckpt.data", b"half of the state")
    store.write("checkpoint", b'model_checkpoint_path: "ckpt-99"')
    assert head_of(log) == before
    train(log, 20)
    assert head_of(log).number == before.number + 1


@pytest.mark.parametrize("data", [b"", b"{", b"null", b'{"format": 1}', b"\xff"])
def test_unreadable_newest_entry_is_named(store: Storage, data: bytes) -> None:
    log = begin(store)
    store.write("log/00000002.json", data)
    with pytest.raises(RunLogError, match=r"log/00000002\.json") as error:
        log.head()
    assert error.value.exit_code == 4


def test_copied_or_missing_entry_is_named(store: Storage) -> None:
    log = begin(store)
    train(log, 10)
    store.write("log/00000003.json", store.read("log/00000002.json"))
    with pytest.raises(RunLogError, match=r"log/00000003\.json has the number 2"):
        log.head()
    store.delete("log/00000003.json")
    store.delete("log/00000001.json")
    with pytest.raises(RunLogError, match=r"log/00000001\.json is missing"):
        list(log.entries())


def test_second_origin_is_refused(store: Storage) -> None:
    log = begin(store)
    begins: Act = lambda home: RunLog(home).append(lambda head: origin() if head is None else None, attempt="b")  # noqa: E731
    assert begins(store) is None
    with pytest.raises(RunLogError, match="already has an origin"):
        log.append(lambda _: origin(), attempt="b")
    assert head_of(log).number == 1
