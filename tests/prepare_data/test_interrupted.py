"""An interrupted preparation does not wait for a store that is unreachable."""

import threading
from typing import Any

import pytest

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.run_spec import RunSpec, StopSpec, TrainSpec
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE
from baton.tasks.prepare_data.sources.verified_reads import map_ahead
from baton.tasks.prepare_data.stage import prepare_data
from tests.fakes.gcs.server import FakeGcs, FaultPlan


def test_interrupted_uploads_end_within_the_grace_period(
    workshop: Any, cloud: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.write("t.csv", "".join(["a,y\n", *(f"{number},1\n" for number in range(400))]))
    monkeypatch.setattr("baton.tasks.prepare_data.stage._REPORT_EVERY_EXAMPLES", 10)
    spec = RunSpec(
        run="test",
        storage="store",
        data=DataSpec(source="table", options={"path": "t.csv", "y": "y"}, shard_examples=10),
        model="model.py:build_model",
        train=TrainSpec(steps=1, global_batch_size=1),
        stop=StopSpec(grace_seconds=0.2),
    )
    storage = CloudStorage("bucket", "runs", RetryPolicy(total_seconds=600, stall_seconds=600))
    outage = {"match": {"kind": "object.get", "path": "train-"}, "fault": "stall", "stall_seconds": 60.0, "times": None}
    cloud.faults = FaultPlan.scripted([outage])

    class Interrupting:
        def emit(self, _: object) -> None:
            if cloud.fault_run.log:
                raise KeyboardInterrupt

    place = Place.of(storage, spec.run, code_folder=workshop.code, telemetry=Interrupting())
    with pytest.raises(KeyboardInterrupt):
        prepare_data(PrepareDataCall(spec=spec), place)
    assert PROCESS_DEADLINE.is_set


def test_closing_an_iterator_does_not_wait_for_read_ahead() -> None:
    ever = threading.Event()
    results = map_ahead(lambda item: ever.wait(60) if item else item, range(20), workers=2)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert not ever.is_set()
    ever.set()
