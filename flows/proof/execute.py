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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from baton.flows.proof.compare import SavedState, saved_state
from baton.flows.supervisor import Outcome, Trainer, trainer_words
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.machine.cluster import Cluster, several_hosts
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Committed, Event, Note, Sink

_POLL_SECONDS = 0.02


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
        """Return the arguments for `baton.flows.train`."""
        place = (f"run={self.name}", f"storage={json.dumps(os.fspath(self.storage))}")
        return trainer_words(self.file, (*self.settings, *place), cuts=self.cuts, until_step=self.steps)


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

    def finish(self, execution: Execution) -> Outcome:
        """Start or continue an execution and wait for its end.

        Raises:
            BatonError: its process failed.
        """
        outcome = self.processes.run_to_end(execution)
        if outcome.returncode != 0:
            raise outcome.error(f"the training {execution.name}")
        return outcome


def hosts_of(spec: RunSpec) -> int:
    """The number of hosts of a multi_worker run, else 1. All of them are processes of this machine."""
    cluster = several_hosts(spec.accelerator, os.environ)
    return 1 if cluster is None else len(cluster.addresses)


class FreshProcesses:
    """Runs each execution in a new process; with several hosts in one process per host, connected over loopback."""

    def __init__(self, *, hosts: int = 1) -> None:
        """Start nothing yet.

        Args:
            hosts: number of processes of one execution.
        """
        self._hosts = hosts

    def run_to_end(self, execution: Execution) -> Outcome:
        """Start or continue an execution and wait for the end of its process."""
        return self._run(execution, killed_from=None)

    def kill_after(self, execution: Execution, step: int) -> Outcome:
        """Start an execution and kill its process once a checkpoint of `step` or later is in its log."""
        return self._run(execution, killed_from=step)

    def _run(self, execution: Execution, *, killed_from: int | None) -> Outcome:
        """Run an execution's processes, and end all of them. The chief's outcome."""
        with _delayed_interrupts() as interrupts, ExitStack() as stack:
            trainers: list[Trainer] = []
            for environment in self._environments():
                # In a session, so that processes started by the user's code are killed with it.
                reader = _KillsAfter(killed_from, trainers)
                words = execution.arguments()
                trainer = Trainer(words, (reader,), output=subprocess.PIPE, environment=environment, own_session=True)
                trainers.append(trainer)
                stack.callback(trainer.outcome)
                stack.callback(trainer.kill)
            chief, *others = trainers
            _wait_for((chief,), interrupts)
            if chief.process.returncode == 0:  # the other hosts will succeed, too
                _wait_for(others, interrupts)
        return chief.outcome()

    def _environments(self) -> list[dict[str, str]]:
        """The additional environment variables of each host's process; none for a single host."""
        if self._hosts == 1:
            return [{}]
        addresses = _free_addresses(self._hosts)
        clusters = [Cluster(tuple(addresses), host) for host in range(self._hosts)]
        return [{"TF_CONFIG": json.dumps(cluster.tf_config())} for cluster in clusters]


@dataclass(frozen=True, slots=True)
class _KillsAfter:
    """A reader that kills the chief once it has committed a step; with None it kills nothing."""

    step: int | None
    trainers: Sequence[Trainer]

    def emit(self, event: Event) -> None:
        if self.step is not None and isinstance(event, Committed) and event.step >= self.step:
            self.trainers[0].kill()


def _wait_for(trainers: Sequence[Trainer], interrupts: Sequence[int]) -> None:
    while any(trainer.process.poll() is None for trainer in trainers) and not interrupts:
        time.sleep(_POLL_SECONDS)


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


def _free_addresses(count: int) -> list[str]:
    """Loopback addresses whose ports are free now."""
    with ExitStack() as bound:
        sockets = [bound.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
