"""Chooses what is executed: where a proof cuts and kills, and which committed steps an audit can execute again.

A proof trains a run file in segments of a quarter of its steps: a warm process crosses the first border, the kill comes
at the second, and a new process trains the rest. An audit executes the steps between two retained checkpoints of the
tip's lineage, with what the log says about the rows of metrics.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from baton.flows.proof.execute import Execution
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Entry, Head
from baton.tasks.foundation.contracts.run_file import RunFile
from baton.tasks.foundation.contracts.run_spec import (
    DEFAULT_LOG_STEPS,
    RunSpec,
    callbacks_act_at_evaluations,
    is_row_due,
)
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.log.history import commit_of, history_of
from baton.tasks.foundation.text import message

_SEGMENTS = 4
_FEWEST_STEPS = 4

# These settings could cut, stop or evaluate at other steps. None of them changes the bits.
_SWITCHED_OFF = (
    "stages={}",
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


def training_of(
    run: RunFile, overrides: tuple[str, ...], *, name: str, storage: Path, steps: int, segment_steps: int
) -> Execution:
    """Make an execution that trains a run file from the beginning.

    Args:
        overrides: the user's overrides; the settings of the execution come later, and win.
        steps: the absolute step to train to.
        segment_steps: length of a segment in steps.
    """
    settings = [
        *overrides,
        # More than `steps`, so that no final evaluation is due.
        f"train.steps={max(run.spec.train.known_target or 0, steps + 1)}",
        f"train.segment_steps={segment_steps}",
        f"train.log_every_steps={log_every_steps(steps, cut_length(steps))}",
        *_SWITCHED_OFF,
    ]
    if run.spec.train.callbacks and callbacks_act_at_evaluations(run.spec):
        settings.append(f"evaluate.every_steps={steps // 2}")
    return Execution(name=name, storage=storage, file=run.path, settings=tuple(settings), steps=steps)


def require_enough_steps(steps: int) -> None:
    """Refuse a proof that is too short for cuts and a kill.

    Raises:
        InvalidInput: fewer than 4 steps.
    """
    if steps < _FEWEST_STEPS:
        raise InvalidInput(f"--steps = {steps} is too few for cuts and a kill; use at least {_FEWEST_STEPS}")


def cut_length(steps: int) -> int:
    """Return the steps in each segment of the cut training: an odd number, about a quarter of all steps."""
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


Choice = Literal["sample", "last", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The steps from one retained checkpoint to the next one.

    Attributes:
        start: the checkpoint to start from.
        before: the state of the log when the training went on from `start`.
        commits: the checkpoints committed on the way, in order; the last one is retained, others may be deleted.
        rows: the steps of the metric rows logged on the way.
    """

    start: CheckpointRef
    before: Head
    commits: tuple[CheckpointRef, ...]
    rows: tuple[int, ...] = ()

    @property
    def end(self) -> CheckpointRef:
        """The retained checkpoint at its end."""
        return self.commits[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """What of a run can be executed again, and what cannot, with the reason."""

    auditable: tuple[Stretch, ...]
    left_out: tuple[str, ...]


def stretches_of(entries: Iterable[Entry]) -> Stretches:
    """Find the stretches of a run, oldest first.

    A stretch is left out if batches were skipped or the environment or identity changed on the way: its execution
    would need the checkpoint at that place. It is left out too if it was trained with another identity than the run has
    now: its execution would need the code of that time.
    """
    every = {entry.number: entry for entry in entries}
    history = history_of(every.values())
    if history.head is None:
        return Stretches(auditable=(), left_out=())
    retained = {ref.path for ref in history.restorable}
    found: list[Stretch] = []
    left_out: list[str] = []
    start: CheckpointRef | None = None
    way: list[Entry] = []
    for entry in history.commits:
        ref = commit_of(entry).checkpoint
        if start is not None:
            way.append(entry)
        if ref.path not in retained:
            continue
        if start is not None:
            heads = [every[each.number - 1].head for each in way]  # the state that each commit was trained on
            reason = _reason_against(heads, history.head)
            if reason:
                left_out.append(f"steps {start.step} to {ref.step}: {reason}")
            else:
                commits = tuple(commit_of(each).checkpoint for each in way)
                rows = tuple(row.step for each in way for row in commit_of(each).history)
                found.append(Stretch(start=start, before=heads[0], commits=commits, rows=rows))
        start, way = ref, []
    return Stretches(auditable=tuple(found), left_out=tuple(left_out))


def choose(found: Stretches, choice: Choice, *, count: int, seed: int, home: str) -> Sequence[Stretch]:
    """Choose what to execute.

    Args:
        choice: `sample` draws `count` of them with `seed`; `last` takes the newest, `all` every one.
        count: at least 1.
        seed: the same seed draws the same stretches of the same log.
        home: address of the run's home, for the error.

    Raises:
        InvalidInput: `count` is below 1, or nothing can be executed again.
    """
    if count < 1:
        raise InvalidInput(f"--sample {count} executes nothing; use at least 1")
    if not found.auditable:
        hints = [
            "retain checkpoints to start from: checkpoint.keep_last of at least 2, or checkpoint.keep_every_steps",
            *found.left_out,
        ]
        text = f"{home} retains no two checkpoints with training between them that can be executed again"
        raise InvalidInput(message(text, hints=hints))
    if choice == "all":
        return found.auditable
    if choice == "last":
        return found.auditable[-1:]
    drawn = random.Random(seed).sample(range(len(found.auditable)), min(count, len(found.auditable)))  # noqa: S311
    return [found.auditable[number] for number in sorted(drawn)]


def logged_settings(spec: RunSpec, stretch: Stretch) -> tuple[str, ...]:
    """Return overrides for what may change between attempts and is in the checkpoints: at which steps rows are.

    Each logged row resets the sums of the metrics, so that another `train.log_every_steps` gives other sums. So does
    `train.epochs` in place of `train.steps`: each epoch ends with a row.

    Args:
        spec: the run file, with the number of training examples.
        stretch: what is executed again.
    """
    steps, train = range(stretch.start.step + 1, stretch.end.step + 1), spec.train
    distances = list(dict.fromkeys(later - earlier for earlier, later in pairwise(stretch.rows)))
    found: list[dict[str, int | None]] = [{}]
    found += [{"log_every_steps": every} for every in distances]
    if train.epoch_examples is not None:
        epochs = train.epoch.period().ended_by(train.target - 1) + 1
        other = {"epochs": None, "steps": train.target} if train.epochs else {"steps": None, "epochs": epochs}
        found += [{**other, "log_every_steps": every} for every in (None, DEFAULT_LOG_STEPS, *distances)]
    for changes in found:
        then = spec.model_copy(update={"train": train.model_copy(update=changes)})
        if stretch.rows == tuple(step for step in steps if is_row_due(then, step)):
            settings: dict[str, object] = {f"train.{name}": value for name, value in changes.items()}
            if "steps" in changes:  # the default of the other unit is another one
                settings["evaluate.every"] = spec.evaluate.every
            return tuple(f"{name}={'null' if value is None else value}" for name, value in settings.items())
    return ()  # too few rows to tell, or it changed on the way


def _reason_against(heads: Sequence[Head], newest: Head) -> str:
    first = heads[0]
    for head in heads[1:]:
        if head.skipped_batches != first.skipped_batches:
            return "a rewind skipped batches on the way"
        if head.environment != first.environment:
            return "the environment changed on the way"
        if dict(head.identity) != dict(first.identity):
            return "a change of the identity was accepted on the way"
    return "a change of the identity was accepted later" if dict(first.identity) != dict(newest.identity) else ""
