"""What a command reached, read from the run's log, and what it leaves in the home: curves, CSV files and the report.

The work is committed by then. So whatever cannot be written is a warning, and the next command writes it.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, cast

from pydantic import Field

from baton.flows.facts import RunFacts
from baton.flows.opened_run import Goal, OpenedRun, RunHome
from baton.tasks.evaluate.report.page import PAGE, reported_entry, write_report
from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.log_entry import STOP_REASONS, Commit, Entry, Head, StopReason
from baton.tasks.foundation.errors import BatonError, RunLogError, StorageError
from baton.tasks.foundation.machine.cluster import is_chief
from baton.tasks.foundation.telemetry.events import Note, Sink
from baton.tasks.foundation.telemetry.tensorboard import write_curves
from baton.tasks.foundation.telemetry.trackers import tracking, write_csv_files

# After these exit reasons the machine may disappear within seconds.
_MACHINE_ENDS = frozenset({"sigterm", "preempted", "maintenance"})
CommandEnd = (
    Literal["complete", "until_step", "max_segments", "nothing_to_do", "finished_early", "cancelled"] | StopReason
)


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
