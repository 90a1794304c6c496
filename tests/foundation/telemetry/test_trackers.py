"""A tracker has each point of the log once, also after kills and rewinds, and holds back no end of a command."""

import threading
import uuid
from collections.abc import Collection, Sequence

import pytest

from baton.tasks.foundation.contracts.log_entry import MetricRow
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BlowUp
from baton.tasks.foundation.log.appends import commit, quarantine, rewind
from baton.tasks.foundation.log.history import commit_of, history_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.telemetry.trackers import Point, PointKey, TrackedRun, TrackingSender
from tests.support.counting_storage import Counting
from tests.support.small_logs import begin, committing, evaluation, head_of, on_test, stage

REWINDS = RunSpec.model_validate(
    {
        "run": "curves",
        "storage": "unused",
        "data": {"source": "digits"},
        "model": {"build": "model.py:build_model"},
        "train": {"steps": 100, "global_batch_size": 8, "on_blowup": "rewind", "rewind_skip_batches": 1},
    }
)


class Recording:
    """Keeps what it is sent. After `left` points it fails, as if the process were killed or the server gone."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.runs = 1
        self.left: int | None = None
        self.closed = False

    def keys(self) -> Collection[PointKey]:
        return [point.key for point in self.points]

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            if self.left == 0:
                raise ConnectionError("the tracker is gone")
            self.points.append(point)
            self.left = None if self.left is None else self.left - 1

    def start_over(self) -> None:
        self.points, self.runs = [], self.runs + 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def log() -> RunLog:
    return begin(MemoryStorage(uuid.uuid4().hex))


def train(log: RunLog, to_step: int, *steps: int, loss: float = 0.5) -> None:
    head = head_of(log)
    assert head.tip is not None
    staged = stage(log.home, to_step, head.base, uuid.uuid4().hex)
    rows = tuple(
        MetricRow(step=step, metrics={"loss": loss + step, "inner/acc(1)": 0.5}, learning_rate=1 / step)
        for step in steps
    )
    commit(log, committing(staged, parent=head.tip.path, history=rows, train=float(to_step)))


def evaluate(log: RunLog, loss: float) -> None:
    tip = head_of(log).tip
    assert tip is not None
    log.append(lambda _: evaluation(tip, keep_best=None, loss=loss), attempt="evaluator")


def go_back(log: RunLog, blown_up_at: int) -> None:
    rewind(log, BlowUp("up", step=blown_up_at), base=head_of(log).base, spec=REWINDS, attempt="steersman")


def assert_as_logged(tracker: Recording, log: RunLog) -> None:
    history = history_of(log.entries())
    rows = {("train/loss", row.step, row.metrics["loss"]) for row in history.rows}
    rows |= {("train/inner/acc_1_", row.step, 0.5) for row in history.rows}
    rows |= {("train/learning_rate", row.step, 1 / row.step) for row in history.rows}
    ends = [commit_of(entry).checkpoint.step for entry in history.commits]
    rows |= {("train/examples_per_second", step, 8 / step) for step in ends if step > 0}
    rows |= {("validation/loss", each.checkpoint.step, each.metrics["loss"]) for each in history.evaluations}
    rows |= {("test/loss", each.checkpoint.step, each.metrics["loss"]) for each in history.tests}
    sent = [(point.key.name, point.key.step, point.value) for point in tracker.points]
    assert sorted(sent) == sorted(rows)


def test_tracker_has_each_point_of_the_log_once(log: RunLog) -> None:
    tracker = Recording()
    tracked = TrackedRun(log, lambda: tracker)
    for step in (10, 20, 30):
        train(log, step, step - 5, step)
        assert tracked.update()
        evaluate(log, step / 8)
    tip = head_of(log).tip
    assert tip is not None
    log.append(lambda _: on_test(tip, loss=0.125), attempt="evaluator")
    assert tracked.update()
    assert_as_logged(tracker, log)
    assert TrackedRun(log, lambda: tracker).update()  # another process
    assert_as_logged(tracker, log)
    assert tracker.runs == 1


@pytest.mark.parametrize("survived", range(16))
def test_kill_while_sending_neither_loses_nor_repeats(log: RunLog, survived: int) -> None:
    tracker = Recording()
    train(log, 10, 5, 10)
    evaluate(log, 1.0)
    train(log, 20, 20)
    evaluate(log, 0.5)
    tracker.left = survived
    TrackedRun(log, lambda: tracker).update()
    assert len(tracker.points) == min(survived, 13)
    tracker.left = None
    train(log, 30, 30)
    assert TrackedRun(log, lambda: tracker).update()
    assert_as_logged(tracker, log)
    assert tracker.runs == 1


@pytest.mark.parametrize("same_process", [True, False])
def test_rewound_points_do_not_stay(log: RunLog, same_process: bool) -> None:
    tracker = Recording()
    tracked = TrackedRun(log, lambda: tracker)
    for step in (10, 20, 30):
        train(log, step, step - 7, step)
        evaluate(log, step / 8)
        assert tracked.update()
    go_back(log, 27)
    if not same_process:
        tracked = TrackedRun(log, lambda: tracker)
    assert tracked.update()
    assert_as_logged(tracker, log)
    assert tracker.runs == 2
    train(log, 25, 21, 25, loss=7.0)
    tracked.update()
    assert_as_logged(tracker, log)
    quarantined = head_of(log).tip
    assert quarantined is not None
    quarantine(log, quarantined, "crc32c differs", attempt="doctor")
    tracked.update()
    assert_as_logged(tracker, log)
    assert tracker.runs == 3


def test_rewind_that_abandons_nothing_keeps_the_run(log: RunLog) -> None:
    tracker = Recording()
    tracked = TrackedRun(log, lambda: tracker)
    train(log, 10, 5, 10)
    tracked.update()
    go_back(log, 13)
    train(log, 20, 15, 20)
    tracked.update()
    assert_as_logged(tracker, log)
    assert tracker.runs == 1


def test_failing_tracker_causes_one_warning(log: RunLog, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recording()
    tracker.left = 1
    tracked = TrackedRun(log, lambda: tracker)
    for step in (10, 20):
        train(log, step, step)
        assert not tracked.update()
    assert caplog.text.count("the tracker is gone") == 1
    tracker.left = None
    assert tracked.update()
    assert_as_logged(tracker, log)
    tracker.left = 1  # of several points
    train(log, 30, 25, 30)
    assert not tracked.update()
    tracker.left = None
    assert tracked.update()
    assert_as_logged(tracker, log)


@pytest.mark.parametrize("commits", [3, 100])
def test_update_reads_the_new_entries_only(commits: int) -> None:
    log = begin(MemoryStorage(uuid.uuid4().hex))
    for step in range(1, commits):
        train(log, step, step)
    store = Counting(log.home)
    tracker = Recording()
    tracked = TrackedRun(RunLog(store), lambda: tracker)
    tracked.update()
    train(log, commits, commits)
    evaluate(log, 1.0)
    store.calls.clear()
    tracked.update()
    assert store.calls["read"] <= 4
    assert_as_logged(tracker, log)


class Slow(Recording):
    """Responds once it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.released = threading.Event(), threading.Event()

    def send(self, points: Sequence[Point]) -> None:
        self.asked.set()
        assert self.released.wait(120)
        super().send(points)


def test_slow_tracker_holds_back_no_end(caplog: pytest.LogCaptureFixture) -> None:
    log = begin(MemoryStorage(uuid.uuid4().hex))
    train(log, 10, 5, 10)
    tracker = Slow()
    sender = TrackingSender(TrackedRun(log, lambda: tracker))
    sender.start()
    assert tracker.asked.wait(120)
    train(log, 20, 20)
    sender.end(0.0)
    assert "the next command on this run sends the rest" in caplog.text
    tracker.released.set()
    sender.join(120)
    assert_as_logged(tracker, log)  # with what was committed meanwhile


def test_end_sends_what_was_committed_last() -> None:
    log = begin(MemoryStorage(uuid.uuid4().hex))
    tracker = Recording()
    sender = TrackingSender(TrackedRun(log, lambda: tracker))
    sender.start()
    train(log, 10, 10)
    sender.end(120.0)
    assert tracker.closed
    assert_as_logged(tracker, log)
