"""One training of a run file for the proof: in scratch storage, to an absolute step, in segments of equal length."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.contracts.schedule import callbacks_act_at_evaluations
from tasks.foundation.errors import InvalidInput
from tasks.foundation.storage.local import LocalStorage

# Four segments: a warm process crosses the first border, the kill comes at the second, a new process trains the rest.
_SEGMENTS = 4
_FEWEST_STEPS = 4

# These settings could cut, stop or evaluate at other steps. None of them changes the bits.
_SWITCHED_OFF = (
    "train.epochs=null",
    "train.segment_epochs=null",
    "train.segment_seconds=null",
    "train.stop_after_seconds=null",
    "train.on_blowup=stop",
    "train.blowup_factor=null",
    "checkpoint.every_seconds=null",
    "checkpoint.keep_every_steps=null",
    "evaluate.every_steps=null",
    "evaluate.every=null",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A separate run in scratch storage.

    Attributes:
        name: name of the run, and of its processes' output files.
        storage: the storage root; trials with the same root share its datasets.
        file: the run file.
        overrides: the user's overrides.
        target: train.steps; more than `steps`, so that no final evaluation is due.
        steps: the absolute step to train to.
        segment_steps: length of a segment in steps.
        callback_settings: overrides for callbacks that act at evaluations.
    """

    name: str
    storage: Path
    file: Path
    overrides: tuple[str, ...]
    target: int
    steps: int
    segment_steps: int
    callback_settings: tuple[str, ...] = ()

    @property
    def home(self) -> LocalStorage:
        """The run's home in the scratch storage."""
        return LocalStorage(self.storage / self.name)

    def arguments(self) -> list[str]:
        """Return the arguments for `flows.without_prefect`. The trial's settings come last and override the user's."""
        settings = [
            *self.overrides,
            f"run={self.name}",
            f"storage={json.dumps(os.fspath(self.storage))}",
            f"train.steps={self.target}",
            f"train.segment_steps={self.segment_steps}",
            f"train.log_every_steps={log_every_steps(self.steps, cut_length(self.steps))}",
            *_SWITCHED_OFF,
            *self.callback_settings,
        ]
        options = [word for setting in settings for word in ("--set", setting)]
        return [os.fspath(self.file), *options, "--until-step", str(self.steps)]


def trial_of(
    run: RunFile, overrides: tuple[str, ...], *, name: str, storage: Path, steps: int, segment_steps: int
) -> Trial:
    """Make a trial of a run file.

    Args:
        run: the run file.
        overrides: the user's overrides.
        name: name of the trial's run.
        storage: the storage root.
        steps: the absolute step to train to.
        segment_steps: length of a segment in steps.
    """
    return Trial(
        name=name,
        storage=storage,
        file=run.path,
        overrides=overrides,
        target=max(run.spec.train.known_target or 0, steps + 1),
        steps=steps,
        segment_steps=segment_steps,
        callback_settings=(f"evaluate.every_steps={steps // 2}",)
        if run.spec.train.callbacks and callbacks_act_at_evaluations(run.spec)
        else (),
    )


def require_enough_steps(steps: int) -> None:
    """Refuse a proof that is too short for cuts and a kill.

    Raises:
        InvalidInput: fewer than 4 steps.
    """
    if steps < _FEWEST_STEPS:
        raise InvalidInput(f"--steps = {steps} is too few for cuts and a kill; use at least {_FEWEST_STEPS}")


def cut_length(steps: int) -> int:
    """Return the steps in each segment of the cut trial: an odd number, about a quarter of all steps."""
    return steps // _SEGMENTS | 1


def log_every_steps(steps: int, segment_steps: int) -> int:
    """Return the steps between two rows of metrics: the smallest number that divides neither argument.

    Logging resets the metrics. At the cuts and at the end they should not be zero, or comparing them would prove
    nothing.
    """
    every = 2
    while steps % every == 0 or segment_steps % every == 0:
        every += 1
    return every
