"""A command's flow run, which Prefect records beside the work; recording is best effort.

The work runs in the main thread, which alone receives signals, and never waits for Prefect. Another thread connects
with Prefect's server, runs Prefect's engine, which creates the flow run, waits for the end of the work, and records how
it ended. The thread begins when the first steps are trained, because it imports Prefect, and Python runs one thread at
a time. If there is no flow run, whatever the reason, one note says why, and the work goes on. When the work has ended,
Prefect has a limited time to record the rest.

Only stages in other processes need Prefect: they are children of the flow run, so the command waits for it, and ends
with the reason if there is none.

Relies on internals of Prefect 3.8.8: its engine also runs flows outside the main thread, and then handles no signals;
and it logs a flow run's error with these loggers.
"""

import contextvars
import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from flows.process.exit import skip_prefect_shutdown
from flows.process.stop_signals import Terminated, is_clean_stop, stop_reason
from tasks.foundation.errors import BatonError
from tasks.foundation.messages import masked
from tasks.foundation.telemetry.events import Event, Hung, Note, Sink, Training

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

R = TypeVar("R")
Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

# After a stop, Prefect has this long to record it: the machine may disappear.
_STOP_SECONDS: Final = 10.0
# So long has Prefect for each of two things when the work has ended: to create the flow run, and to record its end.
_LAST_SECONDS: Final = 30.0
# The flow run is not held back longer than this: a large model is built and traced for minutes.
_LATEST_SECONDS: Final = 10.0

_ENGINE_LOGGERS: Final = ("prefect.flow_runs", "prefect.engine")


class FlowRunBeside(Generic[R]):
    """The flow run of the work in a block; use it as a context manager.

    After a signal, the flow run ends as `Stopped`; after an error, as the engine would end it.

    Attributes:
        required: whether the work needs the flow run.
        logger: of the flow run; None until it has begun.
    """

    def __init__(
        self,
        connect: Callable[[], None],
        engine: Callable[[Callable[[], "State[R]"]], object],
        *,
        notes: Sink,
        required: bool = False,
        latest_seconds: float = _LATEST_SECONDS,
        last_seconds: float = _LAST_SECONDS,
    ) -> None:
        """Make no request yet.

        Args:
            connect: returns when the server responds, and raises if it cannot be used; may import Prefect.
            engine: calls the flow, whose function is the given one.
            notes: is told what Prefect does not record.
            required: whether the work needs the flow run. `context` raises why there is none, so no note says it.
            latest_seconds: the flow run begins after this time, unless `begin` is called before.
            last_seconds: limit of the waits for Prefect when the work has ended.
        """
        self.required = required
        self.logger: Log | None = None
        self._connect = connect
        self._engine = engine
        self._notes = notes
        self._latest_seconds = latest_seconds
        self._last_seconds = last_seconds
        self._may_begin = threading.Event()
        self._context: contextvars.Context | None = None
        self._connected = threading.Event()  # or it cannot be
        self._asked = False  # Prefect is being asked to create the flow run
        self._known = threading.Event()  # the flow run has begun, or never will
        self._ended = threading.Event()  # the work has ended
        self._lock = threading.Lock()
        self._outcome: Callable[[], State[R]] | None = None
        self._fault: BaseException | None = None  # of the work
        self._absent: BaseException | None = None  # why there is no flow run
        self._unrecorded: BaseException | None = None  # why Prefect did not record the outcome
        self._thread = threading.Thread(target=self._run, name="baton-flow-run", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._thread.start()
        except BaseException as fault:  # a signal
            self._connected.set()
            self.__exit__(type(fault), fault, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, where: TracebackType | None
    ) -> None:
        stopped = isinstance(fault, Terminated | KeyboardInterrupt)
        with self._lock:
            if self._outcome is None:
                self._fault = fault
            self._ended.set()
            asked = self._asked
        self.begin()
        if not stopped:
            self.wait_at_end()
        if asked or not stopped:  # a server that is not up yet delays no stop
            if self._absent is None:
                self._thread.join(_STOP_SECONDS if stopped else self._last_seconds)
            if self._thread.is_alive():
                skip_prefect_shutdown()
                self._unrecorded = self._unrecorded or TimeoutError(f"no response within {self._last_seconds:g} s")
        if fault is None and self._absent is None and self._unrecorded is not None:
            self._note(f"Prefect did not record the result: {_words(self._unrecorded)}")

    def begin(self) -> None:
        """Let Prefect create the flow run now."""
        self._may_begin.set()

    def context(self) -> contextvars.Context:
        """Wait until the flow run has begun, and return a copy of its context.

        Raises:
            BaseException: why there is no flow run.
        """
        if self.required:
            self.begin()
        self._known.wait()
        if self._context is None:
            raise RuntimeError("the flow run did not begin") if self._absent is None else self._absent
        return self._context.copy()  # only one thread at a time may be in a context

    def wait_at_end(self) -> None:
        """The work has ended: wait until the flow run has begun, or it is known that it never will."""
        self.begin()
        self._connected.wait()  # which has limits of its own: a server may be starting
        if not self._known.wait(self._last_seconds):
            self._give_up(TimeoutError(f"no response within {self._last_seconds:g} s"))

    def end(self, outcome: Callable[[], "State[R]"]) -> None:
        """Say how the work ended. Prefect records it while the rest of the block runs.

        Args:
            outcome: returns the last state of the flow run, or raises what ends it; called within the flow run.
        """
        self._outcome = outcome
        self._ended.set()
        self.begin()

    def crash(self, message: str) -> None:
        """Record that the process ends while the work hangs; waits a few seconds for Prefect, from any thread."""
        if self._context is not None:
            from prefect.states import Crashed

            self.end(lambda: Crashed(message=message))
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        """The thread: everything of Prefect's engine."""
        self._may_begin.wait(self._latest_seconds)
        try:
            try:
                if not self._stopped():
                    self._connect()
            finally:
                self._connected.set()
            with self._lock:
                if self._stopped():
                    return
                self._asked = True
            self._engine(self._body)
        except BaseException as fault:  # noqa: BLE001 - a note says it, or `context` raises it
            if self._context is None:
                self._give_up(fault)
            elif not _is_termination(fault):  # it ends the flow run of a machine that is going
                self._unrecorded = fault
        finally:
            self._known.set()

    def _give_up(self, fault: BaseException) -> None:
        """There is no flow run, and there will be none."""
        with self._lock:
            if self._absent is not None or self._context is not None:
                return
            self._absent = fault
        if not self.required and not self._stopped():
            self._note(f"this run is not recorded in Prefect: {_words(fault)}")
        self._known.set()

    def _note(self, text: str) -> None:
        self._notes.emit(Note(text=text, warning=True))

    def _stopped(self) -> bool:
        return isinstance(self._fault, Terminated | KeyboardInterrupt)

    def _body(self) -> "State[R]":
        """The function of the flow."""
        from prefect import get_run_logger
        from prefect.exceptions import MissingContextError

        with suppress(MissingContextError):
            self.logger = get_run_logger()
        with self._lock:
            if self._absent is None:
                self._context = contextvars.copy_context()
        self._known.set()
        self._ended.wait()
        if self._outcome is not None:
            return self._outcome()
        if self._fault is not None and is_clean_stop(self._fault):
            return stopped(stop_reason(self._fault))
        if isinstance(self._fault, BatonError):
            return failed(self._fault)
        raise _as_the_engine_knows_it(self._fault or RuntimeError("the work has no outcome"))


@dataclass(frozen=True, slots=True)
class BeginsWithTraining:
    """A sink that lets a flow run begin when the first steps are trained, and ends it if the process hangs."""

    flow_run: FlowRunBeside[Any]

    def emit(self, event: Event) -> None:
        """Take notice of training."""
        match event:
            case Training():
                self.flow_run.begin()
            case Hung(message=message):
                self.flow_run.crash(f"hung: {message}")
            case _:
                pass


def stopped(reason: str) -> "State[R]":
    """The last state after a signal, as after the other ends with work left to do; Prefect counts it as completed."""
    from prefect.states import Completed

    message = f"{reason}: stopped by a signal; what was trained is committed, and the same command continues"
    return Completed(name="Stopped", message=message, data=reason)  # Prefect refuses a state without data


def failed(fault: BatonError) -> "State[R]":
    """The last state of a flow run that is refused, or whose stage failed; its result is the error, in this process.

    The engine logs the state, with the message on one line. It would also log the result with its traceback, and three
    times what a flow raises. Tracebacks are for errors that nobody expects.
    """
    from prefect.states import Failed

    for name in _ENGINE_LOGGERS:
        logging.getLogger(name).addFilter(_without_known_errors)
    lines = [line.strip() for line in masked(f"{type(fault).__name__}: {fault}").splitlines()]
    return Failed(message="; ".join(line for line in lines if line), data=fault)


def _without_known_errors(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], BatonError))


def _words(fault: BaseException) -> str:
    """Why something is not recorded, on one line."""
    if isinstance(fault, BatonError):
        return str(fault).splitlines()[0]
    return masked(f"{type(fault).__name__}: {fault}".strip(": ").splitlines()[0])


def _is_termination(fault: BaseException) -> bool:
    from prefect.exceptions import TerminationSignal

    return isinstance(fault, TerminationSignal)


def _as_the_engine_knows_it(fault: BaseException) -> BaseException:
    """What the flow raises for an exception of the work; errors stay what they are, for Prefect's log."""
    from prefect.exceptions import TerminationSignal

    return TerminationSignal(signal.SIGTERM) if isinstance(fault, Terminated) else fault
