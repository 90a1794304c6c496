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
from tests.support.small_logs import head_of, origin


def random_log(home: Storage, seed: int, entries: int) -> RunLog:
    chance, log = random.Random(seed), RunLog(home)
    append(log, origin())
    for _ in range(entries):
        append(log, anything(head_of(log), chance))
    append(log, next_commit(head_of(log), chance))
    return log


def edit(home: Storage, number: int, /, **changes: object) -> None:
    home.write(entry_path(number), json.dumps(json.loads(home.read(entry_path(number))) | changes).encode())


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


def test_log_without_last_commit_costs_one_more_read(memory: MemoryStorage) -> None:
    chance, log = random.Random(0), random_log(memory, 0, 3)
    committed = append(log, next_commit(head_of(log), chance))
    newest = append(log, anything(head_of(log), random.Random(3)))
    while newest.head.base != committed.number or isinstance(newest.body, Commit):
        committed = append(log, next_commit(head_of(log), chance))
        newest = append(log, anything(head_of(log), chance))
    whole = brief_facts(memory, 1)
    totals = json.loads(memory.read(entry_path(newest.number)))["totals"]
    assert totals.pop("last_commit") == committed.time
    edit(memory, newest.number, totals=totals)
    edit(memory, committed.number, time="2026-01-01T00:00:00+00:00")
    counted = Counting(memory)
    facts = brief_facts(counted, newest.number)
    assert facts is not None
    assert whole is not None
    assert (facts.last_commit, facts.step) == ("2026-01-01T00:00:00+00:00", whole.step)
    assert counted.calls["read"] == 2


@pytest.mark.parametrize(
    "changes",
    [{"schema_version": 1}, {"schema_version": 3}, {"number": 2}, {"body": {"kind": "new"}}, {"totals": None}],
)
def test_what_is_not_understood_is_left_to_the_log(memory: MemoryStorage, changes: dict[str, object]) -> None:
    last = head_of(random_log(memory, 0, 5)).number
    assert brief_facts(memory, last) is not None
    edit(memory, last, **changes)
    assert brief_facts(memory, last) is None


def test_torn_entry_is_left_to_the_log(memory: MemoryStorage) -> None:
    last = head_of(random_log(memory, 0, 5)).number
    memory.write(entry_path(last), memory.read(entry_path(last))[:-1])
    assert brief_facts(memory, last) is None
