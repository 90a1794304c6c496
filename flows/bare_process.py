"""A training in a bare process, `python -m flows.without_prefect`: how it is started, and the report of how it ended.

The API trains in such a process, and proofs and audits execute steps in them. The report gives the starter the error
with its class and fields, which standard error has only as text.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from pydantic import Field

import flows
from flows.process import ChildSettings, start_child
from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.stage_calls import ErrorReport
from tasks.foundation.errors import AnotherVersion, BatonError, RunLogError
from tasks.foundation.messages import listed
from tasks.foundation.telemetry.events import Event, StatefulOperations


class ProcessReport(Contract):
    """How a bare process ended. A killed or crashed process leaves no report."""

    format: Literal[1] = 1
    error: ErrorReport | None = Field(default=None, description="the BatonError that ended it")
    stateful_operations: str = Field(
        default="", description="`model.py:build_model: normal/RandomStandardNormal`; see StatefulOperations"
    )


def start_bare_process(
    words: Sequence[str],
    *,
    report: Path,
    stdout: IO[bytes],
    stderr: IO[bytes],
    environment: dict[str, str] | None = None,
    own_session: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start `python -m flows.without_prefect` with arguments; it ends with this process.

    Args:
        words: its arguments.
        report: where it writes its report; one that lies there is removed.
        stdout: where its output goes.
        stderr: where its standard error goes.
        environment: more environment variables.
        own_session: whether it leads a session, so that what its user's code starts can be killed with it; otherwise
            it leads a process group, so that an interrupt of the terminal does not reach it.
    """
    report.unlink(missing_ok=True)
    # A flows.py or tasks.py in the working folder must not hide Baton's packages.
    command = [sys.executable, "-P", "-m", "flows.without_prefect", *words, "--report", os.fspath(report)]
    path = os.pathsep.join(filter(None, [str(Path(flows.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, **(environment or {}), "PYTHONPATH": path}
    settings: ChildSettings = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr, "env": env}
    settings |= {"start_new_session": True} if own_session else {"process_group": 0}
    return start_child(command, **settings)


class _Recorder:
    """A `Sink` that keeps the stateful operations for the report."""

    def __init__(self) -> None:
        self.stateful_operations = ""

    def emit(self, event: Event) -> None:
        if isinstance(event, StatefulOperations):
            self.stateful_operations = f"{event.reference}: {listed(event.operations)}"


@contextmanager
def process_report(path: Path | None) -> Iterator[_Recorder]:
    """Write a `ProcessReport` when the block ends, also when it raises.

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
            report = ProcessReport(
                error=None if error is None else ErrorReport.of(error),
                stateful_operations=recorder.stateful_operations,
            )
            with suppress(OSError):  # standard error has the same information
                path.write_bytes(report.to_json())


def read_process_report(path: Path) -> ProcessReport:
    """Read the report at `path`; an empty report if the file is missing or incomplete."""
    try:
        return ProcessReport.from_json(path.read_bytes(), where=str(path), error=RunLogError)
    except (FileNotFoundError, RunLogError, AnotherVersion):
        return ProcessReport()
