"""Contracts survive JSON unchanged, and other versions are refused."""

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.checkpoint import (
    CheckpointManifest,
    CheckpointRef,
    FileRecord,
    VariableRecord,
    base_in_folder_name,
    checkpoint_folder,
)
from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, Feature, ShardRecord
from baton.tasks.foundation.contracts.log_entry import (
    Best,
    Change,
    Commit,
    Entry,
    Environment,
    Evaluation,
    Head,
    MetricRow,
    Origin,
    Quarantine,
    Retained,
    Retire,
    Retired,
    SegmentRequest,
    SegmentResult,
    SetIn,
)
from baton.tasks.foundation.contracts.run_spec import KeepBest, ModelSpec, RunSpec, TrainSpec
from baton.tasks.foundation.errors import AnotherVersion, DamagedCheckpoint, RunLogError

REF = CheckpointRef(
    path=checkpoint_folder(step=500, base=3, attempt="a" * 32),
    step=500,
    base=3,
    attempt="a" * 32,
    state_digest="d" * 64,
    manifest_digest="m" * 64,
    size=12345,
)
ENVIRONMENT = Environment(
    accelerator="cpu", replicas=2, intra_op_threads=2, inter_op_threads=1, versions={"keras": "3"}
)
SPEC = RunSpec(
    run="digits",
    storage="runs",
    data=DataSpec(source="digits", options={"nested": {"list": [1, 2.5, None, True, "größe"]}}, version="2"),
    model=ModelSpec(build="model.py:build"),
    train=TrainSpec(steps=10, segment_seconds=1e-3, global_batch_size=4),
)
DATASET = DatasetRef(
    folder="datasets/abc", content_digest="c", train_examples=9, validation_examples=0, already_prepared=True
)
ROWS = (
    MetricRow(step=50, metrics={"loss": 0.1 + 0.2, "tiny": 5e-324, "minus": -0.0}),
    MetricRow(step=100, metrics={"loss": math.nan, "up": math.inf, "down": -math.inf}),
)
HEAD = Head(
    number=7,
    base=6,
    commits=2,
    checkpoints=(Retained(ref=REF, evaluated=True),),
    retired=(Retired(path="checkpoints/x", at_commit=1),),
    quarantined=(REF,),
    best=Best(checkpoint=REF, metric="accuracy", mode="max", value=0.99),
    skipped_batches=0,
    identity_in=SetIn(entry=0, digest="0" * 32),
    environment_in=SetIn(entry=5, digest="1" * 32),
    identity={"seed": 0, "model": {"layers": [1, 2]}},
    environment=ENVIRONMENT,
)
COMMIT = Commit(checkpoint=REF, parent=None, exit_reason="segment_end", history=ROWS, examples=5, seconds={"train": 1})
BODIES = [
    Origin(identity={"seed": 0}, environment=ENVIRONMENT),
    COMMIT,
    Quarantine(path=REF.path, reason="crc32c"),
    Retire(paths=("checkpoints/a",), deleted=("checkpoints/b", "checkpoints/c")),
    Evaluation(
        checkpoint=REF,
        metrics={"loss": math.nan, "accuracy": 1.0},
        examples=3,
        seconds=0.5,
        keep_best=KeepBest(metric="accuracy", mode="max"),
    ),
    Change(environment=ENVIRONMENT),
]
TOP_LEVEL: list[Contract] = [
    CheckpointManifest(
        step=500,
        base=3,
        attempt="a",
        replicas=2,
        state_digest="d",
        signature=(VariableRecord(path="model/w", dtype="float32", shape=(3, 0), per_replica=False),),
        leaf_digests={"model/w": "0" * 64},
        files=(FileRecord(name="ckpt.index", size=1, crc32c="e3069283"),),
    ),
    DatasetManifest(
        digest="abc",
        content_digest="c",
        source="digits",
        origin={"digits.csv": "sha"},
        features=(Feature(name="x", dtype="uint8", shape=()),),
        train=(ShardRecord(path="train-0", examples=9, size=10, crc32c="00000000"),),
        validation=(),
    ),
    DATASET,
    SegmentRequest(spec=SPEC, dataset=DATASET, start=REF, base=3, skipped_batches=0, until_step=10, number=1),
    SegmentResult(
        staged=REF, parent=REF.path, exit_reason="segment_end", history=ROWS, examples=40, seconds={"train": 0.25}
    ),
    SegmentResult(staged=None, parent=REF.path, exit_reason="sigterm", history=(), examples=0, seconds={}),
    *(Entry(number=7, time="2025-01-01T00:00:00+00:00", attempt="a", body=body, head=HEAD) for body in BODIES),
]

# Mappings from free names to values.
FREE = {
    "options",
    "metrics",
    "seconds",
    "versions",
    "identity",
    "configured",
    "optimizers",
    "kept",
    "origin",
    "class_weight",
    "rename",
    "leaf_digests",
    "metadata",
    "logged",
    "values",
}


def name(contract: Contract) -> str:
    return f"{type(contract).__name__}-{contract.body.kind}" if isinstance(contract, Entry) else type(contract).__name__


@pytest.mark.parametrize("contract", TOP_LEVEL, ids=name)
def test_json_round_trip(contract: Contract) -> None:
    data = contract.to_json()
    again = type(contract).from_json(data, where="x", error=RunLogError)
    assert type(again) is type(contract)
    assert again.to_json() == data
    assert repr(again) == repr(contract)  # unlike ==, treats NaN as equal to itself


@pytest.mark.parametrize("contract", TOP_LEVEL, ids=name)
def test_other_format_is_refused(contract: Contract) -> None:
    data = json.loads(contract.to_json())
    assert data["format"] == 1
    for version in (0, "1", None):
        with pytest.raises(RunLogError, match=f"somewhere: not a readable {type(contract).__name__}: format"):
            type(contract).from_json(
                json.dumps(data | {"format": version}).encode(), where="somewhere", error=RunLogError
            )


@pytest.mark.parametrize("contract", TOP_LEVEL, ids=name)
def test_newer_schema_is_reported_at_any_depth(contract: Contract) -> None:
    text = contract.to_json().decode()
    assert '"format": 1' in text
    next_one = '"format": 2'
    for newer in (text.replace('"format": 1', next_one, 1), _with_last_schema(text, 7)):
        with pytest.raises(AnotherVersion, match=r"somewhere: .*format is [237]\. This is Baton \S+, which"):
            type(contract).from_json(newer.encode(), where="somewhere", error=RunLogError)


def _with_last_schema(text: str, number: int) -> str:
    head, _, tail = text.rpartition('"format": 1')
    return f'{head}"format": {number}{tail}'


@pytest.mark.parametrize("contract", TOP_LEVEL, ids=name)
def test_unknown_keys_are_ignored_in_json_only(
    contract: Contract,
) -> None:
    data = contract.to_json()
    more = json.dumps(_with_more_keys(json.loads(data))).encode()
    again = type(contract).from_json(more, where="somewhere", error=RunLogError)
    assert again.to_json() == data
    assert "surprise" in type(contract).unknown_keys(more)
    assert type(contract).unknown_keys(data) == ()
    with pytest.raises(ValidationError, match="surprise"):
        type(contract).model_validate_json(more)
    with pytest.raises(AnotherVersion, match=r"surprise is an unknown key"):
        type(contract).from_json(more, where="call", error=RunLogError, unknown_keys="forbid")


def _with_more_keys(value: Any, *, free: bool = False) -> Any:
    """Add an unknown key to every mapping that is a contract; the keys of `free` ones are the user's."""
    if isinstance(value, list):
        return [_with_more_keys(each, free=free) for each in value]
    if not isinstance(value, dict):
        return value
    more = {key: _with_more_keys(each, free=free or key in FREE) for key, each in value.items()}
    return more if free else more | {"surprise": {"x": 1}}


@pytest.mark.parametrize("contract", TOP_LEVEL, ids=name)
def test_torn_or_empty_json_is_refused(contract: Contract) -> None:
    data = contract.to_json()
    for bad in (data[:-10], b"", b"null", b"[]", b"\xff"):
        with pytest.raises(DamagedCheckpoint, match="somewhere: not a readable"):
            type(contract).from_json(bad, where="somewhere", error=DamagedCheckpoint)


def test_metrics_keep_every_bit() -> None:
    rows = Entry.from_json(
        Entry(number=1, time="t", attempt="a", body=COMMIT, head=HEAD).to_json(), where="x", error=RunLogError
    ).body
    assert isinstance(rows, Commit)
    first, second = (row.metrics for row in rows.history)
    assert first == {"loss": 0.30000000000000004, "tiny": 5e-324, "minus": 0.0}
    assert math.copysign(1, first["minus"]) == -1
    assert math.isnan(second["loss"])
    assert (second["up"], second["down"]) == (math.inf, -math.inf)


def test_contracts_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        REF.step = 3  # type: ignore[misc]


def test_dataset_without_training_examples_is_refused() -> None:
    with pytest.raises(ValidationError, match="at least one feature and one training shard"):
        DatasetManifest(
            digest="a", content_digest="c", source="digits", origin={}, features=(), train=(), validation=()
        )


@pytest.mark.parametrize("crc", ["", "E3069283", "e306928", "e30692833", "xyz45678"])
def test_checksum_is_eight_hex_digits(crc: str) -> None:
    with pytest.raises(ValidationError):
        FileRecord(name="a", size=1, crc32c=crc)


def test_base_is_read_from_folder_name() -> None:
    assert base_in_folder_name(REF.path) == 3
    assert base_in_folder_name(checkpoint_folder(step=123456789, base=987654321, attempt="f")) == 987654321


@pytest.mark.parametrize("foreign", ["checkpoints/checkpoint", "checkpoints/ckpt-5", "checkpoints/1-x-a", "", "a-b-c"])
def test_foreign_folder_has_no_base(foreign: str) -> None:
    assert base_in_folder_name(foreign) is None
