"""TensorBoard reads one curve without repeats from a run's home, also after rewinds and crashes."""

import json
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from baton.tasks.foundation.contracts.log_entry import Entry, MetricRow
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BlowUp, StorageError
from baton.tasks.foundation.log.appends import commit, quarantine, rewind
from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.telemetry import tensorboard
from baton.tasks.foundation.telemetry.tensorboard import CurveFiles
from tests.support.counting_storage import Counting
from tests.support.small_logs import begin, committing, evaluation, head_of, stage

Write = Callable[[RunLog], None]
REWINDS = RunSpec.model_validate(
    {
        "run": "curves",
        "storage": "unused",
        "data": {"source": "digits"},
        "model": {"build": "model.py:build_model"},
        "train": {"steps": 100, "global_batch_size": 8, "on_blowup": "rewind", "rewind_skip_batches": 1},
    }
)


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    return begin(LocalStorage(tmp_path / "home"))


@pytest.fixture(params=["one process", "a process each time"])
def write_curves(request: pytest.FixtureRequest, log: RunLog) -> Write:
    one = CurveFiles(log)
    return (lambda _: one.update()) if request.param == "one process" else tensorboard.write_curves


def train(log: RunLog, to_step: int, *steps: int, turn: int = 0) -> Entry:
    """Commit rows whose loss shows their step and the turn in which they were trained."""
    head = head_of(log)
    assert head.tip is not None
    staged = stage(log.home, to_step, head.base, uuid.uuid4().hex)
    rows = tuple(MetricRow(step=step, metrics={"loss": step + turn / 4, "inner/accuracy": 0.5}) for step in steps)
    return commit(log, committing(staged, parent=head.tip.path, history=rows))


def evaluate(log: RunLog, loss: float) -> None:
    tip = head_of(log).tip
    assert tip is not None
    log.append(lambda _: evaluation(tip, keep_best=None, loss=loss), attempt="evaluator")


def curve(log: RunLog, what: str, name: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(f"{log.home.uri}/tensorboard/{what}", size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def assert_as_logged(log: RunLog) -> None:
    history = history_of(log.entries())
    for name in ("loss", "inner/accuracy"):
        assert curve(log, "train", name) == [(row.step, row.metrics[name]) for row in history.rows]
    if history.evaluations:
        logged = [(each.checkpoint.step, each.metrics["loss"]) for each in history.evaluations]
        assert curve(log, "validation", "loss") == logged


def files(log: RunLog) -> dict[str, Any]:
    return {path: log.home.read(path) for path in log.home.files("tensorboard")}


def go_back(log: RunLog, blown_up_at: int) -> None:
    rewind(log, BlowUp("up", step=blown_up_at), base=head_of(log).base, spec=REWINDS, attempt="steersman")


def test_straight_run_has_one_curve(log: RunLog, write_curves: Write) -> None:
    write_curves(log)
    assert files(log) == {}
    for step in (10, 20, 30):
        train(log, step, step - 5, step)
        write_curves(log)
        evaluate(log, step / 8)
    write_curves(log)
    assert_as_logged(log)
    assert len(files(log)) == 6
    before = files(log)
    write_curves(log)
    assert files(log) == before


def test_missing_files_are_written_next_time(log: RunLog, write_curves: Write) -> None:
    for step in (10, 20, 30, 40):
        train(log, step, step - 5, step)
        evaluate(log, step / 8)
        if step == 20:
            write_curves(log)
    write_curves(log)
    assert_as_logged(log)


def test_files_of_rewound_commits_are_deleted(log: RunLog, write_curves: Write) -> None:
    for step in (10, 20, 30):
        train(log, step, step - 7, step - 3)
        evaluate(log, step / 8)
        write_curves(log)
    go_back(log, 27)
    write_curves(log)
    assert_as_logged(log)
    # Rows at other steps than before, and a second rewind right after the first.
    train(log, 25, 21, 25, turn=1)
    write_curves(log)
    assert_as_logged(log)
    go_back(log, 28)
    go_back(log, 22)
    train(log, 30, 12, 22, 30, turn=2)
    evaluate(log, 0.5)
    write_curves(log)
    assert_as_logged(log)


def test_evaluation_that_comes_after_the_next_commit_is_written(log: RunLog, write_curves: Write) -> None:
    """It ran on another machine, beside the training."""
    train(log, 10, 5, 10)
    evaluated = head_of(log).tip
    write_curves(log)
    train(log, 20, 15, 20)
    write_curves(log)
    assert evaluated is not None
    log.append(lambda _: evaluation(evaluated, keep_best=None, loss=0.25), attempt="evaluator")
    write_curves(log)
    assert_as_logged(log)


def test_files_of_quarantined_commits_are_deleted(log: RunLog, write_curves: Write) -> None:
    for step in (10, 20):
        train(log, step, step - 5, step)
        evaluate(log, step / 8)
        write_curves(log)
    tip = head_of(log).tip
    assert tip is not None
    quarantine(log, tip, "crc32c differs", attempt="doctor")
    train(log, 17, 13, 17, turn=1)
    write_curves(log)
    assert_as_logged(log)


def test_tensorboard_drops_rows_of_before_a_rewind(log: RunLog, write_curves: Write) -> None:
    for step in (10, 20, 30):
        train(log, step, step - 7, step - 3)
        write_curves(log)
    reader = EventAccumulator(f"{log.home.uri}/tensorboard/train", size_guidance={"scalars": 0})
    reader.Reload()
    assert [event.step for event in reader.Scalars("loss")] == [3, 7, 13, 17, 23, 27]
    go_back(log, 13)
    train(log, 20, 14, 20, turn=1)  # after a row at 13, which was rewound
    write_curves(log)
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("loss")] == [(3, 3), (7, 7), (14, 14.25), (20, 20.25)]


def test_late_file_of_before_a_rewind_is_not_shown(log: RunLog, write_curves: Write) -> None:
    for step in (10, 20):
        train(log, step, step - 5, step)
        write_curves(log)
    late = files(log)
    go_back(log, 12)
    train(log, 20, 15, 20, turn=1)
    write_curves(log)
    for path, data in late.items():
        log.home.write(path, data)
    assert_as_logged(log)


def test_refusing_store_causes_a_warning_only(
    log: RunLog, write_curves: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(log, 10, 5)

    def refuse(*_: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "create", refuse)
        write_curves(log)
    assert "the disk is full" in caplog.text
    write_curves(log)
    assert_as_logged(log)


def test_numbers_beyond_float32_become_infinite(log: RunLog, write_curves: Write) -> None:
    head = head_of(log)
    rows = [MetricRow(step=step, metrics={"loss": loss}) for step, loss in ((1, 1e39), (2, -1e39), (300, 0.1))]
    assert head.tip is not None
    staged = stage(log.home, 300, head.base, "a")
    commit(log, committing(staged, parent=head.tip.path, history=tuple(rows)))
    write_curves(log)
    assert curve(log, "train", "loss") == [(1, float("inf")), (2, float("-inf")), (300, pytest.approx(0.1))]


@pytest.mark.parametrize("commits", [3, 100])
def test_update_costs_the_same_however_long_the_log_is(commits: int) -> None:
    log = begin(MemoryStorage(uuid.uuid4().hex))
    for step in range(1, commits):
        train(log, step, step)
    store = Counting(log.home)
    curves = CurveFiles(RunLog(store))
    curves.update(head_of(log))
    evaluate(log, 1.0)
    train(log, commits, commits)
    head = head_of(log)
    store.calls.clear()
    curves.update(head)
    assert store.calls == {"read": 2, "create": 2}  # the two new entries and their files
    store.calls.clear()
    curves.update(head)
    assert store.calls == {}
    another = CurveFiles(RunLog(store))
    another.update(head)
    assert store.calls == {"read": 2, "exists": 1}  # the newest entry, the one that has its identity, and its file


def test_learning_rate_and_speed_are_curves(log: RunLog, write_curves: Write) -> None:
    head = head_of(log)
    assert head.tip is not None
    staged = stage(log.home, 20, head.base, uuid.uuid4().hex)
    rows = tuple(MetricRow(step=step, metrics={"loss": 1.0}, learning_rate=1 / step) for step in (8, 16))
    body = committing(staged, parent=head.tip.path, history=rows)
    commit(log, body.model_copy(update={"examples": 640, "seconds": {"train": 2.0, "commit": 5.0}}))
    write_curves(log)
    assert curve(log, "train", "learning_rate") == [(8, 0.125), (16, 0.0625)]
    assert curve(log, "train", "examples_per_second") == [(20, 320.0)]


@pytest.fixture
def address(log: RunLog, tmp_path: Path) -> Iterator[str]:
    """TensorBoard on the files of a run; its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", f"{log.home.uri}/tensorboard"]
    command += ["--host", "127.0.0.1", "--port", "0", "--load_fast", "false", "--reload_interval", "1"]
    output = tmp_path / "output"
    with output.open("wb") as written, subprocess.Popen(command, stdout=written, stderr=written) as server:
        try:
            while (found := re.search(r" at (http://127\.0\.0\.1:\d+)", output.read_text())) is None:
                assert server.poll() is None, output.read_text()[-2000:]
                time.sleep(0.1)
            yield found[1]
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_locked_tensorboard_shows_the_curves(log: RunLog, address: str) -> None:
    head = head_of(log)
    assert head.tip is not None
    staged = stage(log.home, 20, head.base, "a")
    rows = tuple(MetricRow(step=step, metrics={"loss": step / 4}, learning_rate=1 / step) for step in (8, 16))
    body = committing(staged, parent=head.tip.path, history=rows)
    commit(log, body.model_copy(update={"examples": 640, "seconds": {"train": 2.0}}))
    evaluate(log, 0.5)
    tensorboard.write_curves(log)

    def get(path: str) -> Any:
        with urllib.request.urlopen(f"{address}/data/plugin/scalars/{path}", timeout=60) as answer:  # noqa: S310
            return json.load(answer)

    def shown(run: str, tag: str) -> list[tuple[int, float]]:
        return [(step, value) for _, step, value in get(f"scalars?run={run}&tag={tag}")]

    # It reads the files at intervals, event by event; these are the last ones.
    while "loss" not in (tags := get("tags")).get("validation", ()) or "examples_per_second" not in tags.get(
        "train", ()
    ):
        time.sleep(0.1)
    assert shown("train", "loss") == [(8, 2.0), (16, 4.0)]
    assert shown("train", "learning_rate") == [(8, 0.125), (16, 0.0625)]
    assert shown("train", "examples_per_second") == [(20, 320.0)]
    assert shown("validation", "loss") == [(20, 0.5)]
