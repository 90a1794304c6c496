"""Ends a process that hangs, with exit code 3, so that whoever started it can start it again.

A collective that never returns, a stuck input or a store that never answers blocks the training thread inside
TensorFlow, where no exception reaches it. So another thread watches, records the stacks of all threads, and exits.

A process counts as hung when nothing that it waits for has ended within a limit, counted while the process runs. An
inner loop lasts about a second, or as long as one step, so a short limit applies to it. Six times that limit applies
to what is of unknown length: restore, compilation and the first inner loop after it, evaluation, callbacks, commits. A
process that computes during these is not hung, and none is while bytes of a download arrive. Preparing data, waiting
for a remote stage and what follows the training have no limit: they have limits of their own, or depend on a machine
that may come late. Once the process was asked to stop, an inner loop may last as long as the grace period.
"""

import contextvars
import faulthandler
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Final, Literal, Self

from baton.tasks.foundation.contracts.run_spec import StopSpec
from baton.tasks.foundation.machine.stops import PROCESS_STOP, RESUMABLE, no_save
from baton.tasks.foundation.storage.transfers import DOWNLOADED
from baton.tasks.foundation.telemetry.events import Committed, Event, Hung, Phase, Sink, Training, Waiting
from baton.tasks.foundation.telemetry.ledger import Ledger
from baton.tasks.foundation.text import shown_lines

_AUTO_SECONDS: Final = 600.0
_AUTO_LOOPS: Final = 20.0
# A limit that the user has set too low for this model would end every attempt.
_LEAST_LOOPS: Final = 3.0
_LONGER: Final = 6.0
# A process that uses more than this share of one processor computes. Heartbeats and polling use less than 0.01.
_COMPUTES: Final = 0.1
_MAX_CHECK_SECONDS, _CHECKS_PER_LIMIT = 5.0, 20.0
_LIMITED: Final = frozenset({"build", "restore", "compile", "train", "stage", "commit", "evaluate"})
_INNER_LOOP: Final = "an inner loop"
_FIRST_INNER_LOOP: Final = "the first inner loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """What did not end.

    Attributes:
        what: an inner loop, a phase of the ledger, or what the training waited for.
        seconds: since the last sign of life.
        limit: in seconds.
        step: the last step that was trained; None if there was none.
    """

    what: str
    seconds: float
    limit: float
    step: int | None

    @property
    def message(self) -> str:
        """One line for people."""
        where = "" if self.step is None else f" after step {self.step}"
        limit = f"limit {self.limit:.0f} s, from stop.hang_seconds"
        if self.what == _INNER_LOOP:
            return f"no inner loop has ended for {self.seconds:.0f} s{where} ({limit})"
        return f"{self.what} has not ended for {self.seconds:.0f} s{where}, and the process does not compute ({limit})"


class HangRule:
    """A `Sink` that follows what the training does, and says when it hangs. All methods are thread-safe.

    Attributes:
        check_seconds: how often to call `check`.
    """

    def __init__(
        self,
        hang_seconds: Literal["auto"] | float | None,
        *,
        clock: Callable[[], float],
        processor_seconds: Callable[[], float],
        downloaded_bytes: Callable[[], int],
        stopping: Callable[[], bool] = lambda: False,
        grace_seconds: float = math.inf,
    ) -> None:
        """Begin without a limit: the process starts up.

        Args:
            hang_seconds: see `StopSpec`.
            clock: monotonic time in seconds.
            processor_seconds: processor time that this process has used so far.
            downloaded_bytes: what this process has downloaded so far.
            stopping: whether the process was asked to stop.
            grace_seconds: an inner loop has no longer limit then, or three times the longest one if that is more.
        """
        self._set = hang_seconds
        self._base = _AUTO_SECONDS if not isinstance(hang_seconds, float) else hang_seconds
        self.check_seconds = min(self._base / _CHECKS_PER_LIMIT, _MAX_CHECK_SECONDS)
        # A check that comes this late means that the process was stopped (SIGSTOP), or the machine suspended.
        self._latest = self.check_seconds + max(self._base / 2, 1.0)
        self._clock, self._processor_seconds, self._downloaded_bytes = clock, processor_seconds, downloaded_bytes
        self._stopping, self._grace = stopping, grace_seconds
        self._lock = threading.RLock()  # reentrant: a signal handler may emit
        self._what: str | None = None
        self._began = self._since = self._checked = clock()
        self._used, self._downloaded = processor_seconds(), downloaded_bytes()
        self._longest = 0.0
        self._first: float | None = None  # duration of the first inner loop, while no other one has ended
        self._compiles = True
        self._step: int | None = None

    def emit(self, event: Event) -> None:
        """Take notice of one event: most are signs of life."""
        with self._lock:
            match event:
                case Phase(cause=cause):
                    self._compiles = self._compiles or cause == "compile"
                    first = _FIRST_INNER_LOOP if self._compiles else _INNER_LOOP
                    self._begin(first if cause == "train" else cause if cause in _LIMITED else None)
                case Waiting(on=on):
                    self._end_inner_loop()  # callbacks follow an inner loop, before its `Training`
                    self._begin(None if on == "a remote stage" else on)
                case Training(step=step):
                    self._end_inner_loop()
                    self._compiles, self._step = False, step
                    self._begin(_INNER_LOOP)
                case Committed() if self._what != _INNER_LOOP:
                    self._since = self._clock()
                case _:
                    pass

    def check(self) -> Hang | None:
        """Return what hangs, if anything does. Call it every `check_seconds`."""
        with self._lock:
            now, used = self._clock(), self._processor_seconds()
            elapsed, computed = now - self._checked, used - self._used
            self._checked, self._used = now, used
            computes = self._what != _INNER_LOOP and computed >= _COMPUTES * elapsed
            downloaded, before = self._downloaded_bytes(), self._downloaded
            self._downloaded = downloaded
            lives = computes or downloaded > before or elapsed > self._latest
            # Time in which this thread did not run may be time in which no thread did.
            missed = max(elapsed - 2 * self.check_seconds, 0.0)
            self._began = min(self._began + missed, now)
            self._since = now if lives else min(self._since + missed, now)
            limit, silent = self.limit, now - self._since
            if self._what is None or limit is None or silent <= limit:
                return None
            return Hang(what=self._what, seconds=silent, limit=limit, step=self._step)

    @property
    def limit(self) -> float | None:
        """Seconds without a sign of life that are allowed now; None: no limit."""
        if self._set is None or self._what is None:
            return None
        loops = _AUTO_LOOPS if self._set == "auto" else _LEAST_LOOPS
        # The first inner loop includes compilation on some devices, so it says little about the others.
        inner = max(self._base, loops * self._longest, _LEAST_LOOPS * (self._first or 0.0))
        if self._what == _INNER_LOOP and self._stopping():
            known = max(self._longest, self._first or 0.0)
            return min(inner, max(self._grace, _LEAST_LOOPS * known))
        return inner if self._what == _INNER_LOOP else _LONGER * inner

    def _begin(self, what: str | None) -> None:
        self._what = what
        self._began = self._since = self._clock()

    def _end_inner_loop(self) -> None:
        """Remember how long the inner loop took, if one ends here."""
        now = self._clock()
        seconds = now - self._began
        if now - self._checked > self._latest:
            return  # the process was stopped meanwhile
        if self._what == _FIRST_INNER_LOOP:
            self._first = seconds
        elif self._what == _INNER_LOOP:
            self._longest, self._first = max(self._longest, seconds), None


_STDERR: Final = 2
_RECORD_SECONDS: Final = 10.0
_LAST_RECORD_SECONDS: Final = 5.0
_SAVE_SECONDS, _MAX_SAVE_SECONDS = 60.0, 600.0
_POLL_SECONDS: Final = 0.05
_STACKS_CHARACTERS: Final = 40_000
_THREAD: Final = re.compile(r"[Tt]hread 0x([0-9a-f]+)")
_TELLING: Final = ("baton-work", "baton-save", "MainThread")
_WAITS_FOR_SAVE: Final = frozenset({"commit", "the save in flight"})


class HangWatch:
    """A `Sink` that follows what the training does, and ends the process if that hangs; a context manager.

    The attempt's record and the flow run's log get the stacks of all threads. It waits for a save in flight.
    """

    def __init__(
        self,
        spec: StopSpec,
        *,
        ledger: Ledger,
        telemetry: Sink,
        whole_process: bool = True,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        """Watch nothing yet.

        Args:
            spec: has `hang_seconds`.
            ledger: records the attempt.
            telemetry: receives `Hung`, besides standard error.
            whole_process: whether the process runs only this. If not, such as in a notebook, it is not ended.
            clock: monotonic time in seconds.
            leave: ends the process.
        """
        self._rule = HangRule(
            spec.hang_seconds,
            clock=clock,
            processor_seconds=time.process_time,
            downloaded_bytes=lambda: DOWNLOADED.bytes,
            stopping=lambda: PROCESS_STOP.last_stop is not None,
            grace_seconds=spec.grace_seconds,
        )
        self._active = whole_process and spec.hang_seconds is not None
        self._ledger, self._telemetry = ledger, telemetry
        self._leave = leave
        self._saving: Callable[[], bool] = lambda: False
        self._seconds_of_save: Callable[[], float] = lambda: 0.0
        self._ended = threading.Event()
        # Sinks may read context variables (Prefect's logger does), and a new thread has none.
        self._context = contextvars.copy_context()

    def __enter__(self) -> Self:
        if self._active:
            threading.Thread(target=self._watch, name="baton-hang-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, where: TracebackType | None
    ) -> None:
        self._ended.set()
        PROCESS_STOP.save_in_flight = no_save

    def emit(self, event: Event) -> None:
        """Take notice of one event."""
        self._rule.emit(event)

    def follow_saves(self, saving: Callable[[], bool], seconds_of_save: Callable[[], float]) -> None:
        """Wait for a save in flight before the process ends.

        Args:
            saving: whether one is in flight.
            seconds_of_save: estimate of how long one takes.
        """
        self._saving, self._seconds_of_save = saving, seconds_of_save
        PROCESS_STOP.save_in_flight = saving

    def _watch(self) -> None:
        while not self._ended.wait(self._rule.check_seconds):
            hang = self._rule.check()
            if hang is not None:
                self._end(hang)
                return

    def _end(self, hang: Hang) -> None:
        """Record the hang, wait for the save in flight, and exit; each with a deadline, as the store may hang."""
        try:
            event = Hung(message=hang.message, stacks=stacks_of_all_threads()[:_STACKS_CHARACTERS])
            _run_within(
                _RECORD_SECONDS,
                [
                    lambda: _write_to_stderr(event),
                    lambda: self._ledger.hung(event.message, event.stacks),
                    lambda: self._context.run(self._telemetry.emit, event),
                ],
            )
            if hang.what not in _WAITS_FOR_SAVE and self._saving():
                until = time.monotonic() + min(max(self._seconds_of_save(), _SAVE_SECONDS), _MAX_SAVE_SECONDS)
                while self._saving() and time.monotonic() < until:
                    time.sleep(_POLL_SECONDS)
                _run_within(_LAST_RECORD_SECONDS, [self._ledger.heartbeat])
        finally:
            self._leave(RESUMABLE)


def stacks_of_all_threads() -> str:
    """The Python stacks of all threads of this process, with the names of the threads. Reads no source files."""
    with _memory_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    names = {thread.ident: thread.name for thread in threading.enumerate()}

    def named(found: re.Match[str]) -> str:
        name = names.get(int(found[1], 16))
        return found[0] if name is None else f"{found[0]} {name}"

    threads = _THREAD.sub(named, text).strip().split("\n\n")
    # The work thread is among the oldest, which come last; the newest ones are those of pools.
    threads.sort(key=lambda thread: not any(f" {name} " in thread.partition("\n")[0] for name in _TELLING))
    return "\n\n".join(threads)


def _memory_file() -> IO[bytes]:
    """An empty file; in memory where the system has such files, as the disk may be what hangs."""
    return os.fdopen(os.memfd_create("stacks"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _write_to_stderr(event: Hung) -> None:
    text = shown_lines(f"hung: {event.message}\n{event.stacks}")
    with suppress(OSError):  # closed
        # Write to the file descriptor: another thread may hold the stream.
        os.write(_STDERR, f"\n{text}\n".encode())


def _run_within(seconds: float, actions: Iterable[Callable[[], object]]) -> None:
    """Run actions side by side, and wait for them at most for `seconds`."""
    threads = [threading.Thread(target=_run, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))


def _run(action: Callable[[], object]) -> None:
    with suppress(Exception):  # the process ends anyway
        action()
