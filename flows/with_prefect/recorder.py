"""The record of what a command does, in Prefect, which is best effort and costs the training nothing.

`Recorder`, in the command, starts a process of low priority and tells it, one line of JSON each, what happens: events,
stages that begin and end, and how the training ended. It never waits for that process while it trains, and imports no
Prefect. `main`, in that process, imports Prefect, serves its API if no server is configured, opens the run to read its
log, and runs a flow: it creates the flow run and its task runs, keeps its log and its artifacts, and ends it as the
training ended. It answers in lines too: a state of its own, or that the flow run was cancelled.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Final, Self

from baton.flows.admit import Admitted
from baton.flows.opened_run import OpenedRun
from baton.flows.process import Terminated, exits_with, is_clean_stop, mask_library_output, start_module
from baton.flows.process_start import fast_imports
from baton.flows.result import RelayResult, leaves_time
from baton.flows.with_prefect.artifacts import ArtifactPublisher, is_stoppable, stop_as_cancelled
from baton.flows.with_prefect.record import End, PrefectRunLogger, target_name
from baton.flows.with_prefect.server import connect
from baton.flows.with_prefect.task_runs import (
    PrefectTasks,
    StageEnd,
    StageRecord,
    logger_of_stage,
    stage_of_thread,
    words_of,
)
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.telemetry.events import Committed, Evaluated, Event, Hung, Note, Several, Sink, Training

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
_EVENTS: Final[dict[str, Callable[..., Event]]] = {
    kind.__name__: kind for kind in (Note, Training, Committed, Evaluated, Hung)
}


class Recorder:
    """Records the training in a block, in another process: a `Sink` of events, and the `StageRecords` of stages.

    After a signal the flow run ends as `Stopped`; after an error, as Prefect's engine would end it.
    """

    def __init__(
        self,
        admitted: Admitted,
        parameters: Mapping[str, object],
        overrides: Sequence[str],
        *,
        notes: Sink,
        start: "Callable[..., subprocess.Popen[bytes]] | None" = None,
        last_seconds: float = _LAST_SECONDS,
    ) -> None:
        """Start nothing yet.

        Args:
            parameters: see `run_as_train_run`.
            overrides: with which the process opens the run.
            notes: receives a note of what Prefect does not record.
            start: starts the process, with the keyword arguments of `Popen`; None: `main` in a new one.
            last_seconds: limit of the wait for Prefect when the training has ended.
        """
        self._notes = notes
        self._start = functools.partial(start_module, __name__) if start is None else start
        self._last_seconds = last_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MOST_LINES)
        self._state = ""  # the newest that the process said: connected, begun or recorded
        self._connected = threading.Event()  # with Prefect's server, or it never will be
        self._told = False  # a note says what is not recorded
        self._cancelled = False  # the flow run was, so this process stops
        self._ended = False  # the end of the training was said
        self._over = threading.Event()  # the process says nothing more
        self._send(
            file=str(admitted.run.file),
            overrides=list(overrides),
            parameters=dict(parameters),
            name=target_name(admitted.run.spec, admitted.goal.until_step),
        )

    def __enter__(self) -> Self:
        try:
            # No signal of the terminal reaches it: it records how the command was stopped.
            self._process = self._start(process_group=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as fault:
            self._note_absence(f"its process cannot be started ({fault.strerror or fault})")
            return self
        for work in (self._write, self._read):
            threading.Thread(target=work, args=(self._process,), name="baton-recorder", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        if fault is not None:
            self._end(End(kind="cancelled") if self._cancelled and is_clean_stop(fault) else End.of(fault))
        stopped = isinstance(fault, Terminated | KeyboardInterrupt)
        if stopped and not self._state:  # a server that is not up yet delays no stop
            self._process.kill()
            self._note_absence("it was stopped before Prefect had begun its flow run")
            return
        self._connected.wait(_CONNECT_SECONDS)  # a server may be starting
        self._wait_for_end(_STOP_SECONDS if stopped else self._last_seconds)

    def emit(self, event: Event) -> None:
        """Send an event."""
        if type(event).__name__ not in _EVENTS:
            return
        stage = stage_of_thread()
        values = {each.name: getattr(event, each.name) for each in fields(event)}
        self._send(event=type(event).__name__, values=values, stage=None if stage is None else stage.number)
        if isinstance(event, Hung) and self._state == "begun":  # this process ends in a moment
            self._end(End(kind="crashed", text=f"hung: {event.message}"))
            self._wait_for_end(_STOP_SECONDS)

    def begin(self, record: StageRecord) -> None:
        """A stage begins."""
        self._send(begins=record.number, label=record.label, name=record.name)

    def end(self, record: StageRecord) -> None:
        """A stage has ended."""
        self._send(ends=record.number, end=asdict(record.end))

    def reached(self, result: RelayResult) -> None:
        """Say what the training reached. Prefect records it while the rest of the block runs."""
        self._end(End.of_result(result))

    def _end(self, end: End) -> None:
        if not self._ended:
            self._ended = True
            self._send(training=end.model_dump_json())
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait(None)

    def _wait_for_end(self, seconds: float) -> None:
        """Wait until the process has ended, and note what it did not record."""
        process = self._process
        if process is None:
            return
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

    def _send(self, **values: object) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(json.dumps(values, default=dict).encode() + b"\n")

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
                case {"cancelled": True}:
                    self._stop()
        self._connected.set()
        self._over.set()

    def _stop(self) -> None:
        if not self._cancelled and not self._ended and is_stoppable():
            self._cancelled = True
            stop_as_cancelled(self._notes)


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
            run_as_train_run(work, run.spec, name=given["name"], parameters=given["parameters"])
    except BaseException as fault:  # noqa: BLE001 - the command notes it
        why = str(fault) if isinstance(fault, BatonError) else words_of(fault)
        answers.send(absent=why.splitlines()[0])
        return 0
    answers.send(state="recorded")
    return 0


def _record(run: OpenedRun, answers: _Answers) -> "State[object]":
    """The flow: it follows the lines of the command until the training has ended."""
    answers.send(state="begun")
    stages: dict[int, StageRecord] = {}
    end = End(kind="crashed", text="the process of the command has ended")
    cancelled = functools.partial(answers.send, cancelled=True)
    with ArtifactPublisher(run, notes=answers, on_cancelled=cancelled) as publisher, PrefectTasks(answers) as tasks:
        sinks = Several((PrefectRunLogger(logger_of_stage), publisher))
        for line in sys.stdin:
            match json.loads(line):
                case {"event": kind, "values": values, "stage": number}:
                    stage = stages.get(number)
                    with contextlib.nullcontext() if stage is None else stage.of_thread():
                        sinks.emit(_EVENTS[kind](**values))
                case {"begins": number, "label": label, "name": name}:
                    stages[number] = StageRecord(label, name, number)
                    tasks.begin(stages[number])
                case {"ends": number, "end": how} if number in stages:  # the line of its beginning may be lost
                    stages[number].end = StageEnd(**how)
                    tasks.end(stages.pop(number))
                case {"training": text}:
                    end = End.model_validate_json(text)
                    break
        for stage in stages.values():  # of a command that has ended
            tasks.end(stage)
        tasks.close(_STOP_SECONDS)
        if end.kind == "reached" and leaves_time(json.loads(end.text)["exit_reason"]):
            publisher.draw_curves()
    return end.state(run.spec)


if __name__ == "__main__":
    sys.exit(exits_with(main()))
