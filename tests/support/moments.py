"""Holds a training process at a moment of its work, so that a test interrupts it there and nowhere else.

The environment names the moment (`hold_at`). The process makes a file when it has come there, and goes on when the file
is gone. On SIGUSR1 it writes the stacks of all its threads to standard error.
"""

import faulthandler
import importlib
import os
import signal
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Literal

VARIABLE = "BATON_TEST_HOLD"
_POLL_SECONDS = 0.01
# The function of each moment: its module, and its path in there.
MOMENTS = {
    "step": ("baton.tasks.train_segment.trainer", "Trainer.run"),
    "snapshot": ("baton.tasks.train_segment.interval", "take_snapshot"),
    "upload": ("baton.tasks.foundation.checkpoint.write", "write_or_share"),
    "commit": ("baton.tasks.foundation.checkpoint.save", "commit"),
    "evaluation": ("baton.tasks.evaluate.stage", "evaluate_state"),
}
# Comes once in each process that continues a run.
RESTORE = {"restore": ("baton.tasks.train_segment.trainer", "Trainer.restore")}


def hold_at(moment: str, side: Literal["before", "after"], number: int, file: Path) -> dict[str, str]:
    """The variables of a process that holds before or after call `number` of a moment, from 1."""
    return {VARIABLE: f"{moment}:{side}:{number}:{file}"}


def hold_where_asked() -> None:
    """Hold this process where the environment says; if it says nothing, or "", nowhere."""
    asked = os.environ.get(VARIABLE)
    if asked is None:
        return
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if not asked:
        return
    moment, side, number, file = asked.split(":", 3)
    module, path = (MOMENTS | RESTORE)[moment]
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, _holding(getattr(owner, name), side, int(number), Path(file)))


def _holding(function: Callable[..., Any], side: str, number: int, file: Path) -> Callable[..., Any]:
    calls = 0

    def hold(at: str) -> None:
        if (at, calls) == (side, number):
            file.touch()
            while file.exists():
                time.sleep(_POLL_SECONDS)

    @wraps(function)
    def held(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        hold("before")
        result = function(*arguments, **options)
        hold("after")
        return result

    return held
