"""Runs trials in processes: to the end, or until a kill in the middle of the training."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import flows
from flows.process.children import start_child
from flows.proving.interrupts import delayed_interrupts
from flows.proving.trial import Trial
from flows.proving.trial_report import TrialReport, read_trial_report
from tasks.foundation.errors import BatonError, RunLogError
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage

_POLL_SECONDS = 0.005  # much shorter than a segment and its commit
_LINES_SHOWN = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedProcess:
    """A trial's process after its end.

    Attributes:
        returncode: as in `subprocess`; -9 after a SIGKILL.
        stderr: the trial's whole output on standard error, with that of its earlier processes.
        report: the report that the process wrote; an empty one if it crashed or was killed.
        killed: whether a SIGKILL was sent. Only a returncode of -9 shows that it ended the process.
    """

    returncode: int
    stderr: str
    report: TrialReport = field(default_factory=TrialReport)
    killed: bool = False


class Processes(Protocol):
    """Runs trials."""

    def run_to_end(self, trial: Trial) -> FinishedProcess:
        """Start or continue a trial and wait for the end of its process."""

    def kill_after(self, trial: Trial, step: int) -> FinishedProcess:
        """Start a trial and kill its process once a checkpoint of `step` or later is in its log."""


class FreshProcesses:
    """Runs each trial in a new process, with the user's environment, devices and working folder.

    A trial with several hosts has one process per host, all on this machine and connected over loopback.
    """

    def __init__(self, folder: Path, *, hosts: int = 1) -> None:
        """Start nothing yet.

        Args:
            folder: where the processes' output and reports go.
            hosts: number of processes of one trial.
        """
        self._folder = folder
        self._hosts = hosts

    def run_to_end(self, trial: Trial) -> FinishedProcess:
        """See `Processes.run_to_end`."""
        with self._started(trial) as (chief, interrupts):
            while chief.poll() is None and not interrupts:
                time.sleep(_POLL_SECONDS)
        return self._finished(trial, chief)

    def kill_after(self, trial: Trial, step: int) -> FinishedProcess:
        """See `Processes.kill_after`."""
        commits = CommitWatcher(trial.home)
        killed = False
        with self._started(trial) as (chief, interrupts):
            while chief.poll() is None and not interrupts:
                if commits.step() >= step:
                    _kill(chief)
                    killed = True
                    chief.wait()
                    break
                time.sleep(_POLL_SECONDS)
        return self._finished(trial, chief, killed=killed)

    @contextmanager
    def _started(self, trial: Trial) -> Iterator[tuple[subprocess.Popen[bytes], Sequence[int]]]:
        """Start a trial's processes, and end all of them on exit.

        Yields:
            The chief's process, and the interrupts received so far.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with delayed_interrupts() as interrupts, ExitStack() as started:
            chief, *others = [
                started.enter_context(self._process(trial, environment, f"-{host}" if host else ""))
                for host, environment in enumerate(self._environments())
            ]
            yield chief, interrupts
            if chief.returncode == 0:  # the other hosts will succeed, too
                while any(process.poll() is None for process in others) and not interrupts:
                    time.sleep(_POLL_SECONDS)

    @contextmanager
    def _process(self, trial: Trial, environment: dict[str, str], suffix: str) -> Iterator[subprocess.Popen[bytes]]:
        output = self._folder / f"{trial.name}{suffix}"
        report = _report_path(output)
        report.unlink(missing_ok=True)  # left by an earlier process of this trial
        command = [
            sys.executable,
            "-P",  # a flows.py or tasks.py in the working folder must not hide Baton's packages
            "-m",
            "flows.without_prefect",
            *trial.arguments(),
            "--report",
            os.fspath(report),
        ]
        source_root = os.fspath(Path(flows.__file__).parents[1])
        paths = os.pathsep.join(path for path in (source_root, os.environ.get("PYTHONPATH")) if path)
        with (
            output.with_name(f"{output.name}.stdout").open("ab") as stdout,
            output.with_name(f"{output.name}.stderr").open("ab") as stderr,
        ):
            process = start_child(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **environment, "PYTHONPATH": paths},
                start_new_session=True,  # so that processes started by the user's code are killed with it
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    _kill(process)
                    process.wait()

    def _environments(self) -> list[dict[str, str]]:
        """The additional environment variables of each host's process; none for a single host."""
        if self._hosts == 1:
            return [{}]
        addresses = _free_addresses(self._hosts)
        configs = [
            {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": host}} for host in range(self._hosts)
        ]
        return [{"TF_CONFIG": json.dumps(config)} for config in configs]

    def _finished(self, trial: Trial, chief: subprocess.Popen[bytes], *, killed: bool = False) -> FinishedProcess:
        output = self._folder / trial.name
        stderr = output.with_name(f"{output.name}.stderr").read_text(encoding="utf-8", errors="replace")
        report = read_trial_report(_report_path(output))
        return FinishedProcess(returncode=chief.returncode, stderr=stderr, report=report, killed=killed)


class CommitWatcher:
    """Follows the commits of a run that another process trains. Reads every entry once."""

    def __init__(self, home: Storage) -> None:
        self._log = RunLog(home)
        self._number = 0
        self._step = 0

    def step(self) -> int:
        """Read the new entries, and return the step of the tip; 0 before the first commit."""
        while True:
            try:
                entry = self._log.entry(self._number)
            except RunLogError:  # the entry is not written yet
                return self._step
            self._number += 1
            self._step = entry.head.tip.step if entry.head.tip is not None else 0


def error_of(trial: Trial, finished: FinishedProcess) -> BatonError:
    """Return the error that ended a trial's process: the reported one, or a description of the kill or crash."""
    if finished.report.error is not None:
        return finished.report.error.to_error()
    if finished.returncode == -signal.SIGKILL:
        return BatonError(
            f"the process of the trial {trial.name} was killed from outside; check whether the machine ran out of "
            "memory (dmesg), then use a smaller batch or a machine with more memory"
        )
    output = "\n".join(finished.stderr.splitlines()[-_LINES_SHOWN:])
    return BatonError(
        f"the process of the trial {trial.name} ended with code {finished.returncode}; the end of its output:\n{output}"
    )


def _report_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.report.json")


def _free_addresses(count: int) -> list[str]:
    """Loopback addresses whose ports are free now."""
    with ExitStack() as bound:
        sockets = [bound.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes that it started. It was not waited for, so its id cannot have been reused."""
    os.killpg(process.pid, signal.SIGKILL)
