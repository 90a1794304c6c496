"""One training of a run file for the proof: in scratch storage, to an absolute step, in segments of one length."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.contracts.schedule import act_at_evaluations
from tasks.foundation.errors import InvalidInput
from tasks.foundation.storage.local import LocalStorage

# Four segments: one border is crossed warm, one by a killed process, and some are left to the process after it.
_SEGMENTS = 4
_FEWEST_STEPS = 4

# What would cut, stop or evaluate on its own account. None of it decides what training computes.
_SWITCHED_OFF = (
    "train.segment_seconds=null",
    "train.stop_after_seconds=null",
    "train.on_blowup=stop",
    "train.blowup_factor=null",
    "checkpoint.every_seconds=null",
    "checkpoint.keep_every_steps=null",
    "evaluate.every_steps=null",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run of its own, named `name`, below a storage root that may hold others.

    Attributes:
        name: the run's name in the scratch storage, and that of the files that its processes write to.
        storage: the storage root; its datasets are shared by the trials that share it.
        file: the run file.
        overrides: the user's own.
        target: train.steps, beyond `steps`, so that no evaluation falls due at the end.
        steps: the absolute step to train to.
        segment_steps: length of a segment.
        acting: settings without which callbacks that act at evaluations would not act.
    """

    name: str
    storage: Path
    file: Path
    overrides: tuple[str, ...]
    target: int
    steps: int
    segment_steps: int
    acting: tuple[str, ...] = ()

    @property
    def home(self) -> LocalStorage:
        """The run's home in the scratch storage."""
        return LocalStorage(self.storage / self.name)

    def words(self) -> list[str]:
        """The arguments of `flows.without_prefect`. The trial's own settings come last, and so they win."""
        settings = [
            *self.overrides,
            f"run={self.name}",
            f"storage={json.dumps(os.fspath(self.storage))}",
            f"train.steps={self.target}",
            f"train.segment_steps={self.segment_steps}",
            f"train.log_every_steps={log_every_steps(self.steps, cut_length(self.steps))}",
            *_SWITCHED_OFF,
            *self.acting,
        ]
        words = [word for setting in settings for word in ("--set", setting)]
        return [os.fspath(self.file), *words, "--until-step", str(self.steps)]


def trial_of(
    run: RunFile, overrides: tuple[str, ...], *, name: str, storage: Path, steps: int, segment_steps: int
) -> Trial:
    """A trial of a run file to `steps`."""
    return Trial(
        name=name,
        storage=storage,
        file=run.path,
        overrides=overrides,
        target=max(run.spec.train.steps, steps + 1),
        steps=steps,
        segment_steps=segment_steps,
        acting=(f"evaluate.every_steps={steps // 2}",)
        if run.spec.train.callbacks and act_at_evaluations(run.spec)
        else (),
    )


def require_enough_steps(steps: int) -> None:
    """Refuse a proof that could not be cut in the middle.

    Raises:
        InvalidInput: fewer than 4 steps.
    """
    if steps < _FEWEST_STEPS:
        raise InvalidInput(f"--steps = {steps} leaves no room for cuts and a kill; use at least {_FEWEST_STEPS}")


def cut_length(steps: int) -> int:
    """Length of the segments of the run that is cut: odd, about a quarter of the whole."""
    return steps // _SEGMENTS | 1


def log_every_steps(steps: int, segment_steps: int) -> int:
    """Steps between two rows of metrics: few, but sums of metrics must be under way at most cuts and at the end.

    Metrics are reset when they are logged; a state in which they are all zero would show nothing about them.
    """
    every = 2
    while steps % every == 0 or segment_steps % every == 0:
        every += 1
    return every
