"""Entries of the run log. Each carries the folded state, so that the newest one says everything."""

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
    """What else the bits depend on; recorded with the run, thread counts are set again on every attempt."""

    accelerator: str
    replicas: int = Field(ge=1)
    hosts: int = Field(default=1, ge=1, description="machines that feed the replicas, each by a process of its own")
    intra_op_threads: int = Field(ge=1)
    inter_op_threads: int = Field(ge=1)
    versions: dict[str, str]
    deterministic: bool = Field(default=False, description="whether TensorFlow used deterministic operations only")


class Lineage(Contract):
    """The checkpoint of another run that this one began from."""

    home: str = Field(description="address of the other run's home when it was forked")
    path: CheckpointPath
    step: int = Field(ge=0)
    state_digest: str
    entry: int = Field(ge=0, description="number of the entry of the other run's log that committed it")


class Origin(Contract):
    """First entry: what makes this run this run."""

    kind: Literal["origin"] = "origin"
    forked_from: Lineage | None = None
    skipped_batches: int = Field(default=0, ge=0, description="batches that the other run had skipped by then")
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
    workers: tuple[WorkerStats, ...] = Field(default=(), description="one of each host, in their order")
    traced: TracedStep | None = Field(default=None, description="the train step as the committing process traced it")
    initialized_from: WeightsReport | None = Field(default=None, description="of step 0: what init.weights loaded")

    @property
    def ends_a_segment(self) -> bool:
        """Whether a segment, or the stopped part of one, ends with it; not so commits within, or beginnings."""
        return self.checkpoint.step > 0 and self.exit_reason not in {"forked", "interval"}

    @classmethod
    def of(cls, result: SegmentResult) -> "Commit":
        """The commit of what a segment staged.

        Raises:
            ValueError: nothing is staged.
        """
        if result.staged is None:
            raise ValueError(f"nothing is staged: the segment ended by {result.exit_reason}")
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
    """The tip proved damaged; the one before is the tip again."""

    kind: Literal["quarantine"] = "quarantine"
    path: CheckpointPath
    reason: str


class Retire(Contract):
    """Checkpoints are no longer needed (`paths`), or their files are gone (`deleted`)."""

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
    keep_best: KeepBest | None = Field(description="what counted as best when this was measured")


class Rewind(Contract):
    """The loss blew up: back to a commit on a segment border, and other batches from there.

    One entry says both, so that the data order stays a function of the log.
    """

    kind: Literal["rewind"] = "rewind"
    to: CheckpointRef
    blown_up_at: int = Field(ge=1, description="the step whose loss, or whose weights, were no good")
    reason: str
    skip_batches: int = Field(ge=1, description="global batches that are skipped, besides those skipped before")


class Finish(Contract):
    """Training ended before its target, as the user's callbacks decided; the tip stays where it is."""

    kind: Literal["finish"] = "finish"
    checkpoint: CheckpointRef = Field(description="the tip, with which it ended")
    reason: str


class Change(Contract):
    """The environment of the run changed, or a change of its identity was accepted."""

    kind: Literal["change"] = "change"
    environment: Environment
    identity: dict[str, Any] | None = Field(default=None, description="the new identity; None: it is as before")
    accepted: tuple[str, ...] = Field(default=(), description="the identity keys whose change was accepted")


Body = Annotated[
    Origin | Commit | Quarantine | Rewind | Retire | Evaluation | Finish | Change, Field(discriminator="kind")
]


class Retired(Contract):
    """A checkpoint whose files are deleted two commits after it was retired."""

    path: CheckpointPath
    at_commit: int


class Best(Contract):
    """The best evaluation so far, by the metric and mode of the run file of that time."""

    checkpoint: CheckpointRef
    metric: str
    mode: Literal["max", "min"]
    value: float


class Finished(Contract):
    """The end of a run that ended before its target."""

    step: int = Field(ge=0)
    reason: str


class Head(Contract):
    """The folded state of the newest entry."""

    number: int = Field(ge=0, description="number of the entry that this state was folded into")
    base: int = Field(ge=0, description="number of the entry that last moved the tip, or the run's identity")
    commits: int = Field(ge=0, description="checkpoints committed so far")
    tip: CheckpointRef | None
    retained: tuple[CheckpointRef, ...] = Field(description="restorable, ordered by commit; the last is the tip")
    retired: tuple[Retired, ...]
    quarantined: tuple[CheckpointRef, ...]
    best: Best | None
    evaluated: tuple[CheckpointPath, ...] = Field(
        description="paths of the retained checkpoints that have been evaluated"
    )
    borders: tuple[CheckpointPath, ...] = Field(
        default=(), description="paths of the retained checkpoints on segment borders"
    )
    skipped_batches: int = Field(ge=0)
    rewinds: int = Field(default=0, ge=0, description="rewinds in a row that have not got past `blown_up_at` yet")
    blown_up_at: int | None = None
    finished: Finished | None = Field(default=None, description="the run ended, with the tip, before its target")
    identity: dict[str, Any]
    environment: Environment


class Entry(Contract):
    """One file of the log."""

    schema_version: Literal[1] = 1
    number: int = Field(ge=0)
    time: str = Field(description="UTC, ISO 8601; for people, never for decisions")
    attempt: AttemptId = Field(description="who wrote it: a uuid4 made in the writing process")
    body: Body
    head: Head
