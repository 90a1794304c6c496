"""A training in a process of its own: starts `python -m baton.flows.train`, and hands its events to readers.

The trainer writes its events to a pipe, which has a descriptor of its own: what the user's code prints cannot get into
them. A thread reads the pipe, and gives each event to each reader. Readers cost the training nothing: what a slow one
does not take waits in the trainer's memory, and one that fails is left out from then on. What the trainer asks is
answered through another pipe, by another thread: a slow answer delays no event.

The trainer leads a process group, so that an interrupt of the terminal reaches it once. If this process has the
terminal, the trainer gets it meanwhile: `pdb` and `input` in the user's code work, and Ctrl-C and Ctrl-Z are for the
trainer, with which this process stops and goes on, as a shell's job. Where there is no terminal, an interrupt of this
process is passed on. If this process is killed, the kernel sends the trainer a SIGTERM: it commits, and ends.
"""

import contextvars
import logging
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from baton.flows.process import ChildSettings, start_module
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.machine.stops import PROCESS_STOP, STOP_SIGNALS
from baton.tasks.foundation.telemetry.events import (
    Ask,
    Asked,
    Ended,
    Event,
    Hung,
    Printed,
    Sink,
    StatefulOperations,
    answered,
    tell,
)
from baton.tasks.foundation.text import listed

_LOGGER = logging.getLogger(__name__)
_MODULE: Final = "baton.flows.train"
_LINES_SHOWN: Final = 15
_READ_BYTES: Final = 1 << 16
_LOOK_SECONDS: Final = 0.05


def trainer_words(
    file: Path,
    overrides: Sequence[str],
    *,
    until_step: int | None = None,
    max_segments: int | None = None,
    max_seconds: float | None = None,
    cuts: Sequence[int] = (),
    accept: Sequence[str] = (),
    try_again: bool = False,
    take_over: bool = False,
) -> list[str]:
    """Return the arguments of `baton.flows.train`, where they are explained."""
    words = [os.fspath(file), *(word for each in overrides for word in ("--set", each))]
    words += [word for step in cuts for word in ("--cut-at", str(step))]
    words += ["--accept", ",".join(accept)] if accept else []
    words += [word for word, is_set in (("--try-again", try_again), ("--take-over", take_over)) if is_set]
    numbers = {"--max-segments": max_segments, "--max-seconds": max_seconds, "--until-step": until_step}
    return words + [word for name, value in numbers.items() if value is not None for word in (name, str(value))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a trainer ended.

    Attributes:
        returncode: as in `subprocess`; -9 after a SIGKILL.
        ended: its last event; None if it crashed or was killed.
        printed: the last lines that it printed, if they were read.
        stateful_operations: `model.py:build_model: normal/RandomStandardNormal`; see `StatefulOperations`.
        killed: whether this process has killed it. Only a returncode of -9 shows that the signal ended it.
        hung: what did not end, if it ended because of that.
    """

    returncode: int
    ended: Ended | None = None
    printed: tuple[str, ...] = ()
    stateful_operations: str = ""
    killed: bool = False
    hung: str = ""

    def end(self, what: str) -> Ended:
        """Its last event, or one that says what is known of a kill, a crash or a hang.

        Args:
            what: names the training.
        """
        if self.ended is not None:
            return self.ended
        crashed = f"hung: {self.hung}" if self.hung else str(self.error(what))
        return Ended(exit_code=self.returncode if self.returncode > 0 else BatonError.exit_code, crashed=crashed)

    def error(self, what: str) -> BatonError:
        """The error that ended it: its own, or what is known of a kill, a crash or a stop.

        Args:
            what: names the training.
        """
        if self.ended is not None and self.ended.error is not None:
            return self.ended.error.to_error()
        if self.returncode == -signal.SIGKILL:
            return BatonError(
                f"the process of {what} was killed from outside; check whether the machine ran out of memory (dmesg), "
                "then use a smaller batch or a machine with more memory"
            )
        if self.ended is not None and self.ended.stopped:
            return BatonError(f"the process of {what} was stopped ({self.ended.stopped})")
        how = f"was ended by {signal.Signals(-self.returncode).name}" if self.returncode < 0 else "ended"
        details = self.printed[-_LINES_SHOWN:]
        end = f" with code {self.returncode}{'; the end of its output:' if details else ''}"
        return BatonError("\n".join([f"the process of {what} {how}{end}", *details]))


class Trainer:
    """One trainer process."""

    def __init__(
        self,
        words: Sequence[str],
        readers: Sequence[Sink],
        *,
        output: int | IO[bytes] | None = None,
        environment: dict[str, str] | None = None,
        own_session: bool = False,
        answer: Ask | None = None,
    ) -> None:
        """Start it.

        Args:
            words: arguments of `baton.flows.train`.
            readers: receive its events, in a thread.
            output: where its standard output and error go: a file; PIPE: to the readers, as `Printed` events; None: to
                those of this process.
            environment: more environment variables.
            own_session: whether it leads a session, so that what its user's code starts can be killed with it;
                otherwise it leads a process group.
            answer: answers what it asks, one question after the other, in a thread with this one's context; None: it
                may not ask, so all its stages run in its process.

        Raises:
            OSError: it cannot be started.
        """
        self._readers = list(readers)
        self._ended: Ended | None = None
        self._stateful_operations = self._hung = ""
        self._killed = False
        self._printed: deque[str] = deque(maxlen=_LINES_SHOWN)
        self._questions: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        (its_answers, answers), (events, its_events) = os.pipe(), os.pipe()
        settings: ChildSettings = {
            "stdin": None if _has_terminal() and not own_session else subprocess.DEVNULL,
            "stdout": output,
            "stderr": subprocess.STDOUT if output == subprocess.PIPE else output,
            "pass_fds": (its_answers, its_events),
        }
        settings |= {"start_new_session": True} if own_session else {"process_group": 0}
        words = [*words, *([] if answer is None else ["--answers", str(its_answers)]), "--events", str(its_events)]
        try:
            self.process = start_module(
                _MODULE,
                words,
                environment=environment,
                at_parents_end=signal.SIGTERM,
                blocked=STOP_SIGNALS,  # until it can handle them
                **settings,
            )
        except OSError:
            for own in (answers, events):
                os.close(own)
            raise
        finally:
            for its in (its_answers, its_events):
                os.close(its)
        over, closed_when_over = os.pipe()
        self._over: int | None = closed_when_over
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,  # Prefect keeps the current flow run there
            args=(self._read, events, over),
            name="baton-reader",
            daemon=True,
        )
        self._thread.start()
        if answer is None:
            os.close(answers)
            return
        # What an answer starts in Prefect is a child of the flow run that a variable of the context names.
        run, work = contextvars.copy_context().run, (self._answer, answer, answers)
        threading.Thread(target=run, args=work, name="baton-answers", daemon=True).start()

    def kill(self) -> None:
        """Kill it and all processes that it started, if it runs."""
        if self.process.returncode is None:  # as in `send`
            self._killed = True
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def outcome(self) -> Outcome:
        """How it ended, after its end: once the readers have all events."""
        self.process.wait()
        if self._over is not None:
            os.close(self._over)  # wakes the thread
            self._over = None
            self._questions.put(None)
        self._thread.join()
        return Outcome(
            returncode=self.process.returncode,
            ended=self._ended,
            printed=tuple(self._printed),
            stateful_operations=self._stateful_operations,
            killed=self._killed,
            hung=self._hung,
        )

    def send(self, number: int) -> None:
        """Send it a signal. It commits and ends."""
        # Not `Popen.send_signal`, which may collect the exit code that `wait` is waiting for.
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def wait(self, *forwarded: signal.Signals) -> Outcome:
        """Wait for its end.

        Args:
            forwarded: signals of this process that are passed on to it meanwhile, if this is the main thread.
        """
        with self._passing_on(forwarded), _terminal_of(self.process):
            _wait_as_a_shell(self.process)
            return self.outcome()

    @contextmanager
    def _passing_on(self, numbers: Sequence[signal.Signals]) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            numbers = ()
        # What is ignored stays so, as with nohup.
        before = {number: signal.getsignal(number) for number in numbers}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, lambda number, _frame: self.send(number))
        # This process does nothing that is lost, but must not leave its trainer.
        saves, PROCESS_STOP.save_in_flight = PROCESS_STOP.save_in_flight, lambda: True
        try:
            yield
        finally:
            PROCESS_STOP.save_in_flight = saves
            for number, handler in before.items():
                signal.signal(number, handler)

    def _read(self, events: int, over: int) -> None:
        """Read the pipes until the process is over. That is no end of them: what it started may hold them open."""
        output = self.process.stdout
        begun = {events: b"", **({} if output is None else {output.fileno(): b""})}
        for descriptor in begun:
            os.set_blocking(descriptor, False)
        is_over = False
        while begun:
            is_over = is_over or over in select.select([*begun, over], [], [])[0]
            # Of each in turn, so that one without a pause delays no other.
            found = [self._read_block(descriptor, begun, is_event=descriptor == events) for descriptor in list(begun)]
            if is_over and not any(found):
                break
        for descriptor in (events, over):
            os.close(descriptor)

    def _read_block(self, descriptor: int, begun: dict[int, bytes], *, is_event: bool) -> bool:
        """Read some of what a pipe has now; at its end, drop it from `begun`, which has the line that is not whole yet.

        Returns:
            Whether there was anything.
        """
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        *lines, begun[descriptor] = (begun[descriptor] + data).split(b"\n")
        for line in lines:
            self._receive(line, is_event=is_event)
        if not data and (rest := begun.pop(descriptor)) and not is_event:
            self._receive(rest, is_event=False)
        return bool(data)

    def _receive(self, line: bytes, *, is_event: bool) -> None:
        if not is_event:
            text = line.decode("utf-8", "replace")
            self._printed.append(text)
            self.emit(Printed(text=text))
            return
        try:
            tell(self, line)
        except ValueError as fault:
            _LOGGER.warning("an event of the training cannot be read: %s", fault)

    def _answer(self, answer: Ask, answers: int) -> None:
        with suppress(OSError), open(answers, "wb") as pipe:  # it has ended
            while (asked := self._questions.get()) is not None:
                pipe.write(answered(asked, answer))
                pipe.flush()

    def emit(self, event: Event) -> None:
        """Hand an event to the readers, and a question to who answers."""
        if isinstance(event, Asked):
            self._questions.put(event)
            return
        if isinstance(event, Ended):
            self._ended = event
        elif isinstance(event, Hung):
            self._hung = event.message
        elif isinstance(event, StatefulOperations):
            self._stateful_operations = f"{event.reference}: {listed(event.operations)}"
        for reader in list(self._readers):
            try:
                reader.emit(event)
            except Exception as fault:  # noqa: BLE001 - a closed stream or a lost notebook must not end a training
                self._readers.remove(reader)
                _LOGGER.warning("the progress is not shown any more, because that failed: %r", fault)


def _has_terminal() -> bool:
    """Whether this process has the terminal: its standard input is one, whose foreground group it is in."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


@contextmanager
def _terminal_of(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Give a process group the terminal of this one within the block, if there is one."""
    if not _has_terminal():
        yield
        return
    _give_terminal(process.pid)
    try:
        yield
    finally:
        _take_terminal_from(process.pid)


def _take_terminal_from(group: int) -> None:
    """Take the terminal back from a process group, unless the shell has given it to another one meanwhile."""
    with suppress(OSError):
        if os.tcgetpgrp(0) == group:
            _give_terminal(os.getpgrp())


def _give_terminal(group: int) -> None:
    """Make a process group the foreground group of the terminal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # for who is not in the foreground group
    try:
        with suppress(OSError):  # the terminal was closed, or the group has ended
            os.tcsetpgrp(0, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_as_a_shell(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the end of a process; when Ctrl-Z stops it, stop this process group too, and go on with it."""
    while process.poll() is None:
        # No call here waits without an end: a signal that arrives just before such a call does not interrupt it.
        state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT | os.WNOHANG)
        if state is None or state.si_code != os.CLD_STOPPED:
            time.sleep(_LOOK_SECONDS)
            continue
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # takes notice of it
        _take_terminal_from(process.pid)
        os.kill(0, signal.SIGTSTP)
        # From here on, the shell has let this process go on.
        if _has_terminal():
            _give_terminal(process.pid)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
