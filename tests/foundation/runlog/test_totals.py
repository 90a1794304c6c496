"""The totals in an entry are those of the whole history, whatever happened in it."""

import random

import pytest

from tasks.foundation.contracts.log_entry import Commit, Entry, Rewind
from tasks.foundation.runlog.folding import fold
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.totals import totals_of
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.memory import MemoryStorage
from tests.support.counting_storage import Counting
from tests.support.random_logs import anything, append, next_commit
from tests.support.small_logs import begin, head_of, origin, train


@pytest.mark.parametrize("seed", range(8))
def test_totals_are_those_of_the_whole_history(memory: MemoryStorage, seed: int) -> None:
    chance, log = random.Random(seed), RunLog(memory)
    append(log, origin())
    for _ in range(60):
        entry = append(log, anything(head_of(log), chance))
        whole = totals_of(list(log.entries()))
        assert entry.totals == whole
        newest = RunLog(memory).newest()
        assert newest is not None
        assert newest.totals == whole, "as read from the file"
    assert whole.undone_seconds > 0


def test_log_of_the_schema_before_is_read_once(memory: MemoryStorage) -> None:
    chance, head = random.Random(1), None
    for number in range(20):
        body = origin() if head is None else next_commit(head, chance)
        head = fold(head, body)
        entry = Entry(number=number, time="2026-01-01T00:00:00+00:00", attempt="a", body=body, head=head)
        memory.create(f"log/{number:08d}.json", entry.to_json())
    assert head is not None
    counted = Counting(memory)
    log = RunLog(counted)
    newest = log.newest()
    assert newest is not None
    assert newest.totals is None
    assert log.totals(newest).segments == sum(
        isinstance(entry.body, Commit) and entry.body.ends_a_segment for entry in RunLog(memory).entries()
    )
    assert append(log, next_commit(head, chance)).totals is not None
    counted.calls.clear()
    again = RunLog(counted)
    append(again, next_commit(head_of(again), chance))
    assert counted.calls["read"] <= 3  # HINT, the newest entry, and the one after it


def test_unreadable_history_stops_no_commit(store: Storage) -> None:
    log = begin(store)
    for step in (10, 20, 30):
        train(log, step)
    store.write("log/00000002.json", b"{")
    fresh = RunLog(store)
    kept = head_of(fresh).retained
    entry = append(fresh, Rewind(to=kept[-2], blown_up_at=25, reason="NaN", skip_batches=1))
    assert entry.totals is None
    assert append(fresh, next_commit(head_of(fresh), random.Random(0))).totals is None
