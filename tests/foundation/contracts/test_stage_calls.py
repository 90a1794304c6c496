"""Calls of remote stages as JSON: the keys stay the same, so that versions of Baton understand each other."""

import json
import math
from pathlib import Path

import pytest

from baton.tasks.foundation.contracts.data_spec import SetRef
from baton.tasks.foundation.contracts.log_entry import MetricRow, SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import (
    CheckpointToGcsCall,
    EvaluateCall,
    PrepareDataCall,
    RemoteCheckpointToGcsCall,
    RemoteContext,
    RemoteTrainSegmentCall,
    StageCall,
    pack,
    unpack,
)
from baton.tasks.foundation.errors import AnotherVersion, InvalidInput
from tests.support.fake_prefect_api import DATASET, run_with_code, staged
from tests.support.fake_run import FakeRun

CONTEXT = RemoteContext(code_folder="/code", code={"model.py:build": "0" * 12}, attempt="a" * 32)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return run_with_code(tmp_path)


def request_of(run: FakeRun) -> SegmentRequest:
    spec = load_run_file(run.run_file()).spec
    return SegmentRequest(
        spec=spec, dataset=DATASET, start=run.tip, base=run.head.base, skipped_batches=0, until_step=200, number=1
    )


def test_keys_of_a_call_and_its_context_are_flat(run: FakeRun) -> None:
    request = request_of(run)
    call = RemoteTrainSegmentCall(
        spec=request.spec, request=request, recorded=run.head.environment, asked_at="2026-11-22T19:00:00.000+00:00"
    )
    text = pack(call, CONTEXT)
    assert json.loads(text).keys() == {
        "format", "spec", "code_folder", "code", "attempt", "request", "recorded", "accept",
        "asked_at",
    }  # fmt: skip
    assert unpack(RemoteTrainSegmentCall, text) == (call, CONTEXT)


def test_long_result_is_sent_as_a_path(run: FakeRun) -> None:
    request = request_of(run)
    call = RemoteCheckpointToGcsCall(spec=request.spec, request=request, result="answers/a.json")
    assert json.loads(pack(call, CONTEXT))["result"] == "answers/a.json"


def test_nan_survives(run: FakeRun) -> None:
    class WithResult(StageCall):
        result: SegmentResult

    result = staged(run).model_copy(update={"history": (MetricRow(step=1, metrics={"loss": math.nan}),)})
    call = WithResult(spec=request_of(run).spec, result=result)
    back, _ = unpack(WithResult, pack(call, CONTEXT))
    assert math.isnan(back.result.history[0].metrics["loss"])


def test_call_in_process_needs_only_what_the_stage_uses(run: FakeRun) -> None:
    call = CheckpointToGcsCall.of(request_of(run), staged(run))
    assert set(type(call).model_fields) == {"format", "spec", "request", "result"}


@pytest.mark.parametrize("text", ["[]", "not JSON", "null"])
def test_text_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="PrepareDataCall"):
        unpack(PrepareDataCall, text)


def test_unknown_key_of_a_newer_version_is_refused(run: FakeRun) -> None:
    values = json.loads(pack(PrepareDataCall(spec=load_run_file(run.run_file()).spec), CONTEXT))
    with pytest.raises(AnotherVersion, match="mood is an unknown key"):
        unpack(PrepareDataCall, json.dumps({**values, "mood": "good"}))


def test_call_names_the_set_and_where_it_is(run: FakeRun) -> None:
    given = {**load_run_file(run.run_file()).spec.model_dump(mode="json")}
    data = {
        "source": "data.py:load",
        "validation": "data.py:held_out",
        "test": {"source": "npz", "options": {"path": "t"}},
    }
    spec = RunSpec.model_validate(given | {"data": data})
    own = SetRef(folder="datasets/0123456789ac", content_digest="c", examples=3)
    dataset = DATASET.model_copy(update={"validation": own, "test": own})
    call = EvaluateCall(spec=spec, dataset=dataset, checkpoint=run.tip, recorded=run.head.environment, on="test")
    back, _ = unpack(EvaluateCall, pack(call, CONTEXT))
    assert back == call
    assert (back.on, back.dataset.examples_of("test")) == ("test", 3)
