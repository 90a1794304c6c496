"""Trials as processes: one that runs to its end, and one that is killed in the middle of its work."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import flows
from flows.process.children import start_child
from flows.proving.trial import Trial
from tasks.foundation import errors
from tasks.foundation.errors import BatonError, RunLogError
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage

_POLL_SECONDS = 0.005  # far less than a segment and its commit take
_LINES_SHOWN = 15
_ERROR = re.compile(r"^error: (\w+): ", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process that has ended.

    Attributes:
        returncode: as `subprocess` has it, -9 after a SIGKILL.
        stderr: all that it said there.
        killed: whether a SIGKILL was sent to it. Only a returncode of -9 tells that it was still alive then.
    """

    returncode: int
    stderr: str
    killed: bool = False


class Processes(Protocol):
    """How trials are run."""

    def to_its_end(self, trial: Trial) -> Ended:
        """Run a trial, or go on with it, until its process ends."""

    def killed_after(self, trial: Trial, step: int) -> Ended:
        """Run a trial and kill its process as soon as a checkpoint of `step` or a later one is in its log."""


class FreshProcesses:
    """Each trial in a new process, with the user's environment, devices and working folder.

    A run of several hosts is tried with as many processes of this machine, which meet on loopback.
    """

    def __init__(self, folder: Path, *, hosts: int = 1) -> None:
        """Nothing is started yet.

        Args:
            folder: where the processes' standard output and error are kept.
            hosts: processes of one trial.
        """
        self._folder = folder
        self._hosts = hosts

    def to_its_end(self, trial: Trial) -> Ended:
        """See `Processes.to_its_end`."""
        with self._started(trial) as (chief, interrupts):
            while chief.poll() is None and not interrupts:
                time.sleep(_POLL_SECONDS)
        return Ended(returncode=chief.returncode, stderr=self._stderr(trial))

    def killed_after(self, trial: Trial, step: int) -> Ended:
        """See `Processes.killed_after`."""
        watch = LogWatch(trial.home)
        killed = False
        with self._started(trial) as (chief, interrupts):
            while chief.poll() is None and not interrupts:
                if watch.step() >= step:
                    _kill(chief)
                    killed = True
                    chief.wait()
                    break
                time.sleep(_POLL_SECONDS)
        return Ended(returncode=chief.returncode, stderr=self._stderr(trial), killed=killed)

    @contextmanager
    def _started(self, trial: Trial) -> Iterator[tuple[subprocess.Popen[bytes], Sequence[int]]]:
        """The trial's process, of several the chief's, and the interrupts that have come; at the end none is left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with _interrupts_held_back() as interrupts, ExitStack() as started:
            chief, *others = [
                started.enter_context(self._process(trial, environment, f"-{host}" if host else ""))
                for host, environment in enumerate(self._environments())
            ]
            yield chief, interrupts
            if chief.returncode == 0:  # the others have heard of the same end
                while any(process.poll() is None for process in others) and not interrupts:
                    time.sleep(_POLL_SECONDS)

    @contextmanager
    def _process(self, trial: Trial, environment: dict[str, str], suffix: str) -> Iterator[subprocess.Popen[bytes]]:
        # -P: a flows.py or tasks.py in the working folder must not stand in the way of Baton's own.
        command = [sys.executable, "-P", "-m", "flows.without_prefect", *trial.words()]
        above = os.fspath(Path(flows.__file__).parents[1])
        paths = os.pathsep.join(path for path in (above, os.environ.get("PYTHONPATH")) if path)
        with (
            (self._folder / f"{trial.name}{suffix}.stdout").open("ab") as stdout,
            (self._folder / f"{trial.name}{suffix}.stderr").open("ab") as stderr,
        ):
            process = start_child(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **environment, "PYTHONPATH": paths},
                start_new_session=True,  # so that processes which the user's code starts can be ended with it
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    _kill(process)
                    process.wait()

    def _environments(self) -> list[dict[str, str]]:
        """What each host's process is told besides; of one host nothing."""
        if self._hosts == 1:
            return [{}]
        addresses = _free_addresses(self._hosts)
        places = [
            {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": host}} for host in range(self._hosts)
        ]
        return [{"TF_CONFIG": json.dumps(place)} for place in places]

    def _stderr(self, trial: Trial) -> str:
        return (self._folder / f"{trial.name}.stderr").read_text(encoding="utf-8", errors="replace")


class LogWatch:
    """How far a run is that another process writes; every entry is read once."""

    def __init__(self, home: Storage) -> None:
        self._log = RunLog(home)
        self._number = 0
        self._step = 0

    def step(self) -> int:
        """Step of the tip; 0 before the first commit."""
        while True:
            try:
                entry = self._log.entry(self._number)
            except RunLogError:  # not there yet
                return self._step
            self._number += 1
            self._step = entry.head.tip.step if entry.head.tip is not None else 0


def _free_addresses(count: int) -> list[str]:
    """Addresses on loopback whose ports are free at this moment."""
    with ExitStack() as bound:
        sockets = [bound.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def fault_of(trial: Trial, ended: Ended) -> BatonError:
    """What a process that failed had to say, as the error that it was."""
    told = list(_ERROR.finditer(ended.stderr))
    if told:
        kind = getattr(errors, told[-1][1], BatonError)
        if isinstance(kind, type) and issubclass(kind, BatonError):
            # Past its constructor, which may want more than the text.
            return kind.__new__(kind, ended.stderr[told[-1].end() :].strip())
    if ended.returncode == -signal.SIGKILL:
        return BatonError(
            f"the process of the trial {trial.name} was killed from outside; see whether the machine ran out of memory "
            "(dmesg), and run again with a smaller batch or more room"
        )
    last = "\n".join(ended.stderr.splitlines()[-_LINES_SHOWN:])
    return BatonError(f"the process of the trial {trial.name} ended with code {ended.returncode}; it said:\n{last}")


@contextmanager
def ending_like_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt: processes are ended and scratch storage removed on the way out."""
    with _handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _interrupts_held_back() -> Iterator[Sequence[int]]:
    """The interrupts that come; they are raised at the end.

    Raised at once, they would find a process started and not yet assigned, or `subprocess` with its lock taken for
    good. Held back by a mask of signals, they would never reach the processes that are started meanwhile.
    """
    held: list[int] = []
    with _handled(lambda number, _frame: held.append(number), signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield held
    if held:
        raise KeyboardInterrupt


@contextmanager
def _handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """A handler of signals for a while; only the main thread can set one, and only it is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is ignored stays so: nohup, and a shell's background jobs, rely on it.
    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, handler)
        for number in numbers
        if signal.getsignal(number) not in {signal.SIG_IGN, None}
    }
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started. It has not been waited for, so its number is still its own."""
    os.killpg(process.pid, signal.SIGKILL)
