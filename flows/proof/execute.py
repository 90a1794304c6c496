"""Executes steps: each execution is a run of its own in scratch storage, trained by processes of its own.

It begins with nothing, or with a copy of a checkpoint of the run. Its processes have the user's environment, devices
and working folder, and train to an absolute step. They are ended, and scratch storage is removed, whatever ends the
command.
"""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from baton.flows.bare_process import ProcessReport, read_process_report, start_bare_process
from baton.flows.proof.compare import SavedState, saved_state
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BatonError, RunLogError
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.cluster import Cluster, several_hosts
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Note, Sink

_POLL_SECONDS = 0.005  # much shorter than a segment and its commit
_LINES_SHOWN = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A run in scratch storage.

    Attributes:
        name: name of the run, and of its processes' output files.
        storage: the storage root; executions with the same root share its datasets.
        file: the run file.
        settings: overrides of the run file, in their order.
        steps: the absolute step to train to.
        cuts: more steps to commit on the way.
    """

    name: str
    storage: Path
    file: Path
    settings: tuple[str, ...]
    steps: int
    cuts: tuple[int, ...] = ()

    @property
    def home(self) -> LocalStorage:
        """The run's home in the scratch storage."""
        return LocalStorage(self.storage / self.name)

    def arguments(self) -> list[str]:
        """Return the arguments for `baton.flows.without_prefect`."""
        place = (f"run={self.name}", f"storage={json.dumps(os.fspath(self.storage))}")
        options = [word for setting in (*self.settings, *place) for word in ("--set", setting)]
        cuts = [word for step in self.cuts for word in ("--cut-at", str(step))]
        return [os.fspath(self.file), *options, *cuts, "--until-step", str(self.steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedProcess:
    """A process after its end.

    Attributes:
        returncode: as in `subprocess`; -9 after a SIGKILL.
        stderr: the whole output of the execution on standard error, with that of its earlier processes.
        report: the report that the process wrote; an empty one if it crashed or was killed.
        killed: whether a SIGKILL was sent. Only a returncode of -9 shows that it ended the process.
    """

    returncode: int
    stderr: str
    report: ProcessReport = field(default_factory=ProcessReport)
    killed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Laboratory:
    """Where steps are executed.

    Attributes:
        folder: scratch storage.
        processes: runs the executions.
        telemetry: receives progress notes.
        saved: gives the state in a checkpoint of a home.
    """

    folder: Path
    processes: "FreshProcesses"
    telemetry: Sink
    saved: Callable[[LocalStorage, CheckpointRef], SavedState] = saved_state

    def note(self, text: str) -> None:
        """Report progress."""
        self.telemetry.emit(Note(text=text))

    def finish(self, execution: Execution) -> FinishedProcess:
        """Start or continue an execution and wait for its end.

        Raises:
            BatonError: its process failed.
        """
        finished = self.processes.run_to_end(execution)
        if finished.returncode != 0:
            raise error_of(execution, finished)
        return finished


def hosts_of(spec: RunSpec) -> int:
    """The number of hosts of a multi_worker run, else 1. All of them are processes of this machine."""
    cluster = several_hosts(spec.accelerator, os.environ)
    return 1 if cluster is None else len(cluster.addresses)


class FreshProcesses:
    """Runs each execution in a new process; with several hosts in one process per host, connected over loopback."""

    def __init__(self, folder: Path, *, hosts: int = 1) -> None:
        """Start nothing yet.

        Args:
            folder: where the processes' output and reports go.
            hosts: number of processes of one execution.
        """
        self._folder = folder
        self._hosts = hosts

    def run_to_end(self, execution: Execution) -> FinishedProcess:
        """Start or continue an execution and wait for the end of its process."""
        with self._started(execution) as (chief, interrupts):
            while chief.poll() is None and not interrupts:
                time.sleep(_POLL_SECONDS)
        return self._finished(execution, chief)

    def kill_after(self, execution: Execution, step: int) -> FinishedProcess:
        """Start an execution and kill its process once a checkpoint of `step` or later is in its log."""
        commits = CommitWatcher(execution.home)
        killed = False
        with self._started(execution) as (chief, interrupts):
            while chief.poll() is None and not interrupts:
                if commits.step() >= step:
                    _kill(chief)
                    killed = True
                    chief.wait()
                    break
                time.sleep(_POLL_SECONDS)
        return self._finished(execution, chief, killed=killed)

    @contextmanager
    def _started(self, execution: Execution) -> Iterator[tuple["subprocess.Popen[bytes]", Sequence[int]]]:
        """Start an execution's processes, and end all of them on exit.

        Yields:
            The chief's process, and the interrupts received so far.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with _delayed_interrupts() as interrupts, ExitStack() as started:
            chief, *others = [
                started.enter_context(self._process(execution, environment, f"-{host}" if host else ""))
                for host, environment in enumerate(self._environments())
            ]
            yield chief, interrupts
            if chief.returncode == 0:  # the other hosts will succeed, too
                while any(process.poll() is None for process in others) and not interrupts:
                    time.sleep(_POLL_SECONDS)

    @contextmanager
    def _process(
        self, execution: Execution, environment: dict[str, str], suffix: str
    ) -> Iterator["subprocess.Popen[bytes]"]:
        output = self._folder / f"{execution.name}{suffix}"
        with (
            output.with_name(f"{output.name}.stdout").open("ab") as stdout,
            output.with_name(f"{output.name}.stderr").open("ab") as stderr,
        ):
            process = start_bare_process(
                execution.arguments(),
                report=_report_path(output),
                environment=environment,
                stdout=stdout,
                stderr=stderr,
                own_session=True,  # so that processes started by the user's code are killed with it
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
        clusters = [Cluster(tuple(addresses), host) for host in range(self._hosts)]
        return [{"TF_CONFIG": json.dumps(cluster.tf_config())} for cluster in clusters]

    def _finished(
        self, execution: Execution, chief: "subprocess.Popen[bytes]", *, killed: bool = False
    ) -> FinishedProcess:
        output = self._folder / execution.name
        stderr = output.with_name(f"{output.name}.stderr").read_text(encoding="utf-8", errors="replace")
        report = read_process_report(_report_path(output))
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


def error_of(execution: Execution, finished: FinishedProcess) -> BatonError:
    """Return the error that ended a process: the reported one, or a description of the kill or crash."""
    if finished.report.error is not None:
        return finished.report.error.to_error()
    if finished.returncode == -signal.SIGKILL:
        return BatonError(
            f"the process of the training {execution.name} was killed from outside; check whether the machine ran out "
            "of memory (dmesg), then use a smaller batch or a machine with more memory"
        )
    output = "\n".join(finished.stderr.splitlines()[-_LINES_SHOWN:])
    return BatonError(
        f"the process of the training {execution.name} ended with code {finished.returncode}; the end of its output:\n"
        f"{output}"
    )


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt within the block, so that `finally` blocks run."""
    with _handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _delayed_interrupts() -> Iterator[Sequence[int]]:
    """Delay SIGINT, SIGTERM and SIGHUP to the end of the block.

    An interrupt within `subprocess.Popen` could lose a started process, or leave a lock of `subprocess` taken. A signal
    mask is no alternative, because the started processes would inherit it.

    Yields:
        The numbers of the signals received so far; the list grows within the block.

    Raises:
        KeyboardInterrupt: at the end of the block, if a signal was received.
    """
    received: list[int] = []
    with _handled(lambda number, _frame: received.append(number), signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield received
    if received:
        raise KeyboardInterrupt


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Set a signal handler for the block. Only the main thread receives signals, so do nothing in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # nohup and a shell's background jobs rely on signals staying ignored.
    before = {
        number: signal.signal(number, handler)
        for number in numbers
        if signal.getsignal(number) not in {signal.SIG_IGN, None}
    }
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _report_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.report.json")


def _free_addresses(count: int) -> list[str]:
    """Loopback addresses whose ports are free now."""
    with ExitStack() as bound:
        sockets = [bound.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all processes that it started. It was not waited for, so its id cannot have been reused."""
    os.killpg(process.pid, signal.SIGKILL)
