"""Accounting moves lost work between causes, and the causes add up to the total."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from baton.tasks.foundation.contracts.attempt import CAUSES, LAUNCH, AttemptRecord
from baton.tasks.foundation.contracts.log_entry import Commit
from baton.tasks.foundation.log.accounting import GOOD, LOST, Account, account_of, seconds_in_log
from baton.tasks.foundation.log.appends import commit, quarantine
from baton.tasks.foundation.log.attempts import Attempts
from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.clock import NOON
from tests.support.ledger_records import record_of
from tests.support.small_logs import begin, head_of, stage

NOW = NOON + timedelta(hours=1)
NEW = begin(MemoryStorage("accounting"))


def account(log: RunLog | None, *records: AttemptRecord) -> Account:
    log = NEW if log is None else log
    newest = log.newest()
    assert newest is not None
    found = account_of(Attempts(records, 0), log, newest, now=NOW)
    assert found is not None
    return found


def trained(log: RunLog, step: int, seconds: float) -> None:
    head = head_of(log)
    assert head.tip is not None
    staged = stage(log.home, step, head.base, f"at{head.number}")
    body = Commit(
        checkpoint=staged, parent=head.tip.path, exit_reason="segment_end", examples=8, seconds={"train": seconds}
    )
    commit(log, body)


def test_no_account_without_attempts(store: Storage) -> None:
    log = begin(store)
    newest = log.newest()
    assert newest is not None
    assert account_of(Attempts((), 2), log, newest, now=NOW) is None


def test_only_dead_attempts_lose_uncommitted_work() -> None:
    dead = record_of("a")
    ended = record_of("b", ended="ValueError", uncommitted_seconds=5.0)
    alive = record_of("c", alive=NOW.isoformat())
    result = account(None, dead, ended, alive)
    assert result.seconds == {"compile": 60.0, GOOD: 55.0, LOST: 35.0, "start-up": 30.0, "unattributed": 0.0}
    assert result.total_seconds == 180.0
    assert result.share(result.good_seconds) == pytest.approx(55 / 180)
    assert [(each.alive, each.silent, each.lost_seconds) for each in result.attempts] == [
        (False, True, 30.0), (False, False, 5.0), (True, False, 0.0),
    ]  # fmt: skip
    assert GOOD not in result.bad_seconds
    assert result.good_seconds + sum(result.bad_seconds.values()) == pytest.approx(result.total_seconds)


def test_remote_stage_time_is_not_counted_twice() -> None:
    waits = record_of("a", ended="complete", uncommitted_seconds=0.0, seconds={LAUNCH: 100.0, "evaluate": 20.0})
    stages = [
        record_of(name, within="a", ended="complete", uncommitted_seconds=0.0, seconds={"start-up": 10.0, GOOD: 20.0})
        for name in "bc"
    ]
    result = account(None, waits, *stages)
    assert result.seconds[LAUNCH] == 40.0
    assert result.total_seconds == 120.0
    longer = record_of("d", within="a", ended="complete", uncommitted_seconds=0.0, seconds={GOOD: 90.0})
    assert account(None, waits, *stages, longer).seconds[LAUNCH] == 0.0


def test_staged_work_is_lost_only_if_never_committed(store: Storage) -> None:
    log = begin(store)
    trained(log, 10, 30.0)
    tip = head_of(log).tip
    assert tip is not None
    for path, lost in ((tip.path, 0.0), ("checkpoints/00000010-00000001-other", 30.0)):
        handed_on = record_of("a", ended="complete", staged=path)
        assert account(log, handed_on).seconds[LOST] == lost


def test_discarded_work_is_lost_while_alive() -> None:
    alive = record_of("c", alive=NOW.isoformat(), uncommitted_seconds=10.0, discarded_seconds=8.0)
    assert account(None, alive).seconds[LOST] == 8.0


def test_rewound_work_is_lost(store: Storage) -> None:
    log = begin(store)
    trained(log, 100, 12.0)
    trained(log, 200, 9.0)
    worker = record_of("a", ended="complete", uncommitted_seconds=0.0)
    assert account(log, worker).seconds[LOST] == 0.0
    tip = head_of(log).tip
    assert tip is not None
    quarantine(log, tip, "damaged", attempt="b")
    result = account(log, worker)
    assert (result.seconds[GOOD], result.seconds[LOST], result.total_seconds) == (21.0, 9.0, 60.0)


def test_lost_work_never_exceeds_training(store: Storage) -> None:
    log = begin(store)
    trained(log, 100, 1e6)
    tip = head_of(log).tip
    assert tip is not None
    quarantine(log, tip, "damaged", attempt="b")
    result = account(log, record_of("a", uncommitted_seconds=1e5))
    assert (result.seconds[GOOD], result.seconds[LOST], result.total_seconds) == (0.0, 30.0, 60.0)


def span(name: str, at: float, lasted: float, **changes: Any) -> AttemptRecord:
    alive = NOON + timedelta(seconds=at + lasted)
    began = (NOON + timedelta(seconds=at)).isoformat()
    return record_of(name, **{"began": began, "alive": alive.isoformat(), "seconds": {"train": lasted}, **changes})


@pytest.mark.parametrize(
    ("records", "away"),
    [
        ([span("a", 0, 60)], 0),
        ([span("a", 0, 60), span("b", 100, 60)], 40),
        ([span("a", 0, 60), span("b", 30, 60), span("c", 40, 5)], 0),
        ([span("a", 0, 200), span("b", 100, 10), span("c", 230, 60)], 30),
        # The second one's clock is an hour slow, so it seems to run before the first.
        ([span("a", 0, 60), span("b", -3600, 60)], 3540),
        # The clock was set back during the attempt: the attempt is placed by its end, with its full duration.
        ([span("a", 0, 60, began=(NOON + timedelta(hours=2)).isoformat())], 0),
    ],
)
def test_away_time_is_between_attempts(records: list[AttemptRecord], away: float) -> None:
    assert account(None, *records).away_seconds == pytest.approx(away)


AMOUNTS = some.dictionaries(some.sampled_from(CAUSES), some.floats(0, 1e6))
RECORDS = some.builds(
    lambda seconds, lost, given_up, at, ended: span(
        "a", at, 1.0, seconds=seconds, uncommitted_seconds=lost, discarded_seconds=given_up, ended=ended
    ),
    AMOUNTS, some.floats(0, 1e6), some.floats(0, 1e6), some.floats(-1e5, 1e5), some.sampled_from([None, "complete"]),
)  # fmt: skip


@given(some.lists(RECORDS, min_size=1))
def test_account_adds_up_and_is_never_negative(records: list[AttemptRecord]) -> None:
    result = account(None, *records)
    assert result.total_seconds == pytest.approx(sum(record.wall_seconds for record in records))
    assert all(amount >= 0 for amount in result.seconds.values())
    assert result.away_seconds >= 0
    assert 0 <= result.share(result.good_seconds) <= 1 + 1e-9


def test_seconds_in_log_follow_the_lineage(store: Storage) -> None:
    log = begin(store)
    trained(log, 100, 12.0)
    assert seconds_in_log(history_of(log.entries())) == {"train": 12.0}
