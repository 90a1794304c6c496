"""TensorBoard reads one curve without repeats from a run's home, whatever happened to the run."""

import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tasks.foundation.contracts.log_entry import Entry
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.segment import MetricRow
from tasks.foundation.errors import BlowUp, StorageError
from tasks.foundation.runlog.commits import commit, quarantine, rewind
from tasks.foundation.runlog.history import history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.telemetry.tensorboard import write_curves
from tests.support.small_logs import begin, committing, evaluation, head_of, stage

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


def train(log: RunLog, to_step: int, *steps: int, turn: int = 0) -> Entry:
    """A commit with rows whose loss tells their step and which time around they were trained."""
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
        told = [(each.checkpoint.step, each.metrics["loss"]) for each in history.evaluations]
        assert curve(log, "validation", "loss") == told


def files(log: RunLog) -> dict[str, Any]:
    return {path: log.home.read(path) for path in log.home.files("tensorboard")}


def go_back(log: RunLog, blown_up_at: int) -> None:
    rewind(log, BlowUp("up", step=blown_up_at), base=head_of(log).base, spec=REWINDS, attempt="steersman")


def test_a_straight_run(log: RunLog) -> None:
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


def test_a_process_that_died_before_it_wrote_leaves_it_to_the_next(log: RunLog) -> None:
    for step in (10, 20, 30, 40):
        train(log, step, step - 5, step)
        evaluate(log, step / 8)
        if step == 20:
            write_curves(log)
    write_curves(log)
    assert_as_logged(log)


def test_what_was_rewound_is_gone(log: RunLog) -> None:
    for step in (10, 20, 30):
        train(log, step, step - 7, step - 3)
        evaluate(log, step / 8)
        write_curves(log)
    go_back(log, 27)
    write_curves(log)
    assert_as_logged(log)
    # Rows at other steps than before, and a rewind right after a rewind.
    train(log, 25, 21, 25, turn=1)
    write_curves(log)
    assert_as_logged(log)
    go_back(log, 28)
    go_back(log, 22)
    train(log, 30, 12, 22, 30, turn=2)
    evaluate(log, 0.5)
    write_curves(log)
    assert_as_logged(log)


def test_what_was_quarantined_is_gone(log: RunLog) -> None:
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


def test_tensorboard_drops_what_it_has_read_of_a_past_that_is_no_more(log: RunLog) -> None:
    for step in (10, 20, 30):
        train(log, step, step - 7, step - 3)
        write_curves(log)
    reader = EventAccumulator(f"{log.home.uri}/tensorboard/train", size_guidance={"scalars": 0})
    reader.Reload()
    assert [event.step for event in reader.Scalars("loss")] == [3, 7, 13, 17, 23, 27]
    go_back(log, 13)
    train(log, 20, 14, 20, turn=1)  # after a row, at 13, that is no more
    write_curves(log)
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("loss")] == [(3, 3), (7, 7), (14, 14.25), (20, 20.25)]


def test_a_file_that_comes_late_from_a_past_that_is_no_more_does_not_show(log: RunLog) -> None:
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


def test_a_store_that_refuses_ends_nothing(
    log: RunLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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


def test_numbers_that_are_no_float32(log: RunLog) -> None:
    head = head_of(log)
    rows = [MetricRow(step=step, metrics={"loss": loss}) for step, loss in ((1, 1e39), (2, -1e39), (300, 0.1))]
    assert head.tip is not None
    staged = stage(log.home, 300, head.base, "a")
    commit(log, committing(staged, parent=head.tip.path, history=tuple(rows)))
    write_curves(log)
    assert curve(log, "train", "loss") == [(1, float("inf")), (2, float("-inf")), (300, pytest.approx(0.1))]


@pytest.mark.slow
def test_tensorboard_starts_in_the_environment_that_the_lock_makes() -> None:
    command = [sys.executable, "-m", "tensorboard.main", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("2.19.")
