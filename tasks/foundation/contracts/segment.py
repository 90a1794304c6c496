"""The request for a training segment, and its result."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.checkpoint import CheckpointRef, WholeRead
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.safe_names import CheckpointPath

# Sums of them are finite too.
FiniteSeconds = Annotated[float, Field(ge=-1e15, le=1e15)]
# Requested from outside; the run can continue from where it stopped.
StopReason = Literal["sigterm", "sigint", "time_budget", "preempted", "maintenance"]
# Where a segment ends by itself. Only these steps can be computed from the run file.
BorderReason = Literal["segment_end", "segment_seconds"]
# Superseded: a remote segment was not trained, because its start was no longer the tip when it began.
ExitReason = BorderReason | Literal["interval", "rewind", "finished", "superseded"] | StopReason

STOP_REASONS: frozenset[str] = frozenset(get_args(StopReason))


class MetricRow(Contract):
    """Training metrics since the previous row, read at an absolute step."""

    step: int = Field(ge=1)
    metrics: dict[str, float]
    learning_rate: float | None = Field(
        default=None, description="what the optimizer uses next; None: not known, as in rows of earlier versions"
    )


class WorkerStats(Contract):
    """What one host did since the previous commit; shows a slow host."""

    host: int = Field(ge=0)
    replicas: int = Field(ge=1, description="replicas of this host")
    steps: int = Field(ge=0)
    examples: int = Field(ge=0, description="examples that its replicas trained on")
    train_seconds: float = Field(ge=0, description="in the training loop, including the wait for input")
    input_wait_seconds: float = Field(ge=0, description="part of train_seconds: waiting for the next batch")
    losses: tuple[float, ...] = Field(
        default=(), description="loss of each replica since the metrics were reset; empty if the step has none"
    )


class TracedStep(Contract):
    """The train step as a process traced it. Processes in the same circumstances should trace the same graph."""

    fingerprint: str = Field(description="digest of the traced graph")
    circumstances: str = Field(description="digest of devices, replicas, versions and the run's identity")
    draws_exactly: bool | None = Field(
        default=None,
        description="whether random operations of the step were made functions of seed, step and replica; None: traced "
        "by an earlier version, which left them as they are",
    )
    structure: str | None = Field(
        default=None, description="digest of the traced graph without the values of its constants"
    )
    contents: str | None = Field(
        default=None,
        description="number of the constants and captured values of the graph, then a digest of each; of several "
        "neighbors together where there are more than 32",
    )


class SegmentRequest(Contract):
    """Train from a committed checkpoint to an absolute step."""

    schema_version: Literal[1] = 1
    spec: RunSpec
    dataset: DatasetRef
    start: CheckpointRef
    base: int = Field(ge=0, description="base of the head that `start` is the tip of")
    skipped_batches: int = Field(ge=0)
    until_step: int = Field(ge=1)
    stop_within_seconds: float | None = Field(default=None, description="rest of the command's time budget")
    number: int = Field(ge=1, description="number of the segment in this command, from 1; for messages")


class SegmentResult(Contract):
    """A staged checkpoint, or one that is being written, and what happened since its `parent`.

    There is neither after a stop or a rewind, if callbacks end the run, or if the segment was superseded. Everything
    is committed already then.
    """

    schema_version: Literal[1] = 1
    staged: CheckpointRef | None
    parent: CheckpointPath = Field(description="path of the checkpoint that `staged` was trained from")
    exit_reason: ExitReason
    history: tuple[MetricRow, ...]
    examples: int = Field(ge=0, description="examples that went through train_step")
    seconds: dict[str, FiniteSeconds] = Field(description="wall-clock seconds of the stage, by cause")
    workers: tuple[WorkerStats, ...] = ()
    traced: TracedStep | None = None
    in_flight: CheckpointRef | None = Field(
        default=None, description="the checkpoint that the process is still writing; only within this process"
    )

    read_whole: tuple[WholeRead, ...] = Field(
        default=(), description="what the process has read whole, and no entry says; the commit says it"
    )

    def landed(self, staged: CheckpointRef) -> "SegmentResult":
        """The result once the checkpoint in flight is staged."""
        return self.model_copy(update={"staged": staged, "in_flight": None})

    @classmethod
    def superseded(cls, request: SegmentRequest) -> "SegmentResult":
        """The result of a segment that was not trained, because its start is no longer the tip."""
        return cls(staged=None, parent=request.start.path, exit_reason="superseded", history=(), examples=0, seconds={})
