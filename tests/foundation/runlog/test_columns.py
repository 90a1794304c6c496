"""Rows of entries survive as columns, whatever their keys and values are."""

import json
import math

import pytest

from tasks.foundation.contracts.log_entry import Commit, MetricRow, WorkerStats
from tasks.foundation.errors import RunLogError
from tasks.foundation.runlog.columns import with_columns, with_rows
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.memory import MemoryStorage
from tests.support.small_logs import begin, committing, edit_entry, head_of, stage

ODD = {"loss": math.nan, "gain": -math.inf, "zero": -0.0, "third": 1 / 3}
ROWS = (
    [],
    [{"step": 5, "metrics": {"loss": 1.0}}],
    [{"step": 5, "metrics": {"loss": 1.0}}, {"step": 6, "metrics": {"loss": 2.0}}],
    [{"step": 5, "metrics": {}}, {"step": 6, "metrics": {}}],
    [{"step": 5, "metrics": {"loss": 1.0}}, {"step": 6, "metrics": {"gain": 2.0}}],
    [{"step": 5, "metrics": {"loss": 1.0, "gain": 2.0}}, {"step": 6, "metrics": {"gain": 2.0, "loss": 1.0}}],
    [{"host": 0, "losses": [1.0, 2.0]}, {"host": 1, "losses": [3.0]}],
    [{"host": 0, "losses": [1.0]}, {"host": 1}],
)


@pytest.mark.parametrize("rows", ROWS, ids=range(len(ROWS)))
def test_rows_survive_as_columns(rows: list[dict[str, object]]) -> None:
    body = {"kind": "checkpoint", "history": rows, "examples": 3}
    lean = {"body": with_columns(body)}
    data = json.dumps(lean).encode()
    assert json.loads(with_rows(data, lean)) == {"body": body}
    assert repr(json.loads(with_rows(data, lean))) == repr({"body": body})  # the order of the keys, too


def test_commit_of_many_rows_is_read_back(memory: MemoryStorage) -> None:
    log = begin(memory)
    rows = tuple(MetricRow(step=step, metrics=ODD) for step in range(1, 9))
    hosts = tuple(
        WorkerStats(host=host, replicas=4, steps=8, examples=64, train_seconds=1 / 3, input_wait_seconds=0.0,
                    losses=(0.1, 0.2, 0.3, 0.4))
        for host in range(64)
    )  # fmt: skip
    body = committing(stage(memory, 8, head_of(log).base, "a"), history=rows).model_copy(update={"workers": hosts})
    log.append(lambda _: body, attempt="a")
    read = RunLog(memory).entry(2).body
    assert isinstance(read, Commit)
    assert (repr(read.history), read.workers) == (repr(rows), hosts)
    assert len(json.dumps(json.loads(memory.read("log/00000002.json"))["body"])) < 0.6 * len(body.model_dump_json())


@pytest.mark.parametrize("history", [{"step": [1, 2], "metrics": {"loss": [1.0]}}, {"step": 3}, {"step": {"a": 1}}])
def test_columns_of_different_lengths_are_refused(memory: MemoryStorage, history: object) -> None:
    begin(memory)
    edit_entry(memory, 1, lambda entry: entry["body"].update(history=history))
    with pytest.raises(RunLogError, match=r"log/00000001\.json: not a readable Entry: body\.checkpoint\.history"):
        RunLog(memory).entry(1)
