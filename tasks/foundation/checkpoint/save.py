"""A save in flight: one thread that writes, commits and retires, while the training goes on.

The training thread takes a snapshot (`snapshot.py`) and hands it over. In the thread follow, in this order:

1. `begin`: the files are written, then the manifest (`write.py`). Now the checkpoint is *staged*.
2. `commit`: `commit_staged` appends the log entry, and applies the retention policies. Now it is *committed*.
3. `then`: what needs the entry, such as an evaluation or TensorBoard's files.

Of several linked hosts, each has such a thread, which writes its share; only the chief's stages and commits.

There is one save at a time. After a failure the thread runs nothing until the failure has been raised in the training
thread, so nothing is committed on top of what failed. All hosts wait for the save in flight together. Until it is
committed, the checkpoint is known by a reference without digests, `CheckpointRef.in_flight`.

In line (step 0, short memory, another process that commits), the training thread does the same: `stage_checkpoint` of
`write.py`, then `commit_staged`, which compares the store's files with the manifest if another process wrote them.
Nothing here needs TensorFlow, because an image that only commits has none.
"""

import contextvars
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from baton.tasks.foundation.checkpoint.retention import apply_retention, files_to_delete, retention_policies
from baton.tasks.foundation.checkpoint.verify import verify_checkpoint
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.log_entry import Commit, Entry
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import (
    AcceleratorLost,
    BlowUp,
    DamagedCheckpoint,
    NonFinite,
    StaleWriter,
    StorageError,
)
from baton.tasks.foundation.log.appends import commit
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.collectives import Hosts
from baton.tasks.foundation.storage.interface import best_effort
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE, beside
from baton.tasks.foundation.telemetry.events import Committed, Sink

_LOGGER = logging.getLogger(__name__)
# Added to the thread's nice value, so that a busy processor trains first. Threads that it starts inherit it.
_NICENESS: Final = 5


class AsyncSaves:
    """The thread that saves, one save after the other.

    All methods but the work itself are called by the training thread or the main thread. A signal may interrupt the
    main thread at any bytecode, so no method holds a Python lock. Use it as a context
    manager around a command: it waits for the save in flight at the end, however the command ends.

    Attributes:
        across_segments: whether a save may still be in flight when its segment has ended. False where another process
            commits, or reads the answer of the stage: then the last save of a segment is made in line.
        memory_was_short: whether a save was made in line because memory was short; it is reported once.
    """

    def __init__(self, *, across_segments: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare it; the thread starts with the first save.

        Args:
            across_segments: see the attribute.
            clock: monotonic time in seconds.
        """
        self.across_segments = across_segments
        self.memory_was_short = False
        self._clock = clock
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._faults: list[BaseException] = []
        self._begun = self._over = 0
        self._began_at = 0.0
        self._staged: CheckpointRef | None = None
        self._newest: Entry | None = None
        self._last_seconds: float | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, where: TracebackType | None
    ) -> None:
        """Wait for the save in flight, and end the thread.

        Raises:
            BatonError: the save failed. It is of an earlier step than the error of the training, so it comes first.
        """
        try:
            if fault is None:
                self.wait()
            elif isinstance(fault, Exception):
                self._join()
                earlier = self._take_fault()
                if earlier is not None:
                    raise earlier from fault
            else:
                # The process was asked to stop; the grace period has begun.
                self._join(PROCESS_DEADLINE.remaining())
                for failed in self._faults:
                    _LOGGER.warning("the save in flight was not committed: %s", failed)
        finally:
            self._closed = True
            self._jobs.put(None)

    @property
    def busy(self) -> bool:
        """Whether a save, or work that follows it, is in flight."""
        return self._over != self._begun

    @property
    def failed(self) -> bool:
        """Whether a failure waits to be raised by `wait` or `begin`."""
        return bool(self._faults)

    @property
    def newest(self) -> Entry | None:
        """The log entry of the newest save that is committed; None if none is."""
        return self._newest

    def seconds_of_save(self) -> float:
        """Estimate of the seconds until a save that begins now is over, with the one in flight before it.

        It counts on the duration of the last save. Before any is over, it counts on what the first has taken so far.
        """
        taken = self._clock() - self._began_at if self.busy else 0.0
        typical = taken if self._last_seconds is None else self._last_seconds
        left = max(typical - taken, 0.0) if self.busy else 0.0
        return left + typical

    def begin(self, write: Callable[[], CheckpointRef | None]) -> None:
        """Begin a save. Waits until the save before is over.

        Args:
            write: stages the checkpoint; it returns None on hosts other than the chief, which write their share.

        Raises:
            BatonError: the save before failed.
        """
        self.wait()
        self._began_at = self._clock()

        def stage() -> None:
            self._staged = None
            self._staged = write()

        self._submit(stage)

    def commit(self, commit: Callable[[CheckpointRef], Entry]) -> None:
        """Commit the save in flight once it is staged.

        Args:
            commit: gets the staged checkpoint, and returns its log entry.
        """

        def commit_it() -> None:
            if self._staged is None:
                raise AssertionError("nothing is staged")
            self._newest = commit(self._staged)
            self._staged = None
            self._last_seconds = self._clock() - self._began_at

        self._submit(commit_it)

    def then(self, work: Callable[[Entry], None]) -> None:
        """Run work after the save in flight is committed; nothing is run if it fails.

        Args:
            work: gets the log entry of the save.
        """

        def follow() -> None:
            if self._newest is None:
                raise AssertionError("no save is committed")
            work(self._newest)

        self._submit(follow)

    def wait(self) -> Entry | None:
        """Wait for everything in flight.

        Returns:
            The log entry of the newest save that is committed; None if none is.

        Raises:
            BatonError: a save, or work that follows it, failed.
        """
        self._join()
        fault = self._take_fault()
        if fault is not None:
            raise fault
        return self._newest

    def _take_fault(self) -> BaseException | None:
        try:
            return self._faults.pop()
        except IndexError:  # none, or work that a signal abandoned has taken it
            return None

    def _join(self, seconds: float = math.inf) -> None:
        """Wait until the thread has run everything that it was given, at most for `seconds`."""
        if not self.busy and not self._faults:
            return
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._jobs.put(lambda: done.put(None))
        with suppress(queue.Empty):
            done.get(timeout=None if math.isinf(seconds) else seconds)

    def _submit(self, work: Callable[[], None]) -> None:
        if self._closed:
            raise AssertionError("no save begins after the end of the command")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="baton-save", daemon=True)
            self._thread.start()
        # Prefect's settings and flow run, and what sinks read, are context variables.
        context = contextvars.copy_context()
        self._begun += 1
        self._jobs.put(lambda: self._run(context, work))

    def _run(self, context: contextvars.Context, work: Callable[[], None]) -> None:
        try:
            if not self._faults:
                context.run(work)
        except BaseException as fault:  # noqa: BLE001 - raised in the training thread
            self._faults.append(fault)
        finally:
            self._over += 1

    def _serve(self) -> None:
        with suppress(OSError):  # a system may refuse, and then saving takes its share of the processor
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
        while True:
            job = self._jobs.get()
            if job is None:
                return
            job()
            del job  # it refers to a snapshot


def commit_staged(log: RunLog, body: Commit, *, spec: RunSpec, telemetry: Sink, verified: bool = False) -> Entry:
    """Verify a staged checkpoint against its manifest, commit it, and apply the retention policies.

    Args:
        body: the log entry to write; it names the checkpoint.
        spec: the run file, whose metadata the entry gets.
        telemetry: receives `Committed`.
        verified: whether this process has just written the files, and compared what the store holds with what it sent.

    Returns:
        The entry as it is in the log; the earlier one if this commit was made before.

    Raises:
        StaleWriter: another writer moved the tip first.
        DamagedCheckpoint: the store holds other bytes than the manifest says; nothing is committed.
    """
    staged = body.checkpoint
    if not verified:
        _verify(log, staged)
    before = log.head_seen()
    with beside(lambda: files_to_delete(log.home, before)) as listed:
        try:
            entry = commit(log, body.model_copy(update={"metadata": spec.metadata}))
        except StaleWriter:
            with suppress(StorageError):  # the next commit deletes what is left
                log.home.delete(staged.path)
            raise
        telemetry.emit(Committed.of(body))
        with best_effort(log.home, "older checkpoints could not be retired", then="the next commit tries again"):
            apply_retention(log, retention_policies(spec), attempt=staged.attempt, listed=listed.result())
    return entry


def _verify(log: RunLog, staged: CheckpointRef) -> None:
    try:
        verify_checkpoint(log.home, staged)
    except DamagedCheckpoint:
        head = log.head()
        if head is None or head.base == staged.base:
            raise


_COMMITTED: Final = 0.0
_NOT_FINITE: Final = 1.0
_FAILED: Final = 2.0


def wait_for_save(saves: AsyncSaves | None, hosts: Hosts) -> int | None:
    """Wait for the save in flight, if there is one. This is a collective: all hosts call it in the same order.

    Args:
        saves: of this process; only the chief's are committed. None: saves are made in line.

    Returns:
        The number of the log entry of the newest save that is committed, on every host; None if none is.

    Raises:
        NonFinite: the state in flight has weights that are not finite; raised on every host.
        AcceleratorLost: on hosts other than the chief: a save of the chief failed.
        BatonError: on the chief, and on the host where it failed: what failed.
    """
    if saves is None:
        return None
    fault: Exception | None = None
    number, step = -1, 0
    try:
        entry = saves.wait()
        number = -1 if entry is None else entry.number
    except Exception as error:  # noqa: BLE001 - raised below, once the other hosts know
        fault = error
        step = error.step if isinstance(error, BlowUp) else 0
    status = _COMMITTED if fault is None else _NOT_FINITE if isinstance(fault, BlowUp) else _FAILED
    status, newest, step = hosts.gather_from_hosts([status, number, step])[0].tolist()
    if fault is not None:
        raise fault
    if status == _NOT_FINITE:
        raise found_by_chief(int(step))
    if status == _FAILED:
        raise AcceleratorLost(
            "the chief could not commit a checkpoint; its log says why. Committed checkpoints are kept; run the same "
            "command again on all workers to continue"
        )
    return None if newest < 0 else int(newest)


def found_by_chief(step: int, *, where: str = "") -> NonFinite:
    """The error of the other hosts when the chief finds weights that are not finite.

    Args:
        where: added to the step, for example ", in segment 2".
    """
    return NonFinite(f"step {step}{where}: the chief found weights that are not finite", step=step)
