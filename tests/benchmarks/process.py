"""Runs one arm as a process of its own, and takes the time of the lines that it prints."""

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import IO

from tests.benchmarks.proc_files import ThreadProfile, kill, peak_memory
from tests.support.forked import descendants

_ROW = re.compile(rb"step (\d+)/\d+\b")
_COMMITTED = re.compile(rb"step (\d+)  committed\b")
_VALUE = re.compile(rb"value (.+) = (\S+)")
_SAMPLE_SECONDS = 0.2
_LAST_LINES = 60


class ArmFailed(Exception):
    """An arm ended before it printed what was waited for; has the end of its output."""


@dataclass(slots=True)
class Trace:
    """What an arm did. Times are in seconds since its process was started.

    Attributes:
        pid: of the process.
        rows: first line of a row, by step.
        commits: line of a completed checkpoint, by step.
        values: of lines `value NAME = NUMBER`, in order.
        peak_bytes: peak resident memory of the process, and of its children.
        threads: processor seconds by thread's name, from the first to the last row; only with a profile.
        ended: when the process had ended.
    """

    pid: int = 0
    rows: dict[int, float] = field(default_factory=dict)
    commits: dict[int, float] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int = 0
    peak_of_children: int = 0
    threads: dict[str, float] = field(default_factory=dict)
    ended: float = 0.0
    code: int = 0

    def value(self, name: str) -> float:
        """The last value of a name."""
        return self.values[name][-1]

    @property
    def first_row(self) -> float:
        """When the first row was printed."""
        return min(self.rows.values())

    @property
    def to_last_step(self) -> float:
        """Seconds from the first row to the last one."""
        return self.rows[max(self.rows)] - self.first_row

    @property
    def to_last_commit(self) -> float:
        """Seconds from the first row until the last row and the last commit are there."""
        return max(self.rows[max(self.rows)], *self.commits.values(), 0.0) - self.first_row


Until = Callable[[Trace], bool]


def until_step(step: int, *, commit: bool = False) -> Until:
    """Stop an arm when it has printed the row of `step` and, if `commit`, the commit of it."""
    return lambda trace: step in trace.rows and (not commit or step in trace.commits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A process to be measured.

    Attributes:
        name: shown in the table.
        command: its words.
        environment: added to this process's.
        folder: where it runs.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(
        self, until: Until | None = None, *, seconds: float = 900.0, names: Path | None = None, machine: bool = False
    ) -> Trace:
        """Run it to its end, or kill it when `until` is true of what it printed.

        Args:
            until: asked after each line.
            seconds: after them it is killed, as one that hangs.
            names: where the names of its threads are written, for a profile.
            machine: `seconds` are the life of its machine, so that being killed is no failure.

        Raises:
            ArmFailed: it ended before, or with an error, or took longer than `seconds`.
        """
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self.environment}
        started = time.monotonic()
        process = Popen(
            self.command,
            cwd=self.folder,
            env=environment,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,  # without Prefect, Baton's console is on standard error
            start_new_session=True,
        )
        watch = _Watch(process, started, seconds, names)
        watch.start()
        last: list[bytes] = []
        reached = False
        trace = watch.trace
        try:
            if process.stdout is None:
                raise AssertionError
            reached = _read(process.stdout, watch, until, last)
            if not reached:
                process.wait()
        finally:
            watch.end()
        trace.ended, trace.code = time.monotonic() - started, process.returncode
        if machine and watch.late:
            return trace
        if not reached and (until is not None or process.returncode):
            said = b"".join(last).decode(errors="replace")
            late = " (out of time)" if watch.late else ""
            raise ArmFailed(f"{self.name} ended with {process.returncode}{late}:\n{said}")
        return trace


def _read(stream: IO[bytes], watch: "_Watch", until: Until | None, last: list[bytes]) -> bool:
    """Take the time of each line; whether `until` became true."""
    trace = watch.trace
    for line in stream:
        now = time.monotonic() - watch.started
        last.append(line)
        del last[:-_LAST_LINES]
        if found := _ROW.match(line):
            if not trace.rows:
                watch.mark()
            trace.rows.setdefault(int(found[1]), now)
        elif found := _COMMITTED.match(line):
            trace.commits.setdefault(int(found[1]), now)
        elif found := _VALUE.match(line):
            trace.values.setdefault(found[1].decode(), []).append(float(found[2]))
        else:
            continue
        if until is not None and until(trace):
            return True
    return False


class _Watch:
    """Samples the memory of a process and its children, and kills all of them at the end."""

    def __init__(self, process: Popen[bytes], started: float, seconds: float, names: Path | None) -> None:
        self.trace = Trace(pid=process.pid)
        self.late = False
        self.started = started
        self._process = process
        self._deadline = started + seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._peaks: dict[int, int] = {}
        self._names = names
        self._profile = None if names is None else ThreadProfile(process.pid)

    def start(self) -> None:
        self._thread.start()

    def mark(self) -> None:
        """The profile begins here."""
        if self._profile is not None:
            self._profile.begin()

    def end(self) -> None:
        """Take the last figures, and end the process and its children."""
        self._ended.set()
        self._thread.join()
        self._sample()
        if self._profile is not None and self._names is not None:
            self.trace.threads = self._profile.by_name(self._names)
        family = descendants(self._process.pid)
        if self._process.poll() is None:
            self._process.kill()
        for pid in family:  # an embedded server has its own process group
            kill(pid)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _run(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._sample()
            if time.monotonic() > self._deadline:
                self.late = True
                self._process.kill()
                return

    def _sample(self) -> None:
        pid = self._process.pid
        self.trace.peak_bytes = max(self.trace.peak_bytes, peak_memory(pid))
        for child in descendants(pid):
            self._peaks[child] = max(self._peaks.get(child, 0), peak_memory(child))
        self.trace.peak_of_children = sum(self._peaks.values())
        if self._profile is not None:
            self._profile.sample()
