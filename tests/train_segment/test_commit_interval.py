"""Commits inside a segment, by time and on a stop: through the same protocol, and the bits are the same."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.foundation.checkpoint.commit_staged import commit_staged
from tasks.foundation.contracts.log_entry import Commit, Entry
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import StaleWriter
from tasks.foundation.runlog.history import history_of
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.events import Committed, Event, Sink, Training
from tasks.train_segment.stage import forget_trainer
from tests.support.lab import Lab, differing, spec_of
from tests.support.sigterm_raises import sigterm_raises


class GoneError(Exception):
    """What the handler from before makes of the signal."""


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    forget_trainer()
    return Lab(tmp_path)


def ticking() -> Callable[[], float]:
    """A second passes with each look at the clock, so that each inner loop is a single step."""
    seconds = itertools.count()
    return lambda: float(next(seconds))


def sigterm(lab: Lab) -> Callable[[], None]:
    """Sends it, and waits until it is heard: the steps go on meanwhile, as they would."""
    heard = lab.heard

    def send() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 300
        while not any("SIGTERM" in warning for warning in heard.warnings):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return send


class At:
    """Does something when training has reached a step."""

    def __init__(self, lab: Lab, step: int, action: Callable[[], object]) -> None:
        self.heard, self.step, self.action = lab.heard, step, action

    def emit(self, event: Event) -> None:
        self.heard.emit(event)
        if isinstance(event, Training) and event.step == self.step:
            self.action()


def commits(lab: Lab, spec: RunSpec) -> list[tuple[int, str]]:
    bodies = [entry.body for entry in lab.log(spec).entries()]
    return [(body.checkpoint.step, body.exit_reason) for body in bodies if isinstance(body, Commit)]


def told(lab: Lab, spec: RunSpec) -> Any:
    return [(row.step, row.metrics) for row in history_of(lab.log(spec).entries()).rows]


def train_hearing(lab: Lab, spec: RunSpec, sink: Sink, until: int, **settings: Any) -> Any:
    lab.heard, kept = sink, lab.heard  # type: ignore[assignment]
    try:
        head = lab.log(spec).head()
        assert head is not None
        assert head.tip is not None
        return lab.train(spec, head.tip, until, **settings)
    finally:
        lab.heard = kept


def test_commits_by_time_inside_a_segment(lab: Lab) -> None:
    straight, often = spec_of("functional", run="straight"), spec_of("functional", run="often")
    often = often.model_copy(update={"checkpoint": often.checkpoint.model_copy(update={"every_seconds": 8.0})})
    one = lab.relay(straight, 11)
    other = lab.relay(often, 11, clock=ticking())
    steps = [step for step, _ in commits(lab, often)]
    within = steps[1:-1]
    assert len(within) > 1
    assert not set(within) & {4, 8}, "what is of interest is a commit between two log steps"
    assert {reason for step, reason in commits(lab, often) if step in within} == {"interval"}
    assert one.tip is not None
    assert other.tip is not None
    assert one.tip.state_digest == other.tip.state_digest
    assert differing(lab.tensors(straight, one.tip), lab.tensors(often, other.tip)) == []
    assert told(lab, straight) == told(lab, often)
    bodies = [entry.body for entry in lab.log(often).entries()]
    made = [body for body in bodies if isinstance(body, Commit)]
    assert [body.examples for body in made[1:]] == [8 * (after - before) for before, after in itertools.pairwise(steps)]
    assert [body.parent for body in made[1:]] == [body.checkpoint.path for body in made[:-1]]


def test_commits_inside_a_segment_retire_older_ones(lab: Lab) -> None:
    spec = spec_of("plain", checkpoint__every_seconds=5.0, checkpoint__keep_last=2)
    head = lab.relay(spec, 11, clock=ticking())
    assert head.commits > 4
    assert len(head.retained) == 2
    assert len(list((lab.root / "storage" / spec.run / "checkpoints").iterdir())) <= 4


@pytest.mark.slow
def test_sigterm_commits_what_was_trained_and_is_raised_again(lab: Lab) -> None:
    straight, stopped = spec_of("functional", run="straight"), spec_of("functional", run="stopped")
    lab.begin(stopped)
    sink = At(lab, 6, sigterm(lab))
    with sigterm_raises(GoneError), pytest.raises(GoneError):
        train_hearing(lab, stopped, sink, 11, clock=ticking())
    assert commits(lab, stopped) == [(0, "initialized"), (6, "sigterm")]
    one, other = lab.relay(straight, 11), lab.relay(stopped, 11)
    assert one.tip is not None
    assert other.tip is not None
    assert differing(lab.tensors(straight, one.tip), lab.tensors(stopped, other.tip)) == []
    assert told(lab, straight) == told(lab, stopped)


def test_a_stop_before_the_first_step_commits_nothing(lab: Lab) -> None:
    spec = spec_of("functional")
    start = lab.begin(spec).tip
    assert start is not None
    request = lab.request(spec, start, 11).model_copy(update={"stop_within_seconds": 0.0})
    from tasks.train_segment.stage import train_segment

    head = lab.log(spec).head()
    assert head is not None
    result = train_segment(
        request, code_folder=lab.code, storage=lab.storage, recorded=head.environment, telemetry=lab.heard
    )
    assert (result.staged, result.exit_reason, result.examples) == (None, "time_budget", 0)
    assert commits(lab, spec) == [(0, "initialized")]


def test_a_commit_that_does_not_fit_the_grace_period_is_left(lab: Lab) -> None:
    """The first commit is tried in any case; once it is known to take long, it is not begun in vain."""
    spec = spec_of("functional", stop__grace_seconds=1e-3)
    lab.begin(spec)
    lab.relay(spec, 3)  # now the cost of staging is known: more than half a millisecond
    sink = At(lab, 8, sigterm(lab))
    with sigterm_raises(GoneError), pytest.raises(GoneError):
        train_hearing(lab, spec, sink, 11)
    assert commits(lab, spec) == [(0, "initialized"), (3, "segment_end")]
    assert any("steps 4 to 8 are not committed" in warning for warning in lab.heard.warnings)


def test_an_overtaken_segment_ends_at_its_next_commit(lab: Lab) -> None:
    spec = spec_of("plain", checkpoint__every_seconds=8.0)
    lab.begin(spec)

    def overtake() -> None:
        forget_trainer()
        rival = Lab(lab.root)
        rival.relay(spec, 5)

    with pytest.raises(StaleWriter, match="the tip has moved since"):
        train_hearing(lab, spec, At(lab, 2, overtake), 11, clock=ticking())
    assert commits(lab, spec) == [(0, "initialized"), (5, "segment_end")]


def test_the_commit_is_the_one_that_is_handed_in(lab: Lab) -> None:
    landed = []

    def counting(home: Storage, body: Commit, *, spec: RunSpec, telemetry: Sink) -> Entry:
        landed.append(body.checkpoint.step)
        return commit_staged(home, body, spec=spec, telemetry=telemetry)

    spec = spec_of("plain", checkpoint__every_seconds=8.0)
    lab.begin(spec)
    train_hearing(lab, spec, lab.heard, 11, clock=ticking(), land=counting)
    assert len(landed) > 1
    assert [event.step for event in lab.heard.events if isinstance(event, Committed)] == [0, *landed]
