"""Which of a run's retained checkpoints is meant, and reading it while the run may be retiring it."""

from collections.abc import Callable
from typing import Literal, TypeVar

from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.errors import BatonError, DamagedCheckpoint, FileMissing
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage

_Read = TypeVar("_Read")


def choose(home: Storage, step: int | Literal["best"] | None, *, error: type[BatonError]) -> CheckpointRef:
    """The newest checkpoint of a run, its best, or the one at a step.

    Args:
        home: the run's.
        step: an absolute step, "best", or None for the newest.
        error: what to raise.

    Raises:
        BatonError: `error`, if the run has no such checkpoint any more; says which ones it has.
        RunLogError: the log cannot be read.
    """
    head = RunLog(home).head()
    if head is None:
        raise error(f"{home.uri}: no run is there")
    if step == "best":
        if head.best is None:
            raise error(
                f"{home.uri} has no best checkpoint: nothing was evaluated by checkpoint.keep_best; name a step"
            )
        return head.best.checkpoint
    found = [ref for ref in head.retained if step is None or ref.step == step]
    if not found:
        asked = "checkpoint" if step is None else f"checkpoint at step {step}"
        raise error(f"{home.uri} retains no {asked}; it has: {steps_of(head)}")
    return found[-1]


def read_chosen(
    home: Storage,
    step: int | Literal["best"] | None,
    read: Callable[[CheckpointRef], _Read],
    *,
    error: type[BatonError],
) -> _Read:
    """Read a checkpoint of a run that may be training meanwhile, and retire what is being read.

    Where files are gone, the log says whether that is damage. If the checkpoint was retired, the newest or the best is
    chosen anew; one that was named by its step cannot be replaced.

    Args:
        home: the run's.
        step: as for `choose`.
        read: reads the checkpoint it is given; called again, with another one, if that was retired meanwhile.
        error: what to raise where the run has no such checkpoint, or no longer.

    Raises:
        BatonError: `error`.
        DamagedCheckpoint: what the log retains is damaged.
    """
    ref = choose(home, step, error=error)
    while True:
        try:
            return read(ref)
        except (DamagedCheckpoint, FileMissing) as fault:
            head = RunLog(home).require_head()
            if ref in head.retained:
                raise
            if isinstance(step, int):
                raise retired_meanwhile(home, head, ref, error=error) from fault
            ref = choose(home, step, error=error)


def retired_meanwhile(home: Storage, head: Head, ref: CheckpointRef, *, error: type[BatonError]) -> BatonError:
    """What is said of a checkpoint that was named by its step, and is no longer there."""
    return error(
        f"{home.uri}: the checkpoint at step {ref.step} was retired while it was being read, since the run went on; it "
        f"now has: {steps_of(head)}. Name one of these steps, or none for the newest"
    )


def steps_of(head: Head) -> str:
    """The steps of the checkpoints that are retained, in words."""
    return ", ".join(str(ref.step) for ref in head.retained) or "none"
