"""Entries of the run log. Each has the folded state, so reading the newest entry is enough.

What a training segment was asked for and gave is here too, because a commit holds its rows and its times.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field

from baton.tasks.foundation.contracts.base import AttemptId, CheckpointPath, Contract, DatasetPath
from baton.tasks.foundation.contracts.checkpoint import CarriedState, CheckpointRef, WeightsReport
from baton.tasks.foundation.contracts.data_spec import SetName
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.identity import AS_IDENTITY
from baton.tasks.foundation.contracts.run_spec import EpochLength, KeepBest, PlainValue, RunSpec
from baton.tasks.foundation.text import counted

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
    learning_rate: float | None = Field(default=None, description="what the optimizer uses next; None: not known")


class LoggedValues(Contract):
    """Plain values that callbacks added to `logs` at the end of an epoch; they are no metrics, and decide nothing."""

    step: int = Field(ge=0)
    on: Literal["row", "evaluation"] = Field(description="what ended the epoch there, and what they belong to")
    values: dict[str, PlainValue]

    def numbers(self, name: str) -> list[tuple[int, float]]:
        """The step and a value that is a number; nothing if it is none, or is not there."""
        value = self.values.get(name)
        return [(self.step, float(value))] if isinstance(value, int | float) and not isinstance(value, bool) else []


_AGREED = "sha256 of the settings, code and versions that several hosts compared before; empty for a single host"
_PARTIAL = "the metrics since the newest row, as they are at the commit; no row. None: the commit is at a row"


class HostSteps(Contract):
    """What the steps of an interval of a few seconds took of one host. All seconds are per step."""

    step: int = Field(ge=1, description="the last step of the interval")
    steps: int = Field(ge=1)
    step_seconds: float = Field(ge=0)
    input_wait_seconds: float = Field(ge=0, description="part of step_seconds: waiting for the next batch")
    processor_seconds: float | None = Field(
        default=None,
        ge=0,
        description="that the threads which train used or waited for, of all processors, and longer by the share of "
        "time in which the process was stopped; None: not known",
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
    intervals: tuple[HostSteps, ...] = Field(
        default=(), description="the newest intervals since the previous commit, at most 12; none with one host"
    )

    @property
    def step_seconds(self) -> float:
        """Seconds of one step, including the wait for input; 0 without steps."""
        return self.train_seconds / self.steps if self.steps else 0.0

    @property
    def input_wait_share(self) -> float:
        """Share of the training loop spent waiting for input, in [0, 1]."""
        return self.input_wait_seconds / self.train_seconds if self.train_seconds > 0 else 0.0


class TracedStep(Contract):
    """The train step as a process traced it. Processes in the same circumstances should trace the same graph."""

    fingerprint: str = Field(description="digest of the traced graph")
    circumstances: str = Field(description="digest of devices, replicas, versions and the run's identity")
    structure: str = Field(description="digest of the traced graph without the values of its constants")
    contents: str = Field(
        description="number of the constants and captured values of the graph, then a digest of each; of several "
        "neighbors together where there are more than 32",
    )


class SegmentRequest(Contract):
    """Train from a committed checkpoint to an absolute step."""

    format: Literal[1] = 1
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

    format: Literal[1] = 1
    staged: CheckpointRef | None
    parent: CheckpointPath = Field(description="path of the checkpoint that `staged` was trained from")
    exit_reason: ExitReason
    history: tuple[MetricRow, ...]
    partial: MetricRow | None = Field(default=None, description=_PARTIAL)
    examples: int = Field(ge=0, description="examples that went through train_step")
    seconds: dict[str, FiniteSeconds] = Field(description="wall-clock seconds of the stage, by cause")
    workers: tuple[WorkerStats, ...] = ()
    traced: TracedStep | None = None
    logged: tuple[LoggedValues, ...] = ()
    in_flight: CheckpointRef | None = Field(
        default=None, description="the checkpoint that the process is still writing; only within this process"
    )

    read: tuple[CheckpointPath, ...] = Field(
        default=(), description="checkpoints that the process has read whole; the commit says it"
    )
    agreed: str = Field(default="", description=_AGREED)

    def with_staged(self, staged: CheckpointRef) -> "SegmentResult":
        """The result once the checkpoint in flight is staged."""
        return self.model_copy(update={"staged": staged, "in_flight": None})

    @classmethod
    def superseded(cls, request: SegmentRequest) -> "SegmentResult":
        """The result of a segment that was not trained, because its start is no longer the tip."""
        return cls(staged=None, parent=request.start.path, exit_reason="superseded", history=(), examples=0, seconds={})


Identity = Annotated[Mapping[str, Any], *AS_IDENTITY]
# Of a process; some systems do not say them.
_ENVIRONMENT_OF_PROCESS = ("processor", "cpu_features", "variables")
_READ = "retained checkpoints that the writer has read whole after their commit, and no entry says"
BORDER_REASONS: frozenset[str] = frozenset({"initialized", "forked", *get_args(BorderReason)})


class KerasConfig(Contract):
    """Keras's configuration, as keras.json has it."""

    epsilon: float
    floatx: Literal["bfloat16", "float16", "float32", "float64"]
    image_data_format: Literal["channels_first", "channels_last"]


class Environment(Contract):
    """What the bits of training depend on besides the identity.

    Thread counts, the hash seed and Keras's configuration are set again on every attempt.
    """

    accelerator: str
    replicas: int = Field(ge=1)
    hosts: int = Field(default=1, ge=1, description="machines that feed the replicas, each with one process")
    servers: int = Field(default=0, ge=0, description="TensorFlow servers of a TPU slice, which have the replicas")
    intra_op_threads: int = Field(ge=1)
    inter_op_threads: int = Field(ge=1)
    versions: dict[str, str]
    deterministic: bool = Field(default=False, description="whether TensorFlow used only deterministic operations")
    hash_seed: int | None = Field(
        default=None,
        ge=0,
        description="PYTHONHASHSEED of the process that began the run, which all others have; None: not known",
    )
    processor: str | None = Field(default=None, description="its name, family, model and stepping; None: not known")
    cpu_features: str | None = Field(
        default=None, description="instruction sets by which libraries choose their kernels; None: not known"
    )
    variables: dict[str, str] | None = Field(
        default=None,
        description="environment variables by which TensorFlow and its libraries choose kernels; None: not known",
    )
    keras: KerasConfig | None = Field(
        default=None, description="what Keras had read before the run's code was imported; None: not known"
    )

    @property
    def devices(self) -> str:
        """Replicas, and the hosts or servers that have them, in words."""
        words = f"{self.accelerator}, {counted(self.replicas, 'replica')}"
        words += f" on {self.hosts} hosts" if self.hosts > 1 else ""
        return f"{words} on {counted(self.servers, 'TensorFlow server')}" if self.servers else words

    def in_run_of(self, recorded: "Environment") -> "Environment":
        """This environment of a process, as that of a run that began with `recorded`.

        Its hash seed and Keras's configuration are the run's, and what the run's log does not know stays unknown.
        """
        of_run = {"hash_seed": recorded.hash_seed, "keras": recorded.keras}
        unknown = {key: None for key in _ENVIRONMENT_OF_PROCESS if getattr(recorded, key) is None}
        return self.model_copy(update={**of_run, **unknown})

    def facts(self) -> dict[str, object]:
        """All values, each under a name of its own, as `version of numpy`; without those that are not known."""
        values = self.model_dump(exclude={"versions", "variables", "keras"}, exclude_none=True)
        values |= {f"version of {name}": text for name, text in self.versions.items()}
        values |= self.variables or {}
        if self.keras is not None:
            values |= {f"{key} of Keras": value for key, value in self.keras.model_dump().items()}
        return values

    def changes_to(self, now: "Environment") -> dict[str, tuple[object, object]]:
        """The name of each value that differs in another environment, with both values; "none" where there is none."""
        before, after = self.facts(), now.facts()
        names = dict.fromkeys([*after, *before])
        values = {name: (before.get(name, "none"), after.get(name, "none")) for name in names}
        return {name: (old, new) for name, (old, new) in values.items() if old != new}


class Lineage(Contract):
    """The checkpoint of another run that this run was forked from."""

    home: str = Field(description="address of the other run's home at the time of the fork")
    path: CheckpointPath
    step: int = Field(ge=0)
    state_digest: str
    entry: int = Field(ge=0, description="number of the entry in the other run's log that committed it")
    parent: "Lineage | None" = Field(default=None, description="what the other run was forked from")

    @property
    def generations(self) -> "tuple[Lineage, ...]":
        """This one, what the other run was forked from, and so on."""
        found, each = [self], self.parent
        while each is not None:
            found.append(each)
            each = each.parent
        return tuple(found)

    def nearest(self, most: int) -> "Lineage":
        """The same without what is more than `most` generations away, itself included."""
        kept: Lineage | None = None
        for each in reversed(self.generations[:most]):
            kept = each.model_copy(update={"parent": kept})
        return self if kept is None else kept


class UnfinishedFork(Contract):
    """`fork.json`: what a home without a log is about to become a fork of."""

    format: Literal[1] = 1
    lineage: Lineage


class Origin(Contract):
    """The first entry: the identity of the run."""

    kind: Literal["origin"] = "origin"
    forked_from: Lineage | None = None
    skipped_batches: int = Field(default=0, ge=0, description="batches that the other run had skipped before the fork")
    identity: Identity = Field(description="identity keys of the run, see contracts/identity.py")
    environment: Environment


class Commit(Contract):
    """A checkpoint became the tip."""

    kind: Literal["checkpoint"] = "checkpoint"
    checkpoint: CheckpointRef
    parent: CheckpointPath | None = Field(description="path of the checkpoint that training started from")
    exit_reason: ExitReason | Literal["initialized", "forked"]
    history: tuple[MetricRow, ...] = ()
    partial: MetricRow | None = Field(default=None, description=_PARTIAL)
    examples: int = 0
    seconds: dict[str, FiniteSeconds] = Field(default_factory=dict)
    workers: tuple[WorkerStats, ...] = Field(default=(), description="one per host, in order of the hosts")
    traced: TracedStep | None = Field(default=None, description="the train step as the committing process traced it")
    initialized_from: WeightsReport | None = Field(default=None, description="at step 0: what init.weights loaded")
    read: tuple[CheckpointPath, ...] = Field(default=(), description=_READ)
    target: int | None = Field(default=None, description="the step to train to; informational; None: not known")
    logged: tuple[LoggedValues, ...] = Field(
        default=(), description="what callbacks logged at the evaluation of the parent, and at the rows"
    )
    metadata: dict[str, PlainValue] | None = Field(
        default=None, description="of the run file; None: as in the commit before, or none at the first"
    )
    agreed: str = Field(default="", description=_AGREED)

    @property
    def shown_row(self) -> MetricRow | None:
        """What is shown of the training: its newest row, or, without one, the partial row; None if it has neither."""
        return self.history[-1] if self.history else self.partial

    @property
    def ends_a_segment(self) -> bool:
        """Whether a segment, or the part of one that was stopped, ends here; not for step 0, forks and intervals."""
        return self.checkpoint.step > 0 and self.exit_reason not in {"forked", "interval"}

    @classmethod
    def of(cls, result: SegmentResult, *, target: int | None) -> "Commit":
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
            partial=result.partial,
            examples=result.examples,
            seconds=result.seconds,
            workers=result.workers,
            traced=result.traced,
            logged=result.logged,
            read=result.read,
            agreed=result.agreed,
            target=target,
        )


class Retained(Contract):
    """A checkpoint that can be restored, and what retention and evaluation ask about it."""

    ref: CheckpointRef
    evaluated: bool = False
    tested: bool = Field(default=False, description="evaluated on the test set")
    border: bool = Field(default=False, description="it lies on a segment border, where a rewind may go back to")
    read: bool = Field(default=False, description="a restore or an evaluation has read it whole after its commit")


class Quarantine(Contract):
    """A retained checkpoint is damaged. If it is the tip, the newest one before it becomes the tip."""

    kind: Literal["quarantine"] = "quarantine"
    path: CheckpointPath
    reason: str
    adopted: Retained | None = Field(
        default=None, description="the new tip, if it is one that was kept for good: it comes back into the head"
    )


class Retire(Contract):
    """Checkpoints are no longer needed (`paths`), or their files have been deleted (`deleted`).

    Others are kept for good, and nothing decides about them any more: they leave the head (`kept`).
    """

    kind: Literal["retire"] = "retire"
    paths: tuple[CheckpointPath, ...]
    deleted: tuple[CheckpointPath, ...]
    kept: tuple[Retained, ...] = Field(default=(), description="found in the history from now on")


class Evaluation(Contract):
    """Metrics of a committed checkpoint. An entry of this kind has those on the validation set."""

    format: Literal[1] = 1  # of the answer of a stage
    kind: Literal["evaluation"] = "evaluation"
    checkpoint: CheckpointRef
    metrics: dict[str, float]
    examples: int
    seconds: FiniteSeconds
    keep_best: KeepBest | None = Field(description="checkpoint.keep_best at the time of the evaluation")
    on: SetName = Field(
        default="validation",
        description="the set; test only in the answer of the stage, the log has EvaluationOnTest",
    )
    logged: dict[str, PlainValue] = Field(
        default_factory=dict, description="what callbacks logged at it, if no commit follows that could have it"
    )
    read: tuple[CheckpointPath, ...] = Field(default=(), description=_READ)


class EvaluationOnTest(Contract):
    """Metrics of a committed checkpoint on the test set. They decide nothing.

    It is another kind of entry, so that nothing that reads evaluations takes it for one on the validation set.
    """

    kind: Literal["test"] = "test"
    checkpoint: CheckpointRef
    metrics: dict[str, float]
    examples: int
    seconds: FiniteSeconds
    content_digest: str = Field(description="of the test set")
    folder: DatasetPath | None = Field(default=None, description="datasets/<digest> of the test set")
    read: tuple[CheckpointPath, ...] = Field(default=(), description=_READ)


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
    identity: Identity | None = Field(default=None, description="the new identity; None: unchanged")
    accepted: tuple[str, ...] = Field(default=(), description="the identity keys whose change was accepted")
    variables: CarriedState | None = Field(
        default=None, description="what became of the tip's variables; None: the model's are the same, or it has no tip"
    )


Body = Annotated[
    Origin | Commit | Quarantine | Rewind | Retire | Evaluation | EvaluationOnTest | Finish | Change,
    Field(discriminator="kind"),
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


class SetIn(Contract):
    """Which entry set the identity or the environment."""

    entry: int = Field(ge=0, description="its number")
    digest: str = Field(pattern=r"^[0-9a-f]{32}$", description="sha256 of the JSON with sorted keys, the first digits")


class _State(Contract):
    """The folded state, without what is as large as the model."""

    model_config = ConfigDict(populate_by_name=True)

    base: int = Field(ge=0, description="number of the entry that last moved the tip or changed the run's identity")
    commits: int = Field(ge=0, description="checkpoints committed so far")
    checkpoints: tuple[Retained, ...] = Field(
        default=(), alias="retained", description="in order of commit; the last is the tip"
    )
    kept_for_good: int = Field(default=0, ge=0, description="how many checkpoints are named by the history alone")
    retired: tuple[Retired, ...] = ()
    quarantined: tuple[CheckpointRef, ...] = ()
    best: Best | None = None
    skipped_batches: int = Field(default=0, ge=0)
    rewinds: int = Field(default=0, ge=0, description="rewinds in a row without getting past `blown_up_at`")
    blown_up_at: int | None = None
    finished: Finished | None = Field(default=None, description="set if the run ended before its target")

    @property
    def retained(self) -> tuple[CheckpointRef, ...]:
        """The checkpoints that can be restored, in order of commit."""
        return tuple(each.ref for each in self.checkpoints)

    @property
    def tip(self) -> CheckpointRef | None:
        """The checkpoint that the run continues from: the last of them."""
        return self.checkpoints[-1].ref if self.checkpoints else None

    @property
    def evaluated(self) -> tuple[str, ...]:
        """Paths of those that have been evaluated."""
        return tuple(each.ref.path for each in self.checkpoints if each.evaluated)

    @property
    def tested(self) -> tuple[str, ...]:
        """Paths of those that have been evaluated on the test set."""
        return tuple(each.ref.path for each in self.checkpoints if each.tested)

    @property
    def borders(self) -> tuple[str, ...]:
        """Paths of those at segment borders."""
        return tuple(each.ref.path for each in self.checkpoints if each.border)

    @property
    def read(self) -> tuple[str, ...]:
        """Paths of those that were read whole after their commit."""
        return tuple(each.ref.path for each in self.checkpoints if each.read)


class Head(_State):
    """The folded state of the newest entry, with the identity and the environment that other entries may have set."""

    format: Literal[1] = 1  # of the answer of a stage
    number: int = Field(ge=0, description="number of the entry that has this state")
    identity_in: SetIn
    environment_in: SetIn
    identity: Identity
    environment: Environment


class StoredHead(_State):
    """The folded state as a file has it: of constant size, whatever the model and however long the run."""

    identity: SetIn
    environment: SetIn


class WeightsOrigin(Contract):
    """Where some of the initial weights are from."""

    source: str
    place: str
    variables: int = Field(ge=0)


class LastEvaluation(Contract):
    """The evaluation of the newest evaluated checkpoint in the tip's lineage."""

    step: int = Field(ge=0)
    path: CheckpointPath
    metrics: dict[str, float]
    examples: int

    @classmethod
    def of(cls, evaluation: Evaluation | EvaluationOnTest) -> "LastEvaluation":
        """Return what is carried of an evaluation."""
        ref = evaluation.checkpoint
        return cls(step=ref.step, path=ref.path, metrics=evaluation.metrics, examples=evaluation.examples)


class Totals(Contract):
    """What the whole history up to an entry adds up to, along the lineage of the tip.

    Nothing is decided by it. It saves readers of the newest entry from reading all others.
    """

    began: str = Field(description="time of the first entry")
    forked_from: Lineage | None = None
    initialized_from: tuple[WeightsOrigin, ...] = ()
    segments: int = Field(default=0, ge=0, description="committed segments, with parts of segments that were stopped")
    row: MetricRow | None = Field(default=None, description="the newest metric row")
    partial: MetricRow | None = Field(default=None, description="of the tip: the metrics since that row; no row")
    evaluation: LastEvaluation | None = None
    test: LastEvaluation | None = Field(default=None, description="the same on the test set")
    undone_seconds: FiniteSeconds = Field(
        default=0.0, description="of training that was committed, and is not in the lineage"
    )
    epoch: EpochLength | None = Field(default=None, description="None: not known")
    last_commit: str | None = Field(default=None, description="time of the newest commit")
    target: int | None = Field(
        default=None, description="the step to train to, by the newest commit that says it; None if none does"
    )
    workers: tuple[WorkerStats, ...] = Field(
        default=(),
        description="sums over the commits since the hosts last changed; losses of the newest commit, newest intervals",
    )
    metadata: dict[str, PlainValue] = Field(default_factory=dict, description="of the run file at the newest commit")
    logged: LoggedValues | None = Field(default=None, description="the newest values that callbacks logged")


class _EntryFields(Contract):
    format: Literal[1] = 1
    number: int = Field(ge=0)
    time: str = Field(description="UTC, ISO 8601; informational, decides nothing")
    attempt: AttemptId = Field(description="the writer's attempt id: a uuid4 made in the writing process")
    body: Body
    totals: Totals | None = Field(default=None, description="None: the history has to be read")


class Entry(_EntryFields):
    """An entry of the log."""

    head: Head


class StoredEntry(_EntryFields):
    """One file of the log."""

    model_config = ConfigDict(title="Entry")

    head: StoredHead
