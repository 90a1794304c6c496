"""An attempt: one process that works on a run; its heartbeat, progress, and seconds by cause."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from baton.tasks.foundation.contracts.base import AttemptId, CheckpointPath, Contract
from baton.tasks.foundation.contracts.log_entry import Head

# Time without a recorded cause. It is always shown.
UNATTRIBUTED = "unattributed"
# From the end of the work to the end of the process.
SHUT_DOWN = "shut-down"
# Training that waits for a batch.
INPUT_WAIT = "input wait"

# Waiting for a remote stage, whose own attempt records where its time goes.
LAUNCH = "launch"

# Why an attempt ended that made no progress any more, see stop.hang_seconds; its `traceback` has all threads' stacks.
HUNG = "hung"

# The possible causes of a process's time. Only `train` is productive.
CAUSES = (
    "start-up",
    LAUNCH,
    "prepare-data",
    "build",
    "restore",
    "compile",
    "train",
    INPUT_WAIT,
    "stage",
    "commit",
    "evaluate",
    "report",
    SHUT_DOWN,
    UNATTRIBUTED,
)


def utc_time(text: str) -> datetime:
    """Parse an ISO 8601 time with a time zone, and return it in UTC.

    Raises:
        ValueError: the text is not such a time.
    """
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    try:
        return time.astimezone(UTC)
    except OverflowError as error:
        raise ValueError(f"{text} is outside the years 1 to 9999") from error


def _is_time(text: str) -> str:
    utc_time(text)
    return text


Time = Annotated[str, AfterValidator(_is_time)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CommitPaceRecord(Contract):
    """How often an attempt commits within a segment, with `checkpoint.every_seconds: auto`, and why."""

    every_seconds: Seconds = Field(description="time between two commits")
    cost_seconds: Seconds = Field(description="what a commit takes from the training")
    between_losses_seconds: Seconds = Field(description="mean time between losses of a process")


class UsageSample(Contract):
    """What a process used since the sample before it, or since its start."""

    seconds: Seconds = Field(description="since the process started, at the end of the sample")
    cpu: Seconds = Field(description="processors in use, on average, without child processes")
    memory_bytes: int = Field(ge=0, description="resident memory, the most that was seen")


# The most samples of a record: when there are more, each two neighbors become one.
MOST_SAMPLES = 60


def with_sample(samples: Sequence[UsageSample], newest: UsageSample) -> tuple[UsageSample, ...]:
    """Return the samples with one more; if there are too many, each covers the time of two."""
    samples = [*samples, newest]
    if len(samples) <= MOST_SAMPLES:
        return tuple(samples)
    began = [0.0, *(each.seconds for each in samples)]
    lengths = [each.seconds - start for each, start in zip(samples, began, strict=False)]
    merged = [
        UsageSample(
            seconds=second.seconds,
            cpu=(first.cpu * before + second.cpu * after) / (before + after) if before + after > 0 else second.cpu,
            memory_bytes=max(first.memory_bytes, second.memory_bytes),
        )
        for first, second, before, after in zip(samples[::2], samples[1::2], lengths[::2], lengths[1::2], strict=False)
    ]
    return (*merged, samples[-1]) if len(samples) % 2 else tuple(merged)


class AttemptRecord(Contract):
    """`attempts/<attempt>.json`, rewritten at every heartbeat. Informational: no commit depends on it."""

    format: Literal[1] = 1
    attempt: AttemptId = Field(description="a uuid4 made in this process")
    host: str
    pid: int
    process: str = Field(
        default="", description="identifies the process on its machine, see foundation/machine/processes.py"
    )
    began: Time = Field(description="when the process started; UTC, ISO 8601, for display and sorting")
    alive: Time = Field(description="time of the last heartbeat; UTC, ISO 8601")
    mark: str = Field(description="progress of the run when this attempt first read its log, see mark_of")
    from_step: int = Field(ge=0, description="step of the tip at that time")
    step: int = Field(ge=0, description="last step reached in memory")
    committed_step: int = Field(ge=0, description="last step that this attempt committed, or from_step")
    doing: str = Field(description="cause of the time that is passing now")
    seconds: dict[str, Seconds] = Field(description="wall-clock seconds since the process started, by cause")
    uncommitted_seconds: Seconds = Field(description="seconds of `train` that are not committed yet")
    discarded_seconds: Seconds = Field(
        default=0.0, description="seconds of `train` that this process discarded by going back to a checkpoint"
    )
    ended: str | None = Field(default=None, description="why it ended; None: it is running, or was killed or crashed")
    message: str | None = Field(default=None, description="the error that ended it")
    traceback: str | None = Field(
        default=None,
        description="the whole traceback of that error, with the frames that its message leaves out; the stacks of all "
        "threads if it hung",
    )
    within: AttemptId | None = Field(
        default=None, description="for the attempt of a remote stage: the attempt that waits for it"
    )
    staged: CheckpointPath | None = Field(
        default=None, description="path of the checkpoint that this attempt staged for another process to commit"
    )
    commit_pace: CommitPaceRecord | None = Field(
        default=None, description="how often it commits within a segment; None: not known yet, or not `auto`"
    )
    last_lines: tuple[str, ...] = Field(
        default=(), description="of standard output and standard error, what Python wrote; without secrets"
    )
    usage: tuple[UsageSample, ...] = Field(default=(), description="processor and memory over time, oldest first")
    afresh: bool = Field(default=False, description="the user asked to ignore all earlier attempts (--try-again)")

    @property
    def wall_seconds(self) -> float:
        """Seconds from the start of the process to its last heartbeat."""
        return sum(self.seconds.values())


def attempt_path(attempt: str) -> str:
    """Return the path of an attempt's record, relative to the run's home."""
    return f"attempts/{attempt}.json"


def mark_of(head: Head) -> str:
    """Return the progress of a run: the tip's step, and whether the tip is evaluated.

    The mark has the step, not the path or entry number. If a damaged tip is quarantined and retrained again and again,
    every attempt sees a new path and a higher entry number, but the same step. Retirement, environment changes and
    rewinds do not change the mark. Only the tip's evaluation counts, because the number of known evaluations shrinks
    when old checkpoints are retired.
    """
    if head.tip is None:
        return "none"
    return f"{head.tip.step} evaluated" if head.tip.path in head.evaluated else f"{head.tip.step}"
