"""What a training stage is asked for and what it answers."""

from typing import Literal, get_args

from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.run_spec import RunSpec

# Asked for from outside; the run can go on from where it stopped.
StopReason = Literal["sigterm", "sigint", "time_budget", "preempted", "maintenance"]
# Where a segment ends by itself. Only there is the place a function of the run file, not of what happened.
BorderReason = Literal["segment_end", "segment_seconds"]
ExitReason = BorderReason | Literal["interval", "rewind"] | StopReason

STOP_REASONS: frozenset[str] = frozenset(get_args(StopReason))


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
    stop_within_seconds: float | None = Field(default=None, description="what is left of the command's time budget")
    number: int = Field(ge=1, description="how many segments this command has begun, counted from 1; for messages")


class SegmentResult(Contract):
    """A staged checkpoint and what happened on the way to it, since `parent`.

    Nothing is staged after a stop or a rewind: what there was to commit is committed already, for time is short then.
    """

    schema_version: Literal[1] = 1
    staged: CheckpointRef | None
    parent: str = Field(description="path of the checkpoint that `staged` was trained from")
    exit_reason: ExitReason
    history: tuple[MetricRow, ...]
    examples: int = Field(ge=0, description="examples that went through train_step")
    seconds: dict[str, float] = Field(description="wall-clock seconds of the stage, by cause")
