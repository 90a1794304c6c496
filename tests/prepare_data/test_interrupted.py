"""A preparation that is interrupted while the store is away does not wait for it."""

import threading
from typing import Any

import pytest

from tasks.foundation.contracts.run_spec import DataSpec, RunSpec, StopSpec, TrainSpec
from tasks.foundation.storage.deadline import LEAVING
from tasks.foundation.storage.gcs.retrying import RetryPolicy
from tasks.foundation.storage.gcs.storage import CloudStorage
from tasks.prepare_data.sources.read_ahead import in_order
from tasks.prepare_data.stage import prepare_data
from tests.fakes.gcs.fake_gcs import FakeGcs, FaultPlan


def test_uploads_under_way_are_waited_for_no_longer_than_the_grace_period(
    workshop: Any, cloud: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.write("t.csv", "".join(["a,y\n", *(f"{number},1\n" for number in range(400))]))
    monkeypatch.setattr("tasks.prepare_data.stage._TOLD_EVERY_EXAMPLES", 10)
    spec = RunSpec(
        run="test",
        storage="store",
        data=DataSpec(source="csv", options={"path": "t.csv", "label": "y"}, shard_examples=10),
        model="model.py:build_model",
        train=TrainSpec(steps=1, global_batch_size=1),
        stop=StopSpec(grace_seconds=0.2),
    )
    storage = CloudStorage("bucket", "runs", RetryPolicy(total_seconds=600, stall_seconds=600))
    gone = {"match": {"kind": "object.get", "path": "train-"}, "fault": "stall", "stall_seconds": 60.0, "times": None}
    cloud.faults = FaultPlan.scripted([gone])

    class Interrupting:
        def emit(self, _: object) -> None:
            if cloud.fault_run.log:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_data(spec, code_folder=workshop.code, storage=storage, telemetry=Interrupting())
    assert LEAVING.is_set


def test_whoever_stops_listening_does_not_wait_for_what_is_read_ahead() -> None:
    ever = threading.Event()
    results = in_order(lambda item: ever.wait(60) if item else item, range(20), workers=2)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert not ever.is_set()
    ever.set()
