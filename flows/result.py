"""The goal of a command; what it reached, read from the log; and what it leaves in the home: curves, CSV files, report.

A command aims at an absolute step, so that repeating it is harmless. What it leaves is written when the work is
committed: whatever cannot be written is a warning, and the next command writes it.
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

from pydantic import Field

from baton.flows.facts import RunFacts
from baton.flows.opened_run import OpenedRun, RunHome
from baton.tasks.evaluate.report.page import PAGE, reported_entry, write_report
from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.log_entry import STOP_REASONS, Commit, Entry, Head, StopReason
from baton.tasks.foundation.contracts.run_spec import RunSpec, needs_examples
from baton.tasks.foundation.errors import BatonError, RunFileError, RunLogError, StorageError
from baton.tasks.foundation.log.appends import evaluation_due, is_test_due
from baton.tasks.foundation.machine.cluster import is_chief
from baton.tasks.foundation.telemetry.events import Note, Sink
from baton.tasks.foundation.telemetry.tensorboard import write_curves
from baton.tasks.foundation.telemetry.trackers import tracking, write_csv_files
from baton.tasks.foundation.text import option

# After these exit reasons the machine may disappear within seconds.
_MACHINE_ENDS = frozenset({"sigterm", "preempted", "maintenance"})
CommandEnd = (
    Literal["complete", "until_step", "max_segments", "nothing_to_do", "finished_early", "cancelled"] | StopReason
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal of a command: how far it trains, and when it stops earlier.

    Attributes:
        until_step: the absolute step to train to; None: the run file's target.
        max_segments: stop after this many segments; None: no limit.
        max_seconds: stop after this many seconds; None: no limit.
        cuts: steps where a segment ends in addition to the run file's, so that they are committed.
    """

    until_step: int | None
    max_segments: int | None
    max_seconds: float | None
    cuts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        *,
        until_step: int | None = None,
        max_segments: int | None = None,
        max_seconds: float | None = None,
        cuts: Sequence[int] = (),
    ) -> "Goal":
        """Make the goal of a command from its run file and its options.

        Args:
            until_step: the absolute step to train to; None: train.steps, or the end of train.epochs.
            max_segments: stop after this many segments; None: no limit.
            max_seconds: stop after this many seconds; None: train.stop_after_seconds.
            cuts: steps to commit in addition.

        Raises:
            RunFileError: a limit is below 1, `max_seconds` is not positive and finite, or the step is beyond
                the target.
        """
        for name, value in (("until-step", until_step), ("max-segments", max_segments)):
            if value is not None and value < 1:
                raise RunFileError(option(name) + f" = {value} must be at least 1")
        if max_seconds is not None and not (max_seconds > 0 and math.isfinite(max_seconds)):
            raise RunFileError(option("max-seconds") + f" = {max_seconds} must be more than 0, and finite")
        goal = cls(
            until_step=until_step,
            max_segments=max_segments,
            max_seconds=spec.train.stop_after_seconds if max_seconds is None else max_seconds,
            cuts=tuple(cuts),
        )
        goal.require_within(spec)
        return goal

    def require_within(self, spec: RunSpec) -> None:
        """Check that the goal is not beyond the run file's target, if that is known.

        Raises:
            RunFileError: it is.
        """
        target, train = spec.train.known_target, spec.train
        if self.until_step is None or target is None or self.until_step <= target:
            return
        if train.epochs is None:
            beyond, key, enough = f"train.steps = {target}", "train.steps", self.until_step
        else:
            beyond, key = f"step {target}, the end of train.epochs = {train.epochs}", "train.epochs"
            enough = train.epoch.period().ended_by(self.until_step - 1) + 1
        raise RunFileError(
            option("until-step")
            + f" = {self.until_step} lies beyond {beyond}; raise {key}, as with "
            + option("set", f"{key}={enough}")
        )

    def step(self, spec: RunSpec) -> int:
        """Return the absolute step to train to."""
        return self.until_step or spec.train.target

    def next_cut(self, spec: RunSpec, step: int) -> int:
        """Return the step where the segment that starts at `step` has to end, at the latest."""
        return min((cut for cut in self.cuts if cut > step), default=self.step(spec))

    def reason(self, head: Head, spec: RunSpec) -> str:
        """Return the exit reason of a command that reached the goal."""
        if head.finished is not None and (head.tip is None or head.tip.step < self.step(spec)):
            return "finished_early"
        return "complete" if self.step(spec) == spec.train.target else "until_step"

    def reached(self, head: Head | None, spec: RunSpec) -> bool:
        """Return whether no work is left: the run is at the goal's step, or callbacks ended it earlier.

        A run without a checkpoint, or with an evaluation or a test that is still due, has not reached its goal. The end
        of an epoch is not known before the number of training examples is.
        """
        if needs_examples(spec):
            return False
        if head is None or head.tip is None or evaluation_due(head, spec) or is_test_due(head, spec):
            return False
        return self.is_trained(head, spec)

    def is_trained(self, head: Head, spec: RunSpec) -> bool:
        """Return whether no step is left to train; evaluations may be. It must be known where epochs end."""
        return head.finished is not None or (head.tip is not None and head.tip.step >= self.step(spec))


def override_to_continue(spec: RunSpec, step: int, target: int | None) -> str | None:
    """Return the `key=value` with which a run at `step` has steps left to train; None if its run file says enough.

    Args:
        step: of the tip.
        target: the step to train to; if it is not ahead, the run gets twice as long.
    """
    train, own = spec.train, spec.train.known_target
    if own is None or own > step:
        return None
    ahead, times = (target, 1) if target is not None and target > step else (step, 2)
    if train.epochs is None:
        return f"train.steps={times * ahead}"
    return f"train.epochs={times * (train.epoch.period().ended_by(ahead - 1) + 1)}"


class RelayResult(Contract):
    """What a command reached."""

    schema_version: Literal[1] = 1
    run: str
    home: str
    step: int
    checkpoint: str
    state_digest: str
    segments: int
    metrics: dict[str, float]
    exit_reason: CommandEnd
    target: int | None = Field(default=None, description="the step to train to; None if it is not known")
    epoch: float | None = Field(default=None, description="epochs that are done; None if the log does not know")
    report: str | None = Field(description="address of the report; None if there is none yet")

    @property
    def stopped(self) -> bool:
        """Whether the command ended with work left to do."""
        return self.exit_reason in {"max_segments", "cancelled"} or self.exit_reason in STOP_REASONS


def leaves_time(exit_reason: str) -> bool:
    """Return whether a stopped command has time to write a report before the machine may disappear."""
    return exit_reason not in _MACHINE_ENDS


def result_of(run: RunHome, *, segments: int, exit_reason: str, telemetry: Sink, report: bool = True) -> RelayResult:
    """Read the state of the run from its log, and write the report.

    The work is committed by then, so a report that cannot be written is a warning, whatever the reason.

    Args:
        segments: number of segments that this command trained.
        exit_reason: why the command ends.
        telemetry: receives the warning.
        report: whether to write the report.

    Returns:
        The state of the run, and what this command did.

    Raises:
        RunLogError: the run has no checkpoint.
    """
    is_done = exit_reason == "nothing_to_do"  # the log has just been read then
    newest = run.log.newest_seen() if is_done else run.log.newest()
    if newest is None or newest.head.tip is None:
        raise RunLogError(f"{run.home.uri}: the run has no checkpoint, so there is nothing to report")
    if is_done and isinstance(run, OpenedRun):
        with tracking(run.spec, run.home):  # if a command was killed before it sent everything
            pass
    facts, tip = RunFacts.as_known(run, newest), newest.head.tip
    # If a command was killed before it wrote curves and report, the next one writes them. After Ctrl-C the relay has.
    if report:
        report = _write_all(run, newest, telemetry, unless_up_to_date=is_done or exit_reason == "sigint")
    with suppress(StorageError):  # an earlier one
        report = report or run.home.exists(PAGE)
    return RelayResult(
        run=run.name,
        home=run.home.uri,
        step=tip.step,
        checkpoint=f"{run.home.uri}/{tip.path}",
        state_digest=tip.state_digest,
        segments=segments,
        metrics={
            **facts.training,
            **{f"validation_{name}": value for name, value in facts.validation.items()},
            **{f"test_{name}": value for name, value in facts.test.items()},
        },
        exit_reason=cast(CommandEnd, exit_reason),  # the model refuses any other text
        target=facts.target_of_command,
        epoch=facts.epoch,
        report=f"{run.home.uri}/{PAGE}" if report else None,
    )


def report_end(run: RunHome, telemetry: Sink) -> str | None:
    """Write the report of a run whose command has ended with an error or a stop, as the attempt's record has it.

    Args:
        telemetry: receives a warning if the report cannot be written.

    Returns:
        Address of the report; None if it has not the newest entry.
    """
    newest = None
    with suppress(BatonError):  # a log that cannot be read is the error that ends the command, or is found by the next
        newest = run.log.newest()
    is_written = newest is not None and _write_all(run, newest, telemetry, unless_up_to_date=False, but="")
    return f"{run.home.uri}/{PAGE}" if is_written else None


def _write_all(
    run: RunHome, newest: Entry, telemetry: Sink, *, unless_up_to_date: bool, but: str = "all work is committed, but "
) -> bool:
    """Write what is made from the log; a failure is a warning. Returns whether the report has the newest entry."""
    with suppress(StorageError):  # whatever is wrong, writing says it
        if unless_up_to_date and reported_entry(run.home) == newest.number:
            return True
    files: dict[str, Callable[[], object]] = {"the curves": lambda: write_curves(run.log)}
    if isinstance(run, OpenedRun):
        spec = run.with_recorded_examples(newest.head).spec
        files["the CSV files of callbacks"] = lambda: write_csv_files(run.log, spec)
    files["the report"] = lambda: write_report(run.log, title=run.name)
    failed = set()
    for what, write in files.items():
        try:
            write()
        except Exception as fault:  # noqa: BLE001 - nothing that is shown may fail a run whose work is committed
            failed.add(what)
            why = str(fault) if isinstance(fault, BatonError) else f"{type(fault).__name__}: {fault}"
            again = f"baton report {run.home.uri} tries again"
            text = f"{but}{what} could not be written; {again}: {why}"
            telemetry.emit(Note(text=text, warning=True))
    return "the report" not in failed


def result_of_interrupted(
    run: OpenedRun, goal: Goal, reason: str, *, since: Head | None, telemetry: Sink
) -> RelayResult | None:
    """Read the state of the run after a signal ended the command. Write no report if the machine may disappear.

    Args:
        goal: the command's goal; if the run has reached it, the exit reason is the goal's.
        reason: the exit reason of the interrupted command.
        since: the head of the log when the command began; None: there was no log.
        telemetry: see `result_of`.

    Returns:
        What the command reached; None if the run has no checkpoint yet.
    """
    head = run.log.head()
    if head is None or head.tip is None:
        return None
    first = 0 if since is None else since.number + 1
    new = (run.log.entry(number).body for number in range(first, head.number + 1))
    segments = sum(isinstance(body, Commit) and body.ends_a_segment for body in new)
    report = leaves_time(reason) and is_chief(run.spec.accelerator, os.environ)
    run = run.with_recorded_examples(head)
    if goal.reached(head, run.spec):
        reason = goal.reason(head, run.spec)
    return result_of(run, segments=segments, exit_reason=reason, telemetry=telemetry, report=report)
