"""Attempts without progress stop the run: a table of rows of attempts."""

from datetime import timedelta
from typing import Any

import pytest

from baton.tasks.foundation.contracts.attempt import LAUNCH, AttemptRecord, mark_of
from baton.tasks.foundation.contracts.log_entry import Head
from baton.tasks.foundation.errors import NoProgress
from baton.tasks.foundation.log.attempts import is_alive, read_attempts, require_progress
from baton.tasks.foundation.machine.processes import process_name
from baton.tasks.foundation.storage.interface import Storage
from tests.support.clock import NOON
from tests.support.ledger_records import head_at, record_of

NOW = NOON + timedelta(hours=1)
DEAD: dict[str, Any] = {}
CRASHED = {"ended": "ValueError", "message": "no"}
ALIVE = {"alive": NOW.isoformat()}
CTRL_C = {"ended": "sigint"}
BUDGET = {"ended": "time_budget"}
COMPLETE = {"ended": "complete"}
PREEMPTED = {"ended": "preempted"}
AFRESH = {"afresh": True}
EVALUATED = {"mark": "100 evaluated"}
EARLIER = {"mark": "50", "from_step": 50}
FURTHER = {"committed_step": 120}  # it made progress, but its commit was damaged
LATER = {"mark": "200", "from_step": 200, "committed_step": 200}  # the run was rewound afterwards


def keep(home: Storage, *changes: dict[str, Any]) -> None:
    for number, change in enumerate(changes):
        began = (NOON + timedelta(minutes=number)).isoformat()
        record = record_of(f"{number:032x}", **{"began": began, **change})
        home.write(f"attempts/{record.attempt}.json", record.to_json())


def refused(home: Storage, limit: int = 3, head: Head | None = None) -> str | None:
    try:
        require_progress(home, head or head_at(100), limit=limit, now=NOW)
    except NoProgress as fault:
        return str(fault)
    return None


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        ([], False),
        ([DEAD] * 2, False),
        ([DEAD] * 3, True),
        ([CRASHED, DEAD, PREEMPTED], True),
        ([DEAD] * 9, True),
        # An attempt that is alive does not count and does not end the row.
        ([DEAD, DEAD, ALIVE], False),
        ([DEAD, ALIVE, DEAD, DEAD], True),
        # An attempt that ended on request does not count and does not end the row.
        ([DEAD, DEAD, CTRL_C], False),
        ([DEAD, CTRL_C, DEAD, DEAD, COMPLETE], True),
        # A time budget that ends before the first commit would always end there.
        ([BUDGET] * 3, True),
        ([CTRL_C] * 9, False),
        # With --try-again the count starts over.
        ([DEAD, DEAD, DEAD | AFRESH], False),
        ([DEAD, DEAD, DEAD | AFRESH, DEAD, DEAD], True),
        ([DEAD, DEAD, DEAD, ALIVE | AFRESH], False),
        ([DEAD, DEAD, CTRL_C | AFRESH, DEAD, DEAD], False),
        # Progress between the attempts.
        ([DEAD, DEAD, EARLIER], False),
        ([DEAD, DEAD, EARLIER, DEAD, DEAD], False),
        ([EARLIER] * 9, False),
        ([EARLIER] * 9 + [DEAD] * 3, True),
        ([DEAD, DEAD, FURTHER, DEAD], False),
        ([DEAD, DEAD, CTRL_C | FURTHER, DEAD], False),
        # Refused input costs no training.
        ([{"ended": "IdentityChanged"}] * 9, False),
        ([DEAD, {"ended": "ModelError"}, DEAD, DEAD], True),
        ([{"ended": "StepFailed"}] * 3, True),  # but a step that fails costs training
        ([{"ended": "hung"}] * 3, True),
        ([{"ended": "hung"}, DEAD, {"ended": "hung"}], True),
        # A tip that is damaged again and again, evaluated or not.
        ([EVALUATED, DEAD, EVALUATED], True),
        # Going back is not progress.
        ([LATER, LATER, DEAD], True),
    ],
)
def test_rows_that_stop_a_run(store: Storage, changes: list[dict[str, Any]], stops: bool) -> None:
    keep(store, *changes)
    assert (refused(store) is not None) == stops


def test_remote_stage_and_its_waiter_are_one_attempt(store: Storage) -> None:
    waiting = {"attempt": "a" * 32}
    stage = {"within": "a" * 32}
    keep(store, DEAD, waiting, stage)
    assert refused(store) is None
    assert refused(store, limit=2) is not None


def test_training_attempt_counts_despite_remote_stages(store: Storage) -> None:
    attempts = [{"attempt": letter * 32} for letter in "abc"]
    stages = [{"within": letter * 32, **COMPLETE} for letter in "abc"]
    keep(store, *[record for pair in zip(attempts, stages, strict=True) for record in pair])
    assert refused(store) is not None


def test_waiting_for_a_machine_is_no_failure(store: Storage) -> None:
    for number, ended in enumerate([BUDGET, PREEMPTED, DEAD, CRASHED]):
        doing = "shut-down" if ended else LAUNCH
        waiting = {"seconds": {"start-up": 9.0, "build": 0.1, LAUNCH: 3600.0}, "doing": doing, **ended}
        keep(store, *[{**waiting, "attempt": f"{letter}{number:031x}"} for letter in "abc"])
        assert (refused(store) is not None) == (ended is CRASHED)


@pytest.mark.parametrize("doing", ["build", "commit", "evaluate"])
def test_crash_after_waiting_is_a_failure(store: Storage, doing: str) -> None:
    keep(store, *[{"seconds": {"start-up": 9.0, LAUNCH: 5.0, doing: 30.0}, "doing": doing}] * 3)
    assert f"killed or crashed in {doing}" in (refused(store) or "")


def test_evaluation_of_tip_is_progress(store: Storage) -> None:
    keep(store, DEAD, DEAD, DEAD)
    assert refused(store, head=head_at(100, evaluated=True)) is None
    keep(store, *[{"mark": "100 evaluated"}] * 3)
    assert refused(store, head=head_at(100, evaluated=True)) is not None


def test_replacing_damaged_tip_is_no_progress(store: Storage) -> None:
    """Each attempt finds another path at step 100, goes back to step 50 and commits step 100 again."""
    assert mark_of(head_at(100, path="checkpoints/a")) == mark_of(head_at(100, path="checkpoints/b"))
    keep(store, *[{"mark": mark_of(head_at(100, path=f"checkpoints/{n}")), "committed_step": 100} for n in range(3)])
    assert refused(store) is not None


def test_foreign_files_are_counted_and_skipped(store: Storage) -> None:
    keep(store, DEAD, DEAD, DEAD)
    good = record_of("f" * 32).to_json()
    for name, data in (
        ("note.txt", b"hello"),
        ("x.json", good),  # the name of another attempt
        ("deeper/x.json", good),
        ("a.json", b"{"),
        ("b.json", good.replace(b'"train": 30.0', b'"train": NaN')),
        ("c.json", good.replace(b'"host"', b'"ghost"')),
        ("d.json", b"\xff\xfe"),
    ):
        store.write(f"attempts/{name}", data)
    attempts = read_attempts(store)
    assert (len(attempts.records), attempts.unreadable) == (3, 7)
    assert refused(store) is not None


def test_no_attempts_cost_one_listing(store: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    listing = store.files
    monkeypatch.setattr(store, "files", lambda folder: listed.append(folder) or listing(folder))
    monkeypatch.setattr(store, "read", pytest.fail)
    assert refused(store) is None
    assert listed == ["attempts"]


def test_process_known_to_be_gone_is_dead(store: Storage) -> None:
    keep(store, ALIVE, ALIVE, ALIVE)
    assert refused(store) is None
    gone = f"{process_name().rpartition('/')[0]}/1"  # another process had this id before
    keep(store, *[{**ALIVE, "process": gone}] * 3)
    assert refused(store) is not None


@pytest.mark.parametrize(("seconds", "alive"), [(0, True), (89, True), (91, False), (-60, True), (-3600, False)])
def test_attempt_without_heartbeat_is_dead(seconds: float, alive: bool) -> None:
    record = record_of("a", alive=(NOW - timedelta(seconds=seconds)).isoformat())
    assert is_alive(record, now=NOW, gone=lambda _: False) == alive


def test_diagnosis_lists_attempts(store: Storage) -> None:
    keep(store, DEAD | {"host": "tpu-7"}, CRASHED | {"message": "a\nb " + "x" * 999}, DEAD | {"doing": "compile"})
    message = refused(store)
    assert message is not None
    lines = message.splitlines()
    assert lines[0].startswith(f"{store.uri}: 3 attempts in a row made no progress beyond step 100")
    assert lines[1] == "  2026-01-31 12:00:00  tpu-7  ran 60 s  killed or crashed in train, at step 130"
    assert lines[2].startswith("  2026-01-31 12:01:00  host  ran 60 s  ended in train, at step 130  ValueError: a b x")
    assert len(lines[2]) < 300
    assert lines[-2] == "The attempts ended for different reasons; start with the newest"
    assert lines[-1] == "hint: after fixing the cause: baton run FILE --try-again"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([DEAD | {"doing": "compile", "step": 100}], "all 3 attempts were killed or crashed in compile: out of memory"),
        ([DEAD], "all 3 attempts were killed or crashed in train: the machine was taken away before the first commit"),
        ([DEAD, DEAD | {"doing": "stage"}], "in different phases"),
        ([DEAD | {"doing": "commit"}], "in commit: out of memory or disk"),
        ([PREEMPTED, {"ended": "sigterm"}], "were stopped before the first commit"),
        ([CRASHED], "all 3 attempts met the same error, ValueError"),
        ([CRASHED, DEAD], "for different reasons"),
    ],
)
def test_likely_reason_is_named(store: Storage, changes: list[dict[str, Any]], words: str) -> None:
    keep(store, *(changes[number % len(changes)] for number in range(3)))
    assert words in (refused(store) or "")


def test_limit_of_one_refuses_after_one_attempt(store: Storage) -> None:
    keep(store, DEAD)
    assert "the last attempt made no progress" in (refused(store, limit=1) or "")


def test_record_is_read_as_written(store: Storage) -> None:
    record = record_of("a" * 32, message="<b>", seconds={"train": 0.1})
    store.write(f"attempts/{record.attempt}.json", record.to_json())
    assert read_attempts(store).records == (record,)
    assert AttemptRecord.model_validate_json(record.to_json()) == record


def test_hung_attempts_are_told_what_to_look_at(store: Storage) -> None:
    keep(store, *[{"ended": "hung", "message": "no inner loop has ended for 605 s"}] * 3)
    text = refused(store)
    assert text is not None
    assert "ended in train, at step 130  hung: no inner loop has ended for 605 s" in text
    assert "all 3 attempts waited for something that never came" in text
    assert "have the stacks of all threads" in text
