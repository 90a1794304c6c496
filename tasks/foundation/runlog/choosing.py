"""Which of a run's retained checkpoints is meant."""

from typing import Literal

from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.errors import BatonError
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage


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
        steps = ", ".join(str(ref.step) for ref in head.retained) or "none"
        asked = "checkpoint" if step is None else f"checkpoint at step {step}"
        raise error(f"{home.uri} retains no {asked}; it has: {steps}")
    return found[-1]
