"""The log and its checkpoints if the network damages bytes or the hint cannot be read."""

from pathlib import Path

import pytest

from baton.flows.opened_run import RunHome
from baton.flows.verification import verify_home
from baton.tasks.foundation.checkpoint.retention import quarantine_damaged_tips
from baton.tasks.foundation.checkpoint.verify import fetch, find_damage, read_manifest
from baton.tasks.foundation.errors import DamagedCheckpoint, StorageError
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.telemetry.events import Silent
from tests.fakes.gcs.server import FakeGcs, FaultPlan
from tests.support.small_logs import begin, head_of, train


@pytest.fixture
def log(cloud: FakeGcs) -> RunLog:  # noqa: ARG001 - its address is in the environment
    root = CloudStorage("bucket", "runs", RetryPolicy(total_seconds=5, stall_seconds=60, first_wait_seconds=0.001))
    log = begin(root.at("run"))
    train(log, 10)
    train(log, 20)
    return log


def corrupting(*fractions: float, times: int | None = None) -> FaultPlan:
    """Flip a bit in the downloads of the newest checkpoint's state, at each position in turn."""
    match = {"kind": "object.media", "path": r"/00000020-.*/ckpt\.data"}
    return FaultPlan.scripted(
        [
            {"match": match, "fault": "corrupt-download", "fraction": fraction, "times": times, "skip": 0}
            for fraction in fractions
        ]
    )


@pytest.mark.parametrize("plan", [corrupting(0.5), corrupting(0.1, 0.9, times=1)], ids=["always", "twice, differently"])
def test_incomplete_download_is_not_quarantined(cloud: FakeGcs, log: RunLog, tmp_path: Path, plan: FaultPlan) -> None:
    before = head_of(log)
    tip = before.tip
    assert tip is not None
    message = r"ckpt\.data: damaged in transit, in two reads; .*the file is intact; check the network"
    cloud.faults = plan
    with pytest.raises(StorageError, match=message) as fault:
        quarantine_damaged_tips(log, attempt="b", telemetry=Silent(), verify_bytes=True)
    assert type(fault.value) is StorageError
    cloud.faults = plan
    with pytest.raises(StorageError, match=message):
        fetch(log.home, tip, read_manifest(log.home, tip), tmp_path)
    cloud.faults = plan
    with pytest.raises(StorageError, match=message):
        verify_home(RunHome(root=log.home, home=log.home, log=log))
    cloud.faults = None
    assert head_of(log) == before
    assert find_damage(log.home, tip, read_bytes=True) is None


def test_other_bytes_in_storage_are_damage(cloud: FakeGcs, log: RunLog, tmp_path: Path) -> None:
    tip = head_of(log).tip
    assert tip is not None
    log.home.write(f"{tip.path}/ckpt.data", b"something else")
    with pytest.raises(DamagedCheckpoint, match="its manifest says"):
        fetch(log.home, tip, read_manifest(log.home, tip), tmp_path)
    head = quarantine_damaged_tips(log, attempt="b", telemetry=Silent())
    assert head is not None
    assert head.tip is not None
    assert head.tip.step == 10
    assert cloud.count("object.media") > 0


@pytest.mark.parametrize("fault", [{"fault": "status"}, {"fault": "stall", "stall_seconds": 60.0}])
def test_unreadable_hint_costs_little_time(cloud: FakeGcs, log: RunLog, fault: dict[str, object]) -> None:
    before = head_of(log)
    cloud.faults = FaultPlan.scripted([{"match": {"kind": "object.media", "path": "HINT"}, "times": None, **fault}])
    patient = CloudStorage("bucket", "runs/run", RetryPolicy(total_seconds=3600, stall_seconds=3600))
    assert RunLog(patient).head() == before
    assert cloud.fault_run.log
