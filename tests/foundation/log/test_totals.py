"""The totals in an entry are those of the whole history, whatever happened in it."""

import random

import pytest

from baton.tasks.foundation.contracts.log_entry import Rewind
from baton.tasks.foundation.log.fold import totals_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
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
