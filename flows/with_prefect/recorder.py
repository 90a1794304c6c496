"""The record of what a command does, in Prefect, which is best effort and costs the training nothing.

`Recorder`, a reader of the trainer's events, starts a process of low priority when the run is admitted, and passes the
events on to it. It never waits for that process while the run trains, and imports no Prefect. `main`, in that process,
imports Prefect, serves its API if no server is configured, opens the run to read its log, and runs a flow: it creates
the flow run and its task runs, keeps its log and its artifacts, and ends it as the training ended. It answers in lines
too: a state of its own, or that the flow run was cancelled.

If there is no flow run, whatever the reason, one note says why, and the training goes on. When the training has ended,
Prefect has a limited time to record the rest. Only stages in other processes need a flow run, whose children they are:
then the command trains in it (`run_flows.py`), as a deployment does.
"""

import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from baton.flows.opened_run import OpenedRun
from baton.flows.process import exits_with, mask_library_output, start_module
from baton.flows.process_start import fast_imports
from baton.flows.with_prefect.record import CANCELLED, PrefectRunLogger, recorded, state_of
from baton.flows.with_prefect.server import connect
from baton.flows.with_prefect.task_runs import logger_of_stage
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import BatonError, error_words
from baton.tasks.foundation.telemetry.events import Begun, Ended, Event, Note, Several, Sink, line_of, tell

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State


# After a stop, Prefect has this long to record it: the machine may disappear.
_STOP_SECONDS: Final = 10.0
# So long has Prefect, when the training has ended and its server responds, to create the flow run and record its end.
_LAST_SECONDS: Final = 30.0
# So long may it take until the server responds, which has limits of its own.
_CONNECT_SECONDS: Final = 180.0
_MOST_LINES: Final = 10_000  # that wait for a process which reads none; later ones are lost
_NICENESS: Final = 5  # lower, and the end of a short run waits long on a machine that has other work


class Recorder:
    """A `Sink` that has a training recorded, in another process, from the event that it has begun."""

    def __init__(
        self,
        run: Mapping[str, object],
        *,
        notes: Sink,
        on_cancelled: Callable[[], None],
        start: "Callable[..., subprocess.Popen[bytes]] | None" = None,
        last_seconds: float = _LAST_SECONDS,
    ) -> None:
        """Start nothing yet.

        Args:
            run: what the process opens and shows: file, overrides; parameters of `run_as_train_run`.
            notes: receives a note of what Prefect does not record.
            on_cancelled: called once, in a thread, when the flow run was cancelled.
            start: starts the process, with the keyword arguments of `Popen`; None: `main` in a new one.
            last_seconds: limit of the wait for Prefect when the training has ended.
        """
        self._notes = notes
        self._on_cancelled = on_cancelled
        self._start = functools.partial(start_module, __name__) if start is None else start
        self._last_seconds = last_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MOST_LINES)
        self._state = ""  # the newest that the process said: connected, begun or recorded
        self._connected = threading.Event()  # with Prefect's server, or it never will be
        self._told = False  # a note says what is not recorded
        self._cancelled = False  # the flow run was
        self._over = threading.Event()  # the process says nothing more
        self._put(json.dumps(run).encode() + b"\n")

    def emit(self, event: Event) -> None:
        """Pass an event on; the first one that counts is that the training begins."""
        if isinstance(event, Begun):
            self._begin()
        elif self._process is not None and not isinstance(event, Ended):  # `close` says it, with what it knows
            self._put(line_of(event))

    def close(self, ended: Ended) -> None:
        """Wait until Prefect has recorded how the training ended, for a limited time."""
        if self._process is None:
            return
        if self._cancelled and ended.stopped:
            ended = replace(ended, stopped=CANCELLED)
        if ended.stopped and not self._state:  # a server that is not up yet delays no stop
            self._process.kill()
            self._note_absence("it was stopped before Prefect had begun its flow run")
            return
        for last in (line_of(ended), None):
            self._put(last)
        self._connected.wait(_CONNECT_SECONDS)  # a server may be starting
        self._wait_for_end(self._process, _STOP_SECONDS if ended.stopped else self._last_seconds)

    def _begin(self) -> None:
        try:
            # No signal of the terminal reaches it: it records how the command was stopped.
            self._process = self._start(process_group=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as fault:
            self._note_absence(f"its process cannot be started ({fault.strerror or fault})")
            return
        for work in (self._write, self._read):
            threading.Thread(target=work, args=(self._process,), name="baton-recorder", daemon=True).start()

    def _wait_for_end(self, process: "subprocess.Popen[bytes]", seconds: float) -> None:
        """Wait until the process has ended, and note what it did not record."""
        try:
            why = f"its process ended with code {process.wait(seconds)}"
            self._over.wait(seconds)  # its last words
        except subprocess.TimeoutExpired:
            process.kill()
            why = f"no response within {seconds:g} s"
        if self._state != "recorded":
            self._note_absence(why)

    def _note_absence(self, why: str) -> None:
        if not self._told:
            self._told = True
            begun = self._state == "begun"
            what = "Prefect did not record the result" if begun else "this run is not recorded in Prefect"
            self._notes.emit(Note(text=f"{what}: {why}", warning=True))
        self._connected.set()

    def _put(self, line: bytes | None) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def _write(self, process: "subprocess.Popen[bytes]") -> None:
        """The thread that waits for the pipe."""
        pipe = process.stdin
        with contextlib.suppress(OSError):  # the process has ended, which `_read` notices
            while pipe is not None and (line := self._lines.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        for line in process.stdout or ():
            match json.loads(line):
                case {"state": state}:
                    self._state = state
                    self._connected.set()
                case {"note": text}:
                    self._notes.emit(Note(text=text, warning=True))
                case {"absent": why}:
                    self._note_absence(why)
                case {"cancelled": True} if not self._cancelled:
                    self._cancelled = True
                    self._notes.emit(Note(text="the flow run was cancelled in Prefect", warning=True))
                    self._on_cancelled()
        self._connected.set()
        self._over.set()


class _Answers:
    """The lines to the command; a `Sink` of notes."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, **values: object) -> None:
        with self._lock, contextlib.suppress(OSError):  # the command has ended, and this process is about to
            self._stream.write(json.dumps(values) + "\n")
            self._stream.flush()

    def emit(self, event: Event) -> None:
        if isinstance(event, Note):
            self.send(note=event.text)


def main() -> int:
    """Record what the command tells on standard input, and answer on standard output."""
    os.nice(_NICENESS)  # the embedded server has it too
    # Only the command says how the training ends. The server's threads, which begin later, inherit this.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    mask_library_output()
    answers = _Answers(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # whatever a library prints is no answer
    given = json.loads(sys.stdin.readline())
    try:
        with fast_imports():
            is_embedded = connect()
            # The tasks' threads use this later. Prefect's modules import each other in circles: if two threads import
            # them at once, Python breaks the deadlock by giving one of them half a module.
            import prefect.task_engine  # noqa: F401
            from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

            from baton.flows.with_prefect.run_flows import run_as_train_run
        answers.send(state="connected")
        run = OpenedRun.open(load_run_file(Path(given["file"]), given["overrides"]))
        work = functools.partial(_record, run, answers)
        # With heartbeats a flow run ends up to a second later. An embedded server, which ends with it, needs none.
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None} if is_embedded else {}):
            known = run.with_recorded_examples(run.log.head()).spec
            run_as_train_run(work, known, given["parameters"])
    except BaseException as fault:  # noqa: BLE001 - the command notes it
        why = str(fault) if isinstance(fault, BatonError) else error_words(fault)
        answers.send(absent=why.splitlines()[0])
        return 0
    answers.send(state="recorded")
    return 0


class _LastEvent:
    """A `Sink` that keeps how the training ended."""

    ended: Ended | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, Ended):
            self.ended = event


def _record(run: OpenedRun, answers: _Answers) -> "State[object]":
    """The flow: it follows the lines of the command until the training has ended."""
    answers.send(state="begun")
    last = _LastEvent()
    cancelled = functools.partial(answers.send, cancelled=True)
    logger = PrefectRunLogger(logger_of_stage)
    with recorded(run, notes=answers, on_cancelled=cancelled, logger=logger, seconds=_STOP_SECONDS) as reader:
        sinks = Several((reader, last))
        for line in sys.stdin:
            tell(sinks, line)
            if last.ended is not None:
                break
    ended = last.ended or Ended(exit_code=-1, crashed="the process of the command has ended")
    return state_of(ended, run.spec)


if __name__ == "__main__":
    sys.exit(exits_with(main()))
