"""Select one of a run's retained checkpoints, and read it while the run may be retiring it."""

from collections.abc import Callable
from typing import Literal, TypeVar

from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Head
from baton.tasks.foundation.errors import BatonError, DamagedCheckpoint, FileMissing
from baton.tasks.foundation.log.history import restorable
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage

_Read = TypeVar("_Read")


def select_checkpoint(home: Storage, step: int | Literal["best"] | None, *, error: type[BatonError]) -> CheckpointRef:
    """Select the newest checkpoint of a run, its best, or the one at a step.

    Args:
        step: an absolute step, "best", or None for the newest.
        error: the class of error to raise.

    Raises:
        BatonError: `error`, if the run does not retain such a checkpoint; lists those it retains.
        RunLogError: the log cannot be read.
    """
    log = RunLog(home)
    head = log.head()
    if head is None:
        raise error(f"{home.uri}: no run is there")
    if step == "best":
        if head.best is None:
            raise error(
                f"{home.uri} has no best checkpoint: nothing was evaluated by checkpoint.keep_best; name a step, or "
                "none for the newest"
            )
        return head.best.checkpoint
    found = [ref for ref in head.retained if step is None or ref.step == step]
    if not found:
        found = [ref for ref in restorable(log, head) if step is None or ref.step == step]
    if not found:
        wanted = "checkpoint" if step is None else f"checkpoint at step {step}"
        raise error(f"{home.uri} retains no {wanted}; it has: {restorable_steps(log, head)}")
    return found[-1]


def read_selected(
    home: Storage,
    step: int | Literal["best"] | None,
    read: Callable[[CheckpointRef], _Read],
    *,
    error: type[BatonError],
) -> _Read:
    """Select a checkpoint and read it, while the run may be training and retiring checkpoints.

    If files are gone, the log says whether they were retired or are damaged. If the newest or the best was retired, the
    new one is read. A checkpoint selected by its step has no replacement.

    Args:
        step: as for `select_checkpoint`.
        read: reads the checkpoint it is given; called again with another one if that was retired meanwhile.
        error: the class of error to raise if the run does not retain such a checkpoint, or no longer does.

    Returns:
        What `read` returns.

    Raises:
        BatonError: `error`.
        DamagedCheckpoint: a retained checkpoint is damaged.
    """
    ref = select_checkpoint(home, step, error=error)
    while True:
        try:
            return read(ref)
        except (DamagedCheckpoint, FileMissing) as fault:
            log = RunLog(home)
            if ref in restorable(log, log.require_head()):
                raise
            if isinstance(step, int):
                raise retired_while_read(log, ref, error=error) from fault
            ref = select_checkpoint(home, step, error=error)


def retired_while_read(log: RunLog, ref: CheckpointRef, *, error: type[BatonError]) -> BatonError:
    """The error for a checkpoint that was selected by its step and retired while it was being read."""
    return error(
        f"{log.home.uri}: the checkpoint at step {ref.step} was retired while it was being read, because the run went "
        f"on; it now has: {restorable_steps(log, log.require_head())}. Name one of these steps, or none for the newest"
    )


def restorable_steps(log: RunLog, head: Head) -> str:
    """The steps of the checkpoints that can be restored, separated by commas; "none" if there are none."""
    return ", ".join(str(ref.step) for ref in restorable(log, head)) or "none"
