"""The file in which a trial's process reports how it ended, for the process that started it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.error_report import ErrorReport
from tasks.foundation.errors import AnotherVersion, BatonError, RunLogError
from tasks.foundation.messages import listed
from tasks.foundation.telemetry.events import Event, StatefulOperations


class TrialReport(Contract):
    """How a trial's process ended. A killed or crashed process leaves no report."""

    schema_version: Literal[1] = 1
    error: ErrorReport | None = Field(default=None, description="the BatonError that ended it")
    stateful_operations: str = Field(
        default="", description="`model.py:build_model: normal/RandomStandardNormal`; see StatefulOperations"
    )


class _Recorder:
    """A `Sink` that keeps the stateful operations for the report."""

    def __init__(self) -> None:
        self.stateful_operations = ""

    def emit(self, event: Event) -> None:
        if isinstance(event, StatefulOperations):
            self.stateful_operations = f"{event.reference}: {listed(event.operations)}"


@contextmanager
def trial_report(path: Path | None) -> Iterator[_Recorder]:
    """Write a `TrialReport` when the block ends, also when it raises.

    Args:
        path: the file to write; with None, no report is written.

    Yields:
        A sink, which must receive the run's events.
    """
    recorder = _Recorder()
    error: BatonError | None = None
    try:
        yield recorder
    except BatonError as fault:
        error = fault
        raise
    finally:
        if path is not None:
            report = TrialReport(
                error=None if error is None else ErrorReport.of(error),
                stateful_operations=recorder.stateful_operations,
            )
            with suppress(OSError):  # standard error has the same information
                path.write_bytes(report.to_json())


def read_trial_report(path: Path) -> TrialReport:
    """Read the report at `path`; an empty report if the file is missing or incomplete."""
    try:
        return TrialReport.from_json(path.read_bytes(), where=str(path), error=RunLogError)
    except (FileNotFoundError, RunLogError, AnotherVersion):
        return TrialReport()
