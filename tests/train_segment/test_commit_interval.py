"""Commits within a segment, by time and on a stop, use the same protocol and give the same bits."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.checkpoint.save import commit_staged
from tasks.foundation.contracts.log_entry import Commit, Entry
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.stage_calls import TrainSegmentCall
from tasks.foundation.errors import StaleWriter
from tasks.foundation.log.attempts import PRIOR_SECONDS
from tasks.foundation.log.history import history_of
from tasks.foundation.log.log import RunLog
from tasks.foundation.state.warm_state import PROCESS_STATE
from tasks.foundation.telemetry.events import CommitPace, Committed, Event, Sink, Training
from tasks.train_segment import interval
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


def test_commits_are_made_by_time_within_a_segment(lab: Lab) -> None:
    straight, often = spec_of("functional", run="straight"), spec_of("functional", run="often")
    often = often.model_copy(update={"checkpoint": often.checkpoint.model_copy(update={"every_seconds": 8.0})})
    one = lab.relay(straight, 11)
    other = lab.relay(often, 11, clock=ticking())
    steps = [step for step, _ in commits(lab, often)]
    within = steps[1:-1]
    assert len(within) > 1
    assert not set(within) & {4, 8}, "a commit fell on a log step"
    assert {reason for step, reason in commits(lab, often) if step in within} == {"interval"}
    assert one.tip is not None
    assert other.tip is not None
    assert one.tip.state_digest == other.tip.state_digest
    assert differing(lab.tensors(straight, one.tip), lab.tensors(often, other.tip)) == []
    assert rows_logged(lab, straight) == rows_logged(lab, often)
    bodies = [entry.body for entry in lab.log(often).entries()]
    made = [body for body in bodies if isinstance(body, Commit)]
    assert [body.examples for body in made[1:]] == [8 * (after - before) for before, after in itertools.pairwise(steps)]
    assert [body.parent for body in made[1:]] == [body.checkpoint.path for body in made[:-1]]
    assert {body.target for body in made[1:]} == {often.train.target}


@pytest.mark.slow
def test_an_interval_that_adapts_changes_no_bits(lab: Lab) -> None:
    """A little more than a minute passes between two logged steps: the shortest interval until the loss is known."""
    never = spec_of("functional", run="never", checkpoint__every_seconds=None)
    auto = spec_of("functional", run="auto")
    assert auto.checkpoint.every_seconds == "auto"
    clock = FakeClock()
    for spec in (never, auto):
        lab.begin(spec)
        lab.home(spec).write("attempts/k.json", record_of("k", seconds={"train": 1e-3}).to_json())
        sink = At(lab, (4, 8), lambda: clock.advance(61))
        staged = train_with_sink(lab, spec, sink, 11, clock=clock).staged
        lab.relay(spec, 11)
        assert staged.state_digest == lab.log(spec).head().tip.state_digest  # type: ignore[union-attr]
        PROCESS_STATE.forget()
    assert commits(lab, never) == [(0, "initialized"), (11, "segment_end")]
    assert commits(lab, auto) == [(0, "initialized"), (4, "interval"), (8, "interval"), (11, "segment_end")]
    one, other = (lab.log(spec).head() for spec in (never, auto))
    assert one is not None
    assert other is not None
    assert one.tip is not None
    assert other.tip is not None
    assert one.tip.state_digest == other.tip.state_digest
    assert rows_logged(lab, never) == rows_logged(lab, auto)
    paces = [event for event in lab.recorder.events if isinstance(event, CommitPace)]
    assert [pace.every_seconds for pace in paces] == pytest.approx([42.4, 42.4], rel=0.01)
    assert paces[0].between_losses_seconds == pytest.approx(PRIOR_SECONDS / 2, rel=0.1), "an attempt was killed"


def test_commits_within_a_segment_retire_older_ones(lab: Lab) -> None:
    spec = spec_of("plain", checkpoint__every_seconds=5.0, checkpoint__keep_last=2)
    head = lab.relay(spec, 11, clock=ticking())
    assert head.commits > 4
    assert len(head.retained) == 2
    assert len(list((lab.root / "storage" / spec.run / "checkpoints").iterdir())) <= 4


@pytest.mark.slow
def test_rows_that_fill_an_entry_are_committed_within_a_segment(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of the log has a largest size, and rows of a long segment must not exceed it."""
    monkeypatch.setattr(interval, "_MOST_VALUES", 4)  # two rows of loss and accuracy
    straight = spec_of("functional", run="straight", train__log_every_steps=1)
    often = spec_of("functional", run="often", train__log_every_steps=1, checkpoint__every_seconds=None)
    lab.relay(often, 7)
    assert [step for step, _ in commits(lab, often)] == [0, 2, 4, 6, 7]
    monkeypatch.undo()
    lab.relay(straight, 7)
    assert rows_logged(lab, straight) == rows_logged(lab, often)


@pytest.mark.slow
def test_sigterm_commits_what_was_trained_and_is_raised_after(lab: Lab) -> None:
    straight, stopped = spec_of("functional", run="straight"), spec_of("functional", run="stopped")
    lab.begin(stopped)
    sink = At(lab, 6, sigterm(lab))
    with sigterm_raises(GoneError), pytest.raises(GoneError):
        train_with_sink(lab, stopped, sink, 11, clock=ticking())
    assert commits(lab, stopped) == [(0, "initialized"), (6, "sigterm")]
    one, other = lab.relay(straight, 11), lab.relay(stopped, 11)
    assert one.tip is not None
    assert other.tip is not None
    assert differing(lab.tensors(straight, one.tip), lab.tensors(stopped, other.tip)) == []
    assert rows_logged(lab, straight) == rows_logged(lab, stopped)


def test_stop_before_the_first_step_commits_nothing(lab: Lab) -> None:
    spec = spec_of("functional")
    start = lab.begin(spec).tip
    assert start is not None
    request = lab.request(spec, start, 11).model_copy(update={"stop_within_seconds": 0.0})
    from tasks.train_segment.stage import train_segment

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


def test_commits_within_a_segment_go_through_commit_staged(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = []

    def counting(log: RunLog, body: Commit, *, spec: RunSpec, telemetry: Sink) -> Entry:
        committed.append(body.checkpoint.step)
        return commit_staged(log, body, spec=spec, telemetry=telemetry)

    spec = spec_of("plain", checkpoint__every_seconds=8.0)
    lab.begin(spec)
    monkeypatch.setattr(interval, "commit_staged", counting)
    train_with_sink(lab, spec, lab.recorder, 11, clock=ticking())
    assert len(committed) > 1
    assert [event.step for event in lab.recorder.events if isinstance(event, Committed)] == [0, *committed]
