"""Entries of the run log. Each has the folded state, so reading the newest entry is enough."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.run_spec import KeepBest
from tasks.foundation.contracts.safe_names import AttemptId, CheckpointPath
from tasks.foundation.contracts.segment import (
    BorderReason,
    ExitReason,
    MetricRow,
    SegmentResult,
    TracedStep,
    WorkerStats,
)
from tasks.foundation.contracts.weights_report import WeightsReport

BORDER_REASONS: frozenset[str] = frozenset({"initialized", "forked", *get_args(BorderReason)})


class Environment(Contract):
    """What the bits of training depend on besides the identity. Thread counts are set again on every attempt."""

    accelerator: str
    replicas: int = Field(ge=1)
    hosts: int = Field(default=1, ge=1, description="machines that feed the replicas, each with one process")
    intra_op_threads: int = Field(ge=1)
    inter_op_threads: int = Field(ge=1)
    versions: dict[str, str]
    deterministic: bool = Field(default=False, description="whether TensorFlow used only deterministic operations")


class Lineage(Contract):
    """The checkpoint of another run that this run was forked from."""

    home: str = Field(description="address of the other run's home at the time of the fork")
    path: CheckpointPath
    step: int = Field(ge=0)
    state_digest: str
    entry: int = Field(ge=0, description="number of the entry in the other run's log that committed it")


class Origin(Contract):
    """The first entry: the identity of the run."""

    kind: Literal["origin"] = "origin"
    forked_from: Lineage | None = None
    skipped_batches: int = Field(default=0, ge=0, description="batches that the other run had skipped before the fork")
    identity: dict[str, Any] = Field(description="identity keys of the run, see contracts/identity.py")
    environment: Environment


class Commit(Contract):
    """A checkpoint became the tip."""

    kind: Literal["checkpoint"] = "checkpoint"
    checkpoint: CheckpointRef
    parent: CheckpointPath | None = Field(description="path of the checkpoint that training started from")
    exit_reason: ExitReason | Literal["initialized", "forked"]
    history: tuple[MetricRow, ...] = ()
    examples: int = 0
    seconds: dict[str, float] = Field(default_factory=dict)
    workers: tuple[WorkerStats, ...] = Field(default=(), description="one per host, in order of the hosts")
    traced: TracedStep | None = Field(default=None, description="the train step as the committing process traced it")
    initialized_from: WeightsReport | None = Field(default=None, description="at step 0: what init.weights loaded")

    @property
    def ends_a_segment(self) -> bool:
        """Whether a segment, or the part of one that was stopped, ends here; not for step 0, forks and intervals."""
        return self.checkpoint.step > 0 and self.exit_reason not in {"forked", "interval"}

    @classmethod
    def of(cls, result: SegmentResult) -> "Commit":
        """Return the commit of the checkpoint that a segment staged.

        Raises:
            ValueError: the segment staged nothing.
        """
        if result.staged is None:
            raise ValueError(f"the segment staged no checkpoint; it ended with {result.exit_reason}")
        return cls(
            checkpoint=result.staged,
            parent=result.parent,
            exit_reason=result.exit_reason,
            history=result.history,
            examples=result.examples,
            seconds=result.seconds,
            workers=result.workers,
            traced=result.traced,
        )


class Quarantine(Contract):
    """The tip is damaged; the retained checkpoint before it becomes the tip."""

    kind: Literal["quarantine"] = "quarantine"
    path: CheckpointPath
    reason: str


class Retire(Contract):
    """Checkpoints are no longer needed (`paths`), or their files have been deleted (`deleted`)."""

    kind: Literal["retire"] = "retire"
    paths: tuple[CheckpointPath, ...]
    deleted: tuple[CheckpointPath, ...]


class Evaluation(Contract):
    """Validation metrics of a committed checkpoint."""

    kind: Literal["evaluation"] = "evaluation"
    checkpoint: CheckpointRef
    metrics: dict[str, float]
    examples: int
    seconds: float
    keep_best: KeepBest | None = Field(description="checkpoint.keep_best at the time of the evaluation")


class Rewind(Contract):
    """The loss blew up: continue from a commit at a segment border, with other batches.

    One entry records both, so that the data order stays a function of the log.
    """

    kind: Literal["rewind"] = "rewind"
    to: CheckpointRef
    blown_up_at: int = Field(ge=1, description="step at which the loss or the weights blew up")
    reason: str
    skip_batches: int = Field(ge=1, description="global batches to skip in addition to those skipped before")


class Finish(Contract):
    """The user's callbacks ended training before its target; the tip stays the same."""

    kind: Literal["finish"] = "finish"
    checkpoint: CheckpointRef = Field(description="the tip")
    reason: str


class Change(Contract):
    """The environment of the run changed, or a change of its identity was accepted."""

    kind: Literal["change"] = "change"
    environment: Environment
    identity: dict[str, Any] | None = Field(default=None, description="the new identity; None: unchanged")
    accepted: tuple[str, ...] = Field(default=(), description="the identity keys whose change was accepted")


Body = Annotated[
    Origin | Commit | Quarantine | Rewind | Retire | Evaluation | Finish | Change, Field(discriminator="kind")
]


class Retired(Contract):
    """A retired checkpoint; its files are deleted two commits later."""

    path: CheckpointPath
    at_commit: int


class Best(Contract):
    """The best evaluation so far, by the metric and mode that the run file had at the time."""

    checkpoint: CheckpointRef
    metric: str
    mode: Literal["max", "min"]
    value: float


class Finished(Contract):
    """How a run ended before its target."""

    step: int = Field(ge=0)
    reason: str


class Head(Contract):
    """The folded state of the newest entry."""

    number: int = Field(ge=0, description="number of the entry that has this state")
    base: int = Field(ge=0, description="number of the entry that last moved the tip or changed the run's identity")
    commits: int = Field(ge=0, description="checkpoints committed so far")
    tip: CheckpointRef | None
    retained: tuple[CheckpointRef, ...] = Field(description="can be restored; in order of commit, the last is the tip")
    retired: tuple[Retired, ...]
    quarantined: tuple[CheckpointRef, ...]
    best: Best | None
    evaluated: tuple[CheckpointPath, ...] = Field(
        description="paths of the retained checkpoints that have been evaluated"
    )
    borders: tuple[CheckpointPath, ...] = Field(
        default=(), description="paths of the retained checkpoints at segment borders"
    )
    skipped_batches: int = Field(ge=0)
    rewinds: int = Field(default=0, ge=0, description="rewinds in a row without getting past `blown_up_at`")
    blown_up_at: int | None = None
    finished: Finished | None = Field(default=None, description="set if the run ended before its target")
    identity: dict[str, Any]
    environment: Environment


class Entry(Contract):
    """One file of the log."""

    schema_version: Literal[1] = 1
    number: int = Field(ge=0)
    time: str = Field(description="UTC, ISO 8601; informational, decides nothing")
    attempt: AttemptId = Field(description="the writer's attempt id: a uuid4 made in the writing process")
    body: Body
    head: Head
