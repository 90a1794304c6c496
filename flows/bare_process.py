"""A training in a bare process, `python -m baton.flows.without_prefect`: how it starts, and the report of its end.

The API trains in such a process, and proofs and audits execute steps in them. The report gives the starter the error
with its class and fields, which standard error has only as text. What it prints goes to files, so that a starter that
is slow to show it never makes the training wait.
"""

import logging
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Literal

from pydantic import Field

from baton.flows.process import ChildSettings, start_module
from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import AnotherVersion, BatonError, RunLogError
from baton.tasks.foundation.storage.local_files import temporary_folder
from baton.tasks.foundation.telemetry.events import Event, StatefulOperations
from baton.tasks.foundation.text import listed, message

_LOGGER = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_LINES_SHOWN = 15
_ERROR = re.compile(rb"error: [A-Z]\w+: ")

Show = Callable[[Sequence[str]], None]


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
    """Start `python -m baton.flows.without_prefect` with arguments; it ends with this process.

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
    settings: ChildSettings = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
    settings |= {"start_new_session": True} if own_session else {"process_group": 0}
    return start_module(
        "baton.flows.without_prefect", [*words, "--report", os.fspath(report)], environment=environment, **settings
    )


class _Reporter:
    """A `Sink` that keeps the stateful operations for the report."""

    def __init__(self) -> None:
        self.stateful_operations = ""

    def emit(self, event: Event) -> None:
        if isinstance(event, StatefulOperations):
            self.stateful_operations = f"{event.reference}: {listed(event.operations)}"


@contextmanager
def process_report(path: Path | None) -> Iterator[_Reporter]:
    """Write a `ProcessReport` when the block ends, also when it raises.

    Args:
        path: the file to write; with None, no report is written.

    Yields:
        A sink, which must receive the run's events.
    """
    recorder = _Reporter()
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


def run_bare_process(words: Sequence[str], *, show: Show | None) -> None:
    """Run a bare process to its end. An interrupt of this process is passed on to it: it commits and ends.

    Args:
        words: its arguments.
        show: receives the lines that it prints, as they come; None: they are not shown.

    Raises:
        BatonError: what ended it.
        KeyboardInterrupt: this process was interrupted; the training has committed and ended.
    """
    with temporary_folder("baton-notebook-") as folder:
        report, output = folder / "report.json", folder / "output"
        with output.open("wb") as file:
            # In a group of its own: an interrupt of the terminal reaches it once, from here.
            unbuffered = {"PYTHONUNBUFFERED": "1"}  # what the user's code prints is shown when it is printed
            process = start_bare_process(words, report=report, stdout=file, stderr=file, environment=unbuffered)
            interrupted = _wait(process, output, show)
        error = read_process_report(report).error
        if interrupted:
            raise KeyboardInterrupt
        if error is not None:
            raise error.to_error()
        if process.returncode not in {0, 3}:
            tail = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_SHOWN:]
            raise BatonError(message(f"the training ended with exit code {process.returncode}", details=tail))


def _wait(process: "subprocess.Popen[bytes]", output: Path, show: Show | None) -> bool:
    """Wait for the end of a process, and show what it prints; pass each interrupt of this process on to it.

    Returns:
        Whether there was an interrupt.
    """
    interrupted, begun = False, b""
    with output.open("rb") as file:
        while True:
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(None if show is None else _POLL_SECONDS)
                *lines, begun = (begun + file.read()).split(b"\n")
                lines += [begun] if begun and process.returncode is not None else []
                # The error is raised.
                shown = list(takewhile(lambda line: not _ERROR.match(line), lines))
                if shown and show is not None:
                    show([line.decode("utf-8", "replace") for line in shown])
            except KeyboardInterrupt:
                interrupted = True
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
            except Exception as fault:  # noqa: BLE001 - a closed stream or a lost notebook must not end a training
                show = None
                _LOGGER.warning("the progress is not shown any more, because that failed: %r", fault)
            if process.returncode is not None:
                return interrupted
