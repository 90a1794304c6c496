"""End a process that hangs, with exit code 3, so that whoever started it can start it again.

A collective that never returns, a stuck input or a store that never answers blocks the training thread inside
TensorFlow, where no exception reaches it. So another thread watches, records the stacks of all threads, and exits.
"""

import contextvars
import faulthandler
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import IO, Final, Self

from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.messages import shown_lines
from tasks.foundation.stops.hang_rule import Hang, HangRule
from tasks.foundation.stops.process_stop import PROCESS_STOP, no_save
from tasks.foundation.storage.transfers import DOWNLOADED
from tasks.foundation.telemetry.events import Event, Hung, Sink
from tasks.foundation.telemetry.ledger import Ledger

_EXIT_CODE: Final = 3  # stopped with work left to do
_STDERR: Final = 2
_RECORD_SECONDS: Final = 10.0
_LAST_RECORD_SECONDS: Final = 5.0
_LANDING_SECONDS, _MAX_LANDING_SECONDS = 60.0, 600.0
_ACTION_SECONDS: Final = 0.5
_POLL_SECONDS: Final = 0.05
_STACKS_CHARACTERS: Final = 40_000
_THREAD: Final = re.compile(r"[Tt]hread 0x([0-9a-f]+)")
_TELLING: Final = ("baton-work", "baton-committer", "MainThread")
_WAITS_FOR_SAVE: Final = frozenset({"commit", "the save in flight"})


class HangWatch:
    """A `Sink` that follows what the training does, and ends the process if that hangs; a context manager.

    The attempt's record and the flow run's log get the stacks of all threads. A save in flight may still land.
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
        """Let a save in flight land before the process ends.

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
        """Record the hang, let the save in flight land, and exit; each with a deadline, as the store may hang."""
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
                until = time.monotonic() + min(max(self._seconds_of_save(), _LANDING_SECONDS), _MAX_LANDING_SECONDS)
                while self._saving() and time.monotonic() < until:
                    time.sleep(_POLL_SECONDS)
                _run_within(_LAST_RECORD_SECONDS, [self._ledger.heartbeat])
            _run_within(_ACTION_SECONDS, PROCESS_STOP.before_exit)
        finally:
            self._leave(_EXIT_CODE)


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
