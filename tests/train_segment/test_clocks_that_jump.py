"""A clock that jumps during training gives wrong measurements, but every commit is made."""

import itertools
import math
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as some

from baton.tasks.foundation.checkpoint.cadence import CommitCadence
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef, checkpoint_folder
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import (
    Commit,
    Entry,
    Environment,
    MetricRow,
    Origin,
    SegmentRequest,
    TracedStep,
)
from baton.tasks.foundation.contracts.run_spec import CheckpointSpec
from baton.tasks.foundation.log.appends import commit
from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.log.host_history import summed_stats
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.telemetry.ledger import measured, seconds_between
from baton.tasks.train_segment import interval as module
from baton.tasks.train_segment import trainer
from baton.tasks.train_segment.host_stats import InnerLoop
from baton.tasks.train_segment.interval import CommitInterval
from tests.support.event_recorder import EventRecorder
from tests.support.lab import Lab, spec_of

ENVIRONMENT = Environment(accelerator="cpu", replicas=1, intra_op_threads=1, inter_op_threads=1, versions={})
SPEC = spec_of("plain")
DATASET = DatasetRef(
    folder="datasets/d", content_digest="c", train_examples=8, validation_examples=0, already_prepared=True
)
NUMBERS = some.floats() | some.sampled_from([-3600.0, 1e300, math.inf, -math.inf, math.nan])


def staged(step: int, base: int) -> CheckpointRef:
    attempt = uuid.uuid4().hex
    return CheckpointRef(
        path=checkpoint_folder(step=step, base=base, attempt=attempt), step=step, base=base, attempt=attempt,
        state_digest="d", manifest_digest="m", size=8,
    )  # fmt: skip


class Hosts:
    """This host, and another host with given numbers."""

    agreed = ""

    hosts, replicas, is_chief = 2, 2, True

    def __init__(self, of_the_other: list[float]) -> None:
        self.of_the_other = of_the_other

    def gather_from_hosts(self, numbers: list[float]) -> Any:
        return np.array([numbers, (self.of_the_other * 9)[: len(numbers)]], np.float64)

    def broadcast_from_chief(self, number: int) -> int:
        return number


class Trained:
    """A fake trainer with a state at a given step."""

    def __init__(self, step: int, accelerator: Hosts) -> None:
        self.accelerator, self.state, self.step = accelerator, self, step
        self.staging_seconds: float | None = None
        self.cadence = CommitCadence(CheckpointSpec(every_seconds=None), state_bytes=0)
        self.traced: TracedStep | None = None

    def read_partial_row(self, _telemetry: object) -> None:
        """No metrics were read."""


class AppendingInterval(CommitInterval):
    """Stages nothing; its commits only append the log entry."""

    def stage(self, trainer: Any) -> CheckpointRef:
        self._prepare_save(trainer)
        return staged(trainer.state.step, self.base)


def begun() -> tuple[Storage, Entry]:
    home = MemoryStorage(uuid.uuid4().hex)
    log = RunLog(home)
    log.append(lambda _: Origin(identity={}, environment=ENVIRONMENT), attempt="a")
    return home, commit(log, Commit(checkpoint=staged(0, 0), parent=None, exit_reason="initialized"))


@given(
    clock=some.lists(NUMBERS, min_size=1, max_size=6),
    waited=NUMBERS,
    loops=some.lists(NUMBERS, min_size=1, max_size=3),
    other=some.lists(NUMBERS, min_size=5, max_size=5),
    losses=some.lists(NUMBERS, max_size=2),
)
def test_commits_are_made_whatever_was_measured(
    clock: list[float], waited: float, loops: list[float], other: list[float], losses: list[float]
) -> None:
    home, start = begun()
    assert start.head.tip is not None
    request = SegmentRequest(
        spec=SPEC, dataset=DATASET, start=start.head.tip, base=start.head.base, skipped_batches=0, until_step=4,
        number=1,
    )  # fmt: skip
    readings = itertools.cycle(clock)
    recorder = EventRecorder()
    place = Place(
        root=home, home=home, log=RunLog(home), code_folder=Path(), telemetry=recorder, clock=lambda: next(readings)
    )
    interval = AppendingInterval(request, place)
    interval.work.begin_cause("train")
    interval.work.log(MetricRow(step=2, metrics={"loss": losses[0] if losses else 0.5}))
    for seconds in loops:
        interval.work.add_inner_loop(InnerLoop(steps=1, input_wait_seconds=waited, losses=tuple(losses)), seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "commit_staged", lambda log, body, **_: commit(log, body))
        patch.setattr(module, "require_broadcast_head", lambda _log, head, _hosts: head)
        interval.commit(Trained(2, Hosts(other)), "interval")  # type: ignore[arg-type]
    made = RunLog(home).require_head()
    assert made.tip is not None
    assert made.tip.step == 2
    entries = list(RunLog(home).entries())
    body = entries[-1].body
    assert isinstance(body, Commit)
    assert all(0 <= amount < math.inf for amount in body.seconds.values())
    # Statistics are left out with a warning, or complete: one for each host.
    assert len(body.workers) == (0 if recorder.warnings else 2)
    assert len(summed_stats(history_of(entries))) == len(body.workers)


def test_invalid_times_count_as_zero() -> None:
    assert [seconds_between(10.0, later) for later in (12.5, 10.0, 3.0, math.nan, math.inf, -math.inf, 1e12)] == [
        2.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
    ]  # fmt: skip
    with pytest.raises(KeyError):  # a programming error is not an invalid measurement
        measured(lambda: {}[0], None, what="nothing", telemetry=EventRecorder())


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    PROCESS_STATE.forget()
    yield Lab(tmp_path)
    PROCESS_STATE.forget()


@pytest.mark.slow
def test_clock_set_back_during_a_step_loses_nothing(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each reading, the clock of the compiled loop goes back an hour, then forward a day."""
    spec = spec_of("plain")
    straight = Lab(tmp_path / "straight").relay(spec, 6, 11)
    back = (1e9 - 3600.0 * number for number in range(9))
    readings = itertools.chain(back, (1e9 + 86400.0 * number for number in itertools.count(1)))

    def timestamp() -> Any:
        return tf.reshape(tf.py_function(lambda: next(readings), [], tf.float64), [])

    monkeypatch.setattr(trainer, "_python_time", timestamp)
    PROCESS_STATE.forget()
    head = lab.relay(spec, 6, 11)
    assert next(readings) > 1e9, "the loop does not read this clock"
    assert head.tip is not None
    assert straight.tip is not None
    assert (head.tip.step, head.tip.state_digest) == (11, straight.tip.state_digest)
    for worker in summed_stats(history_of(lab.log(spec).entries())):
        assert 0 <= worker.input_wait_seconds <= worker.train_seconds
