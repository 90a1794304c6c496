"""Where the time went: what is lost is moved, never added, and all of it adds up."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tasks.foundation.contracts.attempt import CAUSES, LAUNCH, AttemptRecord
from tasks.foundation.contracts.log_entry import Commit
from tasks.foundation.runlog.accounting import GOOD, LOST, Account, account_of, seconds_in_log
from tasks.foundation.runlog.attempts import Attempts
from tasks.foundation.runlog.commits import commit, quarantine
from tasks.foundation.runlog.history import history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tests.support.ledger_records import NOON, record_of
from tests.support.small_logs import begin, head_of, stage

NOW = NOON + timedelta(hours=1)


def account(log: RunLog | None, *records: AttemptRecord, unreadable: int = 0) -> Account:
    entries = [] if log is None else list(log.entries())
    found = account_of(Attempts(records, unreadable), entries, history_of(entries), now=NOW, gone=lambda _: False)
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


def test_without_attempts_there_is_no_account(store: Storage) -> None:
    entries = list(begin(store).entries())
    assert account_of(Attempts((), 2), entries, history_of(entries), now=NOW) is None


def test_the_dead_lose_what_they_had_not_committed_and_the_living_do_not() -> None:
    dead = record_of("a")
    ended = record_of("b", ended="ValueError", uncommitted_seconds=5.0)
    alive = record_of("c", alive=NOW.isoformat())
    told = account(None, dead, ended, alive)
    assert told.seconds == {"compile": 60.0, GOOD: 55.0, LOST: 35.0, "start-up": 30.0, "unattributed": 0.0}
    assert told.total_seconds == 180.0
    assert told.share(told.good_seconds) == pytest.approx(55 / 180)
    assert [(each.alive, each.silent, each.lost_seconds) for each in told.attempts] == [
        (False, True, 30.0), (False, False, 5.0), (True, False, 0.0),
    ]  # fmt: skip
    assert GOOD not in told.bad_seconds
    assert told.good_seconds + sum(told.bad_seconds.values()) == pytest.approx(told.total_seconds)


def test_a_wait_for_stages_elsewhere_is_what_they_do_not_tell_of_themselves() -> None:
    waits = record_of("a", ended="complete", uncommitted_seconds=0.0, seconds={LAUNCH: 100.0, "evaluate": 20.0})
    stages = [
        record_of(name, within="a", ended="complete", uncommitted_seconds=0.0, seconds={"start-up": 10.0, GOOD: 20.0})
        for name in "bc"
    ]
    told = account(None, waits, *stages)
    assert told.seconds[LAUNCH] == 40.0
    assert told.total_seconds == 120.0
    longer = record_of("d", within="a", ended="complete", uncommitted_seconds=0.0, seconds={GOOD: 90.0})
    assert account(None, waits, *stages, longer).seconds[LAUNCH] == 0.0


def test_what_was_handed_on_is_lost_only_if_nobody_commits_it(store: Storage) -> None:
    log = begin(store)
    trained(log, 10, 30.0)
    tip = head_of(log).tip
    assert tip is not None
    for path, lost in ((tip.path, 0.0), ("checkpoints/00000010-00000001-other", 30.0)):
        handed_on = record_of("a", ended="complete", staged=path)
        assert account(log, handed_on).seconds[LOST] == lost


def test_what_was_given_up_is_lost_even_to_the_living() -> None:
    alive = record_of("c", alive=NOW.isoformat(), uncommitted_seconds=10.0, discarded_seconds=8.0)
    assert account(None, alive).seconds[LOST] == 8.0


def test_committed_work_that_is_not_built_upon_is_lost(store: Storage) -> None:
    log = begin(store)
    trained(log, 100, 12.0)
    trained(log, 200, 9.0)
    worker = record_of("a", ended="complete", uncommitted_seconds=0.0)
    assert account(log, worker).seconds[LOST] == 0.0
    tip = head_of(log).tip
    assert tip is not None
    quarantine(log, tip, "damaged", attempt="b")
    told = account(log, worker)
    assert (told.seconds[GOOD], told.seconds[LOST], told.total_seconds) == (21.0, 9.0, 60.0)


def test_work_from_before_attempts_were_recorded_is_told_apart(store: Storage) -> None:
    log = begin(store)
    trained(log, 100, 12.0)
    tip = head_of(log).tip
    assert tip is not None
    trained(log, 200, 9.0)
    late = record_of("a", began=(NOW + timedelta(days=36500)).isoformat(), uncommitted_seconds=0.0)
    told = account(log, late)
    assert (told.unrecorded_seconds, told.seconds[LOST]) == (21.0, 0.0)
    quarantine(log, head_of(log).tip or tip, "damaged", attempt="b")
    assert account(log, late).seconds[LOST] == 0.0


def test_lost_work_never_exceeds_the_training(store: Storage) -> None:
    log = begin(store)
    trained(log, 100, 1e6)
    tip = head_of(log).tip
    assert tip is not None
    quarantine(log, tip, "damaged", attempt="b")
    told = account(log, record_of("a", uncommitted_seconds=1e5))
    assert (told.seconds[GOOD], told.seconds[LOST], told.total_seconds) == (0.0, 30.0, 60.0)


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
        # The second's clock was set back by an hour: it seems to have run before the first.
        ([span("a", 0, 60), span("b", -3600, 60)], 3540),
        # The clock was set back while it ran: placed by its end, it lasted as long as it lasted.
        ([span("a", 0, 60, began=(NOON + timedelta(hours=2)).isoformat())], 0),
    ],
)
def test_time_away_is_between_attempts(records: list[AttemptRecord], away: float) -> None:
    assert account(None, *records).away_seconds == pytest.approx(away)


AMOUNTS = some.dictionaries(some.sampled_from(CAUSES), some.floats(0, 1e6))
RECORDS = some.builds(
    lambda seconds, lost, given_up, at, ended: span(
        "a", at, 1.0, seconds=seconds, uncommitted_seconds=lost, discarded_seconds=given_up, ended=ended
    ),
    AMOUNTS, some.floats(0, 1e6), some.floats(0, 1e6), some.floats(-1e5, 1e5), some.sampled_from([None, "complete"]),
)  # fmt: skip


@given(some.lists(RECORDS, min_size=1))
def test_all_adds_up_and_nothing_is_negative(records: list[AttemptRecord]) -> None:
    told = account(None, *records)
    assert told.total_seconds == pytest.approx(sum(record.wall_seconds for record in records))
    assert all(amount >= 0 for amount in told.seconds.values())
    assert told.away_seconds >= 0
    assert 0 <= told.share(told.good_seconds) <= 1 + 1e-9


def test_the_log_alone_knows_the_lineage(store: Storage) -> None:
    log = begin(store)
    trained(log, 100, 12.0)
    assert seconds_in_log(history_of(log.entries())) == {"train": 12.0}
