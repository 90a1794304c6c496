"""The history has each step of the tip's lineage once."""

import pytest

from baton.tasks.foundation.checkpoint.retention import KeepLast, apply_retention
from baton.tasks.foundation.contracts.log_entry import Commit, MetricRow
from baton.tasks.foundation.log.appends import commit, quarantine
from baton.tasks.foundation.log.history import commit_of, history_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from tests.support.small_logs import begin, evaluation, head_of, stage, train


def segment(log: RunLog, steps: range, loss: float) -> Commit:
    """Commit `steps` on top of the tip, with one metric row each."""
    head = head_of(log)
    assert head.tip is not None
    rows = tuple(MetricRow(step=step, metrics={"loss": loss}) for step in steps)
    body = Commit(
        checkpoint=stage(log.home, steps[-1], head.base, f"at{head.number}"),
        parent=head.tip.path,
        exit_reason="segment_end",
        history=rows,
        examples=len(rows),
        seconds={"train": 2.0, "compile": 0.5},
    )
    commit(log, body)
    return body


def evaluate_tip(log: RunLog, accuracy: float) -> None:
    tip = head_of(log).tip
    assert tip is not None
    log.append(lambda _: evaluation(tip, accuracy=accuracy), attempt="e")


def test_empty_log_has_empty_history(store: Storage) -> None:
    history = history_of(RunLog(store).entries())
    assert (history.commits, history.rows, history.head, history.segments) == ((), (), None, 0)


def test_rows_are_ordered_and_unique(store: Storage) -> None:
    log = begin(store)
    segment(log, range(1, 11), 3.0)
    evaluate_tip(log, 0.5)
    evaluate_tip(log, 0.6)  # evaluated again after a retry: the later one counts
    segment(log, range(11, 16), 2.0)
    apply_retention(log, [KeepLast(1)], attempt="keeper")
    history = history_of(log.entries())
    assert [row.step for row in history.rows] == list(range(1, 16))
    assert history.segments == 2
    assert [commit_of(entry).checkpoint.step for entry in history.commits] == [0, 10, 15]
    assert [each.metrics for each in history.evaluations] == [{"accuracy": 0.6}]
    assert history.seconds == {"train": 4.0, "compile": 1.0}
    assert history.head == head_of(log)


def test_rewound_work_is_not_in_history(store: Storage) -> None:
    log = begin(store)
    segment(log, range(1, 11), 3.0)
    segment(log, range(11, 21), 99.0)
    evaluate_tip(log, 0.1)
    tip = head_of(log).tip
    assert tip is not None
    quarantine(log, tip, "damaged", attempt="b")
    segment(log, range(11, 14), 2.0)
    segment(log, range(14, 21), 1.0)
    evaluate_tip(log, 0.9)
    history = history_of(log.entries())
    assert [row.step for row in history.rows] == list(range(1, 21))
    assert {row.metrics["loss"] for row in history.rows} == {3.0, 2.0, 1.0}
    assert [each.metrics["accuracy"] for each in history.evaluations] == [0.9]
    assert history.segments == 3


def test_all_quarantined_log_has_head_but_no_history(store: Storage) -> None:
    log = begin(store)
    tip = head_of(log).tip
    assert tip is not None
    quarantine(log, tip, "damaged", attempt="b")
    history = history_of(log.entries())
    assert history.commits == ()
    assert history.head == head_of(log)
    train(log, 0, attempt="b")
    assert len(history_of(log.entries()).commits) == 1


def test_entry_that_is_not_a_commit_is_refused(store: Storage) -> None:
    log = begin(store)
    with pytest.raises(TypeError, match="entry 0 is a origin"):
        commit_of(log.entry(0))
