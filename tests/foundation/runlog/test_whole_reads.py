"""The next entry says which checkpoints this process has read whole."""

import json

from tasks.foundation.checkpoint.retention import KeepEvery, KeepLast, apply_retention
from tasks.foundation.contracts.checkpoint import WholeRead
from tasks.foundation.contracts.log_entry import Entry
from tasks.foundation.runlog.commits import commit
from tasks.foundation.runlog.history import commit_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.runlog.whole_reads import WholeReads
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.memory import MemoryStorage
from tests.support.counting_storage import Counting
from tests.support.small_logs import assert_sound, begin, committing, head_of, ref, stage, train


def steps_of(reads: tuple[WholeRead, ...]) -> list[int]:
    return [int(read.path.removeprefix("checkpoints/").split("-")[0]) for read in reads]


def steps_read(entry: Entry) -> list[int]:
    return steps_of(commit_of(entry).read_whole)


def test_next_commit_names_what_was_read_once(store: Storage) -> None:
    begin(store)
    log = RunLog(store)  # of a process that begins here, and restores the tip
    restored = head_of(log).retained[-1]
    log.whole_reads.add(restored)
    assert restored.path in log.whole_reads
    assert steps_read(train(log, 10)) == [0]
    assert steps_read(train(log, 20)) == []
    assert steps_of(head_of(RunLog(store)).read_whole) == [0]
    assert_sound(store)


def test_what_another_process_has_read_is_said_too(store: Storage) -> None:
    log = begin(store)
    train(log, 10)
    first, tip = head_of(log).retained
    log.whole_reads.add(first)
    said = WholeRead(path=tip.path, time="2026-01-01T00:00:00+00:00")
    body = committing(stage(store, 20, head_of(log).base, "a"), parent=tip.path)
    entry = commit(log, body.model_copy(update={"read_whole": (said,)}))
    assert sorted(steps_read(entry)) == [0, 10]
    assert entry.head.read_whole[-1] == said


def test_what_was_retired_meanwhile_is_not_said(store: Storage) -> None:
    log = begin(store)
    for step in (10, 20):
        train(log, step)
    for kept in head_of(log).retained[:2]:
        log.whole_reads.add(kept)
    apply_retention(log, [KeepLast(2)], attempt="keeper")
    assert steps_read(train(log, 30)) == [10]
    assert log.whole_reads.waiting() == ()


def test_an_entry_names_a_few_and_the_next_the_others(memory: MemoryStorage) -> None:
    log = begin(memory)
    for step in range(1, 40):
        train(log, step)
        apply_retention(log, [KeepEvery(1)], attempt="keeper")
    refs = list(head_of(RunLog(memory)).retained)
    counted = Counting(memory)
    log = RunLog(counted)
    for kept in refs[:10]:  # the oldest, which stand in pages of the log
        log.whole_reads.add(kept)
    counts = [len(steps_read(train(log, step))) for step in (40, 41, 42)]
    assert counts == [4, 4, 2]
    newest = memory.read(f"log/{head_of(log).number:08d}.json")
    assert len(json.loads(newest)["head"]["read_whole"]) == 2


def test_only_the_newest_reads_wait() -> None:
    reads = WholeReads()
    for step in (*range(100, 180), *range(10)):
        reads.add(ref(step))
    assert sorted(steps_of(reads.waiting())) == [*range(116, 180)]
    assert ref(5).path in reads, "it is not read again"
