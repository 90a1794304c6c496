"""What a training stage is asked for and what it answers."""

from typing import Literal, get_args

from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.safe_names import CheckpointPath

# Asked for from outside; the run can go on from where it stopped.
StopReason = Literal["sigterm", "sigint", "time_budget", "preempted", "maintenance"]
# Where a segment ends by itself. Only there is the place a function of the run file, not of what happened.
BorderReason = Literal["segment_end", "segment_seconds"]
# Superseded: a segment that was to be trained elsewhere, and whose start was no longer the tip when it began.
ExitReason = BorderReason | Literal["interval", "rewind", "finished", "superseded"] | StopReason

STOP_REASONS: frozenset[str] = frozenset(get_args(StopReason))


class MetricRow(Contract):
    """Training metrics since the row before, read at an absolute step."""

    step: int = Field(ge=1)
    metrics: dict[str, float]


class WorkerStats(Contract):
    """What one host did since the commit before, so that a straggler is seen."""

    host: int = Field(ge=0)
    replicas: int = Field(ge=1, description="that this host feeds")
    steps: int = Field(ge=0)
    examples: int = Field(ge=0, description="that went through its replicas")
    train_seconds: float = Field(ge=0, description="in the training loop, waiting for input included")
    input_wait_seconds: float = Field(ge=0, description="of these, waiting for the next batch")
    losses: tuple[float, ...] = Field(
        default=(), description="of each replica, the loss since metrics were last reset; empty if its step tells none"
    )


class TracedStep(Contract):
    """The train step as a process traced it. Two processes in the same circumstances should trace the same."""

    fingerprint: str = Field(description="digest of what the traced graph computes")
    circumstances: str = Field(description="digest of devices, replicas, versions and the run's identity")


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

    Nothing is staged after a stop or a rewind, where callbacks end the run, or by a segment that was superseded: what
    there was to commit is committed already.
    """

    schema_version: Literal[1] = 1
    staged: CheckpointRef | None
    parent: CheckpointPath = Field(description="path of the checkpoint that `staged` was trained from")
    exit_reason: ExitReason
    history: tuple[MetricRow, ...]
    examples: int = Field(ge=0, description="examples that went through train_step")
    seconds: dict[str, float] = Field(description="wall-clock seconds of the stage, by cause")
    workers: tuple[WorkerStats, ...] = ()
    traced: TracedStep | None = None

    @classmethod
    def superseded(cls, request: SegmentRequest) -> "SegmentResult":
        """Of a segment that was not begun, for the tip is no longer where it was to start."""
        return cls(staged=None, parent=request.start.path, exit_reason="superseded", history=(), examples=0, seconds={})
