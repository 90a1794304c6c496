"""One process's try at bringing a run further: who, from where, signs of life, and where its time went."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.safe_names import AttemptId, CheckpointPath

# Time that nothing claimed. ArtifactPublisher, never hidden.
UNATTRIBUTED = "unattributed"
# From the end of the work to the end of the process.
SHUT_DOWN = "shut-down"
# Training that stood still for want of a batch.
INPUT_WAIT = "input wait"

# Waiting for a stage that runs elsewhere; its own attempt tells what that one's time goes to.
LAUNCH = "launch"

# What a process's time can go to. Only `train` is productive.
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
    """A point in time from ISO 8601.

    Raises:
        ValueError: it is none, or does not say its zone.
    """
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text} lacks its time zone")
    try:
        return time.astimezone(UTC)
    except OverflowError as fault:
        raise ValueError(f"{text} is before the first year, or after the last") from fault


def _is_time(text: str) -> str:
    utc_time(text)
    return text


Time = Annotated[str, AfterValidator(_is_time)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class AttemptRecord(Contract):
    """`attempts/<attempt>.json`, replaced at every sign of life. It informs; nothing about a commit depends on it."""

    schema_version: Literal[1] = 1
    attempt: AttemptId = Field(description="a uuid4 made in this process")
    host: str
    pid: int
    process: str = Field(default="", description="names the process on its machine, see foundation/process.py")
    began: Time = Field(description="when the process started; UTC, ISO 8601, for people and for order")
    alive: Time = Field(description="the last sign of life; UTC, ISO 8601")
    mark: str = Field(description="how far the run was when this attempt first saw its log, see mark_of")
    from_step: int = Field(ge=0, description="the tip's step then")
    step: int = Field(ge=0, description="the last step that was reached, in memory")
    committed_step: int = Field(ge=0, description="the last step that this attempt committed, or from_step")
    doing: str = Field(description="the cause that time goes to at this moment")
    seconds: dict[str, Seconds] = Field(description="wall-clock seconds since the process started, by cause")
    uncommitted_seconds: Seconds = Field(description="seconds of `train` whose work is not committed (yet)")
    discarded_seconds: Seconds = Field(
        default=0.0, description="seconds of `train` whose work this process gave up, going back to a checkpoint"
    )
    ended: str | None = Field(default=None, description="why it ended; None: it runs, or died without a word")
    message: str | None = Field(default=None, description="the error that ended it")
    within: AttemptId | None = Field(
        default=None, description="the attempt that waits for this one, which is a stage of it"
    )
    staged: CheckpointPath | None = Field(
        default=None, description="path of the checkpoint that this attempt staged and left to another to commit"
    )
    afresh: bool = Field(default=False, description="the user asked to forget the attempts before this one")

    @property
    def wall_seconds(self) -> float:
        """From the process's start to the last sign of life."""
        return sum(self.seconds.values())


def attempt_path(attempt: str) -> str:
    """Where an attempt's record lies, relative to the run's home."""
    return f"attempts/{attempt}.json"


def mark_of(head: Head) -> str:
    """How far a run is: the tip's step, and whether the tip has been evaluated.

    Steps, not paths and not numbers of entries: where a damaged tip is quarantined and trained again, over and over,
    every attempt sees a new path and a higher number, but the same step. Retiring, changes of the environment and
    rewinds leave the mark as it is. Of the evaluations only the tip's counts: how many are known shrinks whenever old
    checkpoints are retired.
    """
    if head.tip is None:
        return "none"
    return f"{head.tip.step} evaluated" if head.tip.path in head.evaluated else f"{head.tip.step}"
