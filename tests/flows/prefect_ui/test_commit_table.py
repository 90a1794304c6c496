"""The table of commits follows the log, also after rewinds; an update reads the new entries only."""

import uuid
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flows.prefect_ui.artifacts import CommitTable
from tasks.foundation.contracts.log_entry import Evaluation
from tasks.foundation.errors import BlowUp
from tasks.foundation.runlog.commits import commit, quarantine, rewind
from tasks.foundation.runlog.history import commit_of, history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.memory import MemoryStorage
from tasks.foundation.telemetry.formatting import metric_words
from tests.foundation.telemetry.test_tensorboard import REWINDS
from tests.support.counting_storage import Counting
from tests.support.small_logs import begin, committing, evaluation, head_of, stage

SMALL = 4


def new_log() -> RunLog:
    return begin(MemoryStorage(uuid.uuid4().hex))


def train(log: RunLog) -> None:
    tip = head_of(log).tip
    assert tip is not None
    staged = stage(log.home, tip.step + 10, head_of(log).base, uuid.uuid4().hex)
    commit(log, committing(staged, parent=tip.path))


def evaluate(log: RunLog, back: int = 0) -> None:
    """Evaluate a commit that leads to the tip, `back` commits before it."""
    commits = history_of(log.entries()).commits
    checkpoint = commit_of(commits[max(len(commits) - 1 - back, 0)]).checkpoint
    log.append(lambda _: evaluation(checkpoint, keep_best=None, loss=checkpoint.step / 8), attempt="evaluator")


def go_back(log: RunLog) -> None:
    head = head_of(log)
    assert head.tip is not None
    if head.tip.step:
        with suppress(BlowUp):  # after too many in a row
            rewind(log, BlowUp("up", step=head.tip.step), base=head.base, spec=REWINDS, attempt="steersman")


def lose_tip(log: RunLog) -> None:
    head = head_of(log)
    if head.tip is not None and len(head.retained) > 1:
        quarantine(log, head.tip, "crc32c differs", attempt="doctor")


ACTIONS = {
    "train": train,
    "evaluate": evaluate,
    "evaluate late": lambda log: evaluate(log, back=1),
    "go back": go_back,
    "lose": lose_tip,
}


def expected(log: RunLog) -> list[tuple[object, object]]:
    history = history_of(log.entries())
    evaluated: dict[str, Evaluation] = {each.checkpoint.path: each for each in history.evaluations}
    rows: list[tuple[object, object]] = []
    for entry in history.commits[-SMALL:][::-1]:
        ref = commit_of(entry).checkpoint
        rows.append((ref.step, metric_words(evaluated[ref.path].metrics) if ref.path in evaluated else ""))
    return rows


@example([["train"] * 4, ["go back"]])
@given(st.lists(st.lists(st.sampled_from(sorted(ACTIONS)), max_size=4), max_size=6))
def test_rows_are_the_newest_of_the_history(turns: list[list[str]]) -> None:
    log = new_log()
    table = CommitTable(log, most=SMALL)
    for turn in turns:
        for action in turn:
            ACTIONS[action](log)
        table.update(head_of(log))
        assert [(row["step"], row["validation"]) for row in table.rows()] == expected(log)


@pytest.mark.parametrize("commits", [10, 150])
def test_update_reads_only_new_entries(commits: int) -> None:
    log = new_log()
    for _ in range(commits):
        train(log)
    store = Counting(log.home)
    table = CommitTable(RunLog(store))
    table.update(head_of(log))
    # The newest entries, and the files that they refer to.
    assert min(commits + 1, 100) <= store.calls["read"] <= min(commits + 1, 100) + 2
    evaluate(log)
    train(log)
    head = head_of(log)
    store.calls.clear()
    table.update(head)
    assert store.calls == {"read": 2}
    assert len(table.rows()) == min(commits + 2, 100)
