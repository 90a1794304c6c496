"""What follows a commit and no training needs, fails with one warning: the training goes on, and nothing is lost."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.tasks.foundation.checkpoint.save import commit_staged
from baton.tasks.foundation.contracts.log_entry import Entry
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import StorageError, StoreRefused, StoreUnreachable
from baton.tasks.foundation.log.files import entry_path
from baton.tasks.foundation.log.history import kept_for_good, restorable
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.telemetry.events import Committed, Event
from baton.tasks.foundation.telemetry.tensorboard import CurveFiles
from tests.fakes.gcs.server import FakeGcs, FaultPlan
from tests.support.counting_storage import Counting
from tests.support.lab import spec_of
from tests.support.small_logs import assert_sound, begin, committing, folders, head_of, stage

SPEC: RunSpec = spec_of("plain", checkpoint__keep_last=1, checkpoint__keep_every_steps=20)


class OnCommit:
    """A sink that calls a function when an entry is in the log, before anything else is done."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.then = then

    def emit(self, event: Event) -> None:
        if isinstance(event, Committed):
            self.then()


def commit_at(log: RunLog, step: int, then: Callable[[], object] = lambda: None) -> Entry:
    """Commit as the thread that saves does."""
    head = head_of(log)
    body = committing(stage(log.home, step, head.base, f"a{step}"), parent=head.tip.path if head.tip else None)
    return commit_staged(log, body, spec=SPEC, telemetry=OnCommit(then), verified=True)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def run_in(store: Storage) -> Storage:
    """A run with checkpoints that are kept for good, and what a killed process has left."""
    log = begin(store)
    for step in (10, 20, 30, 40, 50):
        commit_at(log, step)
    stage(store, 45, 3, "killed")
    return store


@pytest.fixture
def old(store: Storage) -> Storage:
    return run_in(store)


class Failing(Counting):
    """A store that fails at a call after the next commit, by its number from 1; at each of them for None."""

    def __init__(self, store: Storage, fault: Exception, at: int | None = None) -> None:
        super().__init__(store)
        self.armed, self.counted = False, 0
        self._fault, self._at = fault, at
        self.fails = self._fails

    def arm(self) -> None:
        self.armed = True

    def _fails(self, _number: int, _verb: str) -> tuple[Exception, bool] | None:
        self.counted += self.armed
        return (self._fault, False) if self.armed and self._at in {None, self.counted} else None


@pytest.mark.parametrize("damage", [b"", b"flipped", None], ids=["torn", "other bytes", "missing"])
def test_damage_of_an_old_entry_ends_no_commit(
    old: Storage, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {each.ref.path for each in kept_for_good(RunLog(old), head_of(RunLog(old)))}
    whole = old.read(entry_path(4))
    old.delete(entry_path(4)) if damage is None else old.write(entry_path(4), damage)
    log = RunLog(old)
    for step in (60, 70, 80, 90):
        assert commit_at(log, step).body.kind == "checkpoint"
    [warning] = warnings_of(caplog)
    assert "unused folders in checkpoints/ could not be looked for, which no training needs; they stay" in warning
    assert entry_path(4) in warning
    assert "backup" in warning
    assert kept <= folders(old)
    old.write(entry_path(4), whole)
    commit_at(RunLog(old), 100)
    assert not [path for path in folders(old) if "killed" in path]
    assert_sound(old)


FAULTS = [StorageError("the store failed"), StoreRefused("403"), StoreUnreachable("away"), RuntimeError("a bug")]


def test_each_call_after_a_commit_may_fail(memory: MemoryStorage, caplog: pytest.LogCaptureFixture) -> None:
    straight = Failing(run_in(memory.at("straight")), FAULTS[0], at=0)
    commit_at(RunLog(straight), 60, straight.arm)  # type: ignore[arg-type]
    assert straight.counted > 10
    for number in range(1, straight.counted + 1):
        home = run_in(memory.at(f"failing-{number}"))
        failing = Failing(home, FAULTS[number % len(FAULTS)], at=number)
        log = RunLog(failing)  # type: ignore[arg-type]
        caplog.clear()
        assert commit_at(log, 60, failing.arm).body.kind == "checkpoint"
        assert len(warnings_of(caplog)) <= 1
        for step in (70, 80, 90, 100):
            commit_at(log, step)
        assert_sound(home)
        head = head_of(log)
        assert folders(home) <= {ref.path for ref in restorable(log, head)} | {each.path for each in head.retired}


def test_a_store_that_fails_after_each_commit_is_one_warning_each(
    old: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(old, FAULTS[0])
    log = RunLog(failing)  # type: ignore[arg-type]
    curves = CurveFiles(log)
    for step in (60, 70, 80, 90):
        failing.armed = False
        curves.update(commit_at(log, step, failing.arm).head)
    failing.armed = False
    warnings = warnings_of(caplog)
    assert len(warnings) >= 3
    assert_said_once_and_goes_on(log, caplog)


@pytest.fixture
def in_cloud(cloud: FakeGcs) -> Iterator[RunLog]:
    policy = RetryPolicy(total_seconds=0.2, stall_seconds=0.2, first_wait_seconds=0.001)
    log = begin(CloudStorage("bucket", "runs/run", policy))
    for step in (10, 20, 30, 40):
        commit_at(log, step)
    yield RunLog(log.home)
    cloud.faults = None


FAILING = [
    *({"match": {"kind": kind}, "fault": "status"} for kind in ("object.list", "batch", "object.media")),
    *({"match": {"path": path}, "fault": "stall", "stall_seconds": 0.4} for path in ("HINT", "tensorboard", "/log/")),
    {"fault": "slow", "delay_seconds": 0.01},
]


@pytest.mark.parametrize("fault", FAILING, ids=lambda fault: f"{fault['fault']} {fault.get('match')}")
def test_cloud_storage_that_fails_after_a_commit_ends_nothing(
    cloud: FakeGcs, in_cloud: RunLog, fault: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    plan, curves = FaultPlan.scripted([{"times": None, **fault}]), CurveFiles(in_cloud)
    for step in (50, 60):
        curves.update(commit_at(in_cloud, step, lambda: setattr(cloud, "faults", plan)).head)
        cloud.faults = None
    assert_said_once_and_goes_on(in_cloud, caplog)


@pytest.mark.parametrize("what", ["list", "get", "delete", "create"])
def test_permission_that_is_lost_after_a_commit_ends_nothing(
    cloud: FakeGcs, in_cloud: RunLog, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    curves, denied = CurveFiles(in_cloud), [f"storage.objects.{what}"]
    for step in (50, 60):
        curves.update(commit_at(in_cloud, step, lambda: cloud.store.set_bucket("bucket", denied=denied)).head)
        cloud.store.set_bucket("bucket", denied=[])
    assert_said_once_and_goes_on(in_cloud, caplog)


def assert_said_once_and_goes_on(log: RunLog, caplog: pytest.LogCaptureFixture) -> None:
    """Assert that each kind of work has at most one warning, apart from those of waits, and is made up for."""
    warnings = [text for text in warnings_of(caplog) if "retrying in" not in text]
    assert all("no training needs; " in text or "will retry later" in text for text in warnings)
    assert len(warnings) == len({text.partition(", which")[0] for text in warnings})
    for step in (100, 110, 120, 130):
        commit_at(RunLog(log.home), step)
    assert_sound(log.home)
    head = head_of(log)
    known = {ref.path for ref in restorable(log, head)} | {each.path for each in head.retired}
    assert folders(log.home) <= known
