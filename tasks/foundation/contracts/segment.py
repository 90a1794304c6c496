"""What a training stage is asked for and what it answers."""

from typing import Literal

from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.run_spec import RunSpec

ExitReason = Literal["segment_end", "segment_seconds"]


class MetricRow(Contract):
    """Training metrics since the row before, read at an absolute step."""

    step: int = Field(ge=1)
    metrics: dict[str, float]


class SegmentRequest(Contract):
    """Train from a committed checkpoint to an absolute step."""

    schema_version: Literal[1] = 1
    spec: RunSpec
    dataset: DatasetRef
    start: CheckpointRef
    base: int = Field(ge=0, description="base of the head that `start` is the tip of")
    skipped_batches: int = Field(ge=0)
    until_step: int = Field(ge=1)
    number: int = Field(ge=1, description="how many segments this command has begun, counted from 1; for messages")


class SegmentResult(Contract):
    """A staged checkpoint and what happened on the way to it."""

    schema_version: Literal[1] = 1
    staged: CheckpointRef
    exit_reason: ExitReason
    history: tuple[MetricRow, ...]
    examples: int = Field(ge=0, description="examples that went through train_step")
    seconds: dict[str, float] = Field(description="wall-clock seconds of the stage, by cause")
