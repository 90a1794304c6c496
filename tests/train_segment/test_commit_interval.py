"""Commits within a segment, by time and on a stop, use the same protocol and give the same bits."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.checkpoint.save import commit_staged
from baton.tasks.foundation.contracts.log_entry import Commit, Entry
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import TrainSegmentCall
from baton.tasks.foundation.errors import StaleWriter
from baton.tasks.foundation.log.attempts import PRIOR_SECONDS
from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.telemetry.events import CommitPace, Committed, Event, Sink, Training
from baton.tasks.train_segment import interval
from tests.support.clock import FakeClock
from tests.support.lab import Lab, differing, spec_of
from tests.support.ledger_records import record_of
from tests.support.sigterm_raises import sigterm_raises


class GoneError(Exception):
    """Raised by the signal handler of the test."""


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    PROCESS_STATE.forget()
    return Lab(tmp_path)


def ticking() -> Callable[[], float]:
    """A clock that advances a second at each reading, so that each inner loop is one step."""
    seconds = itertools.count()
    return lambda: float(next(seconds))


def sigterm(lab: Lab) -> Callable[[], None]:
    """Return a function that sends SIGTERM and waits until it is handled, while training continues."""
    recorder = lab.recorder

    def send() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 300
        while not any("SIGTERM" in warning for warning in recorder.warnings):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return send


class At:
    """Calls an action when training has reached a step, or each of some steps."""

    def __init__(self, lab: Lab, step: int | tuple[int, ...], action: Callable[[], object]) -> None:
        self.recorder, self.action = lab.recorder, action
        self.steps = (step,) if isinstance(step, int) else step

    def emit(self, event: Event) -> None:
        self.recorder.emit(event)
        if isinstance(event, Training) and event.step in self.steps:
            self.action()


def commits(lab: Lab, spec: RunSpec) -> list[tuple[int, str]]:
    bodies = [entry.body for entry in lab.log(spec).entries()]
    return [(body.checkpoint.step, body.exit_reason) for body in bodies if isinstance(body, Commit)]


def rows_logged(lab: Lab, spec: RunSpec) -> Any:
    return [(row.step, row.metrics) for row in history_of(lab.log(spec).entries()).rows]


def train_with_sink(lab: Lab, spec: RunSpec, sink: Sink, until: int, **settings: Any) -> Any:
    lab.recorder, kept = sink, lab.recorder  # type: ignore[assignment]
    try:
        head = lab.log(spec).head()
        assert head is not None
        assert head.tip is not None
        return lab.train(spec, head.tip, until, **settings)
    finally:
        lab.recorder = kept


@dataclass(frozen=True, kw_only=True)
class Straight:
    """A run of the model `functional` to step 11 without commits in between."""

    digest: str
    tensors: dict[str, Any]
    rows: Any


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    PROCESS_STATE.forget()
    lab, spec = Lab(tmp_path_factory.mktemp("straight")), spec_of("functional", run="straight")
    tip = lab.relay(spec, 11).tip
    assert tip is not None
    assert commits(lab, spec) == [(0, "initialized"), (11, "segment_end")]
    return Straight(digest=tip.state_digest, tensors=lab.tensors(spec, tip), rows=rows_logged(lab, spec))


def test_commits_are_made_by_time_within_a_segment(
    lab: Lab, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each goes through `commit_staged`, which retires older ones."""
    committed = []

    def counting(log: RunLog, body: Commit, *, spec: RunSpec, telemetry: Sink) -> Entry:
        committed.append(body.checkpoint.step)
        return commit_staged(log, body, spec=spec, telemetry=telemetry)

    monkeypatch.setattr(interval, "commit_staged", counting)
    often = spec_of("functional", run="often", checkpoint__every_seconds=8.0, checkpoint__keep_last=2)
    head = lab.relay(often, 11, clock=ticking())
    steps = [step for step, _ in commits(lab, often)]
    within = steps[1:-1]
    assert len(within) > 1
    assert committed == within
    assert [event.step for event in lab.recorder.events if isinstance(event, Committed)] == steps
    assert not set(within) & {4, 8}, "a commit fell on a log step"
    assert {reason for step, reason in commits(lab, often) if step in within} == {"interval"}
    assert head.tip is not None
    assert head.tip.state_digest == straight.digest
    assert differing(straight.tensors, lab.tensors(often, head.tip)) == []
    assert rows_logged(lab, often) == straight.rows
    bodies = [entry.body for entry in lab.log(often).entries()]
    made = [body for body in bodies if isinstance(body, Commit)]
    assert [body.examples for body in made[1:]] == [8 * (after - before) for before, after in itertools.pairwise(steps)]
    assert [body.parent for body in made[1:]] == [body.checkpoint.path for body in made[:-1]]
    assert {body.target for body in made[1:]} == {often.train.target}
    assert len(head.retained) == 2
    assert len(list((lab.root / "storage" / often.run / "checkpoints").iterdir())) <= 4 < head.commits


@pytest.mark.slow
def test_an_interval_that_adapts_changes_no_bits(lab: Lab, straight: Straight) -> None:
    """A little more than a minute passes between two logged steps: the shortest interval until the loss is known."""
    never = spec_of("functional", run="never", checkpoint__every_seconds=None)
    auto = spec_of("functional", run="auto")
    assert auto.checkpoint.every_seconds == "auto"
    clock = FakeClock()
    for spec in (never, auto):
        lab.begin(spec)
        lab.home(spec).write("attempts/k.json", record_of("k", seconds={"train": 1e-3}).to_json())
        sink = At(lab, (4, 8), lambda: clock.advance(61))
        assert train_with_sink(lab, spec, sink, 11, clock=clock).staged.state_digest == straight.digest
    lab.relay(auto, 11)
    assert commits(lab, never) == [(0, "initialized")]
    assert commits(lab, auto) == [(0, "initialized"), (4, "interval"), (8, "interval"), (11, "segment_end")]
    head = lab.log(auto).head()
    assert head is not None
    assert head.tip is not None
    assert head.tip.state_digest == straight.digest
    assert rows_logged(lab, auto) == straight.rows
    paces = [event for event in lab.recorder.events if isinstance(event, CommitPace)]
    assert [pace.every_seconds for pace in paces] == pytest.approx([42.4, 42.4], rel=0.01)
    assert paces[0].between_losses_seconds == pytest.approx(PRIOR_SECONDS / 2, rel=0.1), "an attempt was killed"


def test_losses_that_cannot_be_counted_end_no_segment(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("a record from elsewhere")

    monkeypatch.setattr("baton.tasks.train_segment.interval.read_attempts", fails)
    auto, clock = spec_of("plain", checkpoint__every_seconds="auto"), FakeClock()
    lab.begin(auto)
    train_with_sink(lab, auto, At(lab, (4, 8), lambda: clock.advance(61)), 11, clock=clock)
    assert [step for step, _ in commits(lab, auto)] == [0, 4, 8]
    assert caplog.text.count("earlier losses could not be counted, which no training needs; ") == 1
    assert "ValueError: a record from elsewhere" in caplog.text


@pytest.mark.slow
def test_rows_that_fill_an_entry_are_committed_within_a_segment(
    lab: Lab, straight: Straight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry of the log has a largest size, and rows of a long segment must not exceed it."""
    monkeypatch.setattr(interval, "_MOST_VALUES", 2)  # one row of loss and accuracy
    often = spec_of("functional", run="often", checkpoint__every_seconds=None)
    lab.relay(often, 11)
    assert [step for step, _ in commits(lab, often)] == [0, 4, 8, 11]
    assert rows_logged(lab, often) == straight.rows


@pytest.mark.slow
def test_sigterm_commits_what_was_trained_and_is_raised_after(lab: Lab, straight: Straight) -> None:
    stopped = spec_of("functional", run="stopped")
    lab.begin(stopped)
    sink = At(lab, 6, sigterm(lab))
    with sigterm_raises(GoneError), pytest.raises(GoneError):
        train_with_sink(lab, stopped, sink, 11, clock=ticking())
    assert commits(lab, stopped) == [(0, "initialized"), (6, "sigterm")]
    tip = lab.relay(stopped, 11).tip
    assert tip is not None
    assert differing(straight.tensors, lab.tensors(stopped, tip)) == []
    assert rows_logged(lab, stopped) == straight.rows


def test_stop_before_the_first_step_commits_nothing(lab: Lab) -> None:
    spec = spec_of("functional")
    start = lab.begin(spec).tip
    assert start is not None
    request = lab.request(spec, start, 11).model_copy(update={"stop_within_seconds": 0.0})
    from baton.tasks.train_segment.stage import train_segment

    head = lab.log(spec).head()
    assert head is not None
    result = train_segment(TrainSegmentCall.of(request, head.environment), lab.place(spec))
    assert (result.staged, result.exit_reason, result.examples) == (None, "time_budget", 0)
    assert commits(lab, spec) == [(0, "initialized")]


def test_commit_longer_than_the_grace_period_is_skipped(lab: Lab) -> None:
    """The first commit is always tried. Once staging is known to take too long, no commit is started."""
    spec = spec_of("functional", stop__grace_seconds=1e-3)
    lab.begin(spec)
    lab.relay(spec, 3)  # staging has been measured: it takes more than half a millisecond
    sink = At(lab, 8, sigterm(lab))
    with sigterm_raises(GoneError), pytest.raises(GoneError):
        train_with_sink(lab, spec, sink, 11)
    assert commits(lab, spec) == [(0, "initialized"), (3, "segment_end")]
    assert any("steps 4 to 8 are not committed" in warning for warning in lab.recorder.warnings)


def test_overtaken_segment_ends_at_its_next_commit(lab: Lab) -> None:
    spec = spec_of("plain", checkpoint__every_seconds=8.0)
    lab.begin(spec)

    def overtake() -> None:
        PROCESS_STATE.forget()
        rival = Lab(lab.root)
        rival.relay(spec, 5)

    with pytest.raises(StaleWriter, match="the tip has moved since"):
        train_with_sink(lab, spec, At(lab, 2, overtake), 11, clock=ticking())
    assert commits(lab, spec) == [(0, "initialized"), (5, "segment_end")]
