"""The facts that are read without decoding an entry are those of the whole entry."""

import json
import random

import pytest

from tasks.foundation.contracts.log_entry import Commit
from tasks.foundation.runlog.brief_entry import brief_facts
from tasks.foundation.runlog.entry_paths import entry_path
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.memory import MemoryStorage
from tests.support.counting_storage import Counting
from tests.support.random_logs import anything, append, next_commit
from tests.support.small_logs import edit_entry, head_of, origin


def random_log(home: Storage, seed: int, entries: int) -> RunLog:
    chance, log = random.Random(seed), RunLog(home)
    append(log, origin())
    for _ in range(entries):
        append(log, anything(head_of(log), chance))
    append(log, next_commit(head_of(log), chance))
    return log


@pytest.mark.parametrize("seed", range(4))
def test_brief_facts_are_those_of_the_whole_entry(memory: MemoryStorage, seed: int) -> None:
    chance, log = random.Random(seed), random_log(memory, seed, 0)
    for _ in range(60):
        newest = append(log, anything(head_of(log), chance))
        head, totals = newest.head, newest.totals
        assert totals is not None
        facts = brief_facts(memory, 1)
        if not json.loads(memory.read(entry_path(newest.number)))["head"]["retained"].get("recent"):
            assert facts is None, "after a rewind, the tip may be in a page"
            continue
        assert facts is not None
        assert (facts.step, facts.entries) == (0 if head.tip is None else head.tip.step, newest.number + 1)
        assert facts.validation == ({} if totals.evaluation is None else totals.evaluation.metrics)
        assert (facts.target, facts.ended_early) == (totals.target, head.finished is not None)
        commits = [entry for entry in log.entries() if isinstance(entry.body, Commit)]
        assert facts.last_commit == commits[-1].time
        best = None if facts.best is None else (facts.best.metric, facts.best.value, facts.best.step)
        assert best == (None if head.best is None else (head.best.metric, head.best.value, head.best.checkpoint.step))


def test_a_correct_hint_costs_one_read(memory: MemoryStorage) -> None:
    last = head_of(random_log(memory, 0, 30)).number
    counted = Counting(memory)
    assert brief_facts(counted, last) is not None
    assert (counted.calls["read"], counted.calls["exists"]) == (1, 1)


@pytest.mark.parametrize(
    "changes",
    [{"format": 2}, {"number": 2}, {"body": {"kind": "new"}}, {"totals": None}],
)
def test_what_is_not_understood_is_left_to_the_log(memory: MemoryStorage, changes: dict[str, object]) -> None:
    last = head_of(random_log(memory, 0, 5)).number
    assert brief_facts(memory, last) is not None
    edit_entry(memory, last, lambda entry: entry.update(changes))
    assert brief_facts(memory, last) is None


def test_torn_entry_is_left_to_the_log(memory: MemoryStorage) -> None:
    last = head_of(random_log(memory, 0, 5)).number
    memory.write(entry_path(last), memory.read(entry_path(last))[:-1])
    assert brief_facts(memory, last) is None
