"""The record of a run in Prefect, which is best effort: its flow run, its log, and the relay that fills them.

The work of a command runs in the main thread, which alone receives signals, and never waits for Prefect. Another thread
connects with Prefect's server, runs Prefect's engine, which creates the flow run, waits for the end of the work, and
records how it ended. The thread begins when the first steps are trained, because it imports Prefect, and Python runs
one thread at a time. If there is no flow run, whatever the reason, one note says why, and the work goes on. When the
work has ended, Prefect has a limited time to record the rest.

Only stages in other processes need Prefect: they are children of the flow run, so the command waits for it, and ends
with the reason if there is none.

A deployment's flow run, in `run_flows.py`, is Prefect's own process: there the relay runs in the flow.
"""

import contextvars
import logging
import signal
import threading
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar
from uuid import UUID

from flows.process import Terminated, is_clean_stop, skip_prefect_shutdown, stop_reason
from flows.runner import Runner
from flows.with_prefect.artifacts import ArtifactPublisher, FlowRunCancelled
from flows.with_prefect.task_runs import PrefectTasks
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import BatonError, BlowUp
from tasks.foundation.messages import counted, masked, shown, shown_lines
from tasks.foundation.telemetry.events import Committed, Evaluated, Event, Hung, Note, Several, Sink, Training

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from flows.admit import Admitted
    from flows.opened_run import Run
    from flows.result import RelayResult


R = TypeVar("R")
Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

# After a stop, Prefect has this long to record it: the machine may disappear.
_STOP_SECONDS: Final = 10.0
# So long has Prefect for each of two things when the work has ended: to create the flow run, and to record its end.
_LAST_SECONDS: Final = 30.0
# The flow run is not held back longer than this: a large model is built and traced for minutes.
_LATEST_SECONDS: Final = 10.0

_MOST_WAITING: Final = 1000  # lines of the log, before the flow run begins
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
            notes: receives a note of what Prefect does not record.
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
        elif self._absent is None and not self.required:
            self._note("this run is not recorded in Prefect: it was stopped before Prefect had begun its flow run")
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
        if isinstance(self._fault, FlowRunCancelled):
            return cancelled()
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


def cancelled() -> "State[R]":
    """The last state of a flow run that was cancelled while its process trained."""
    from prefect.states import Cancelled

    return Cancelled(message="cancelled; what was trained is committed, and the same command continues")


def failed(fault: BatonError) -> "State[R]":
    """The last state of a flow run that is refused, or whose stage failed; its result is the error, in this process.

    A loss that blew up has a state name of its own, `BlewUp`, by which an automation tells it from other failures.
    The engine logs the state, with the message on one line. It would also log the result with its traceback, and three
    times what a flow raises. Tracebacks are for errors that nobody expects.
    """
    from prefect.states import Failed

    for name in _ENGINE_LOGGERS:
        logging.getLogger(name).addFilter(_without_known_errors)
    lines = [line.strip() for line in masked(f"{type(fault).__name__}: {fault}").splitlines()]
    name = "BlewUp" if isinstance(fault, BlowUp) else "Failed"
    return Failed(name=name, message="; ".join(line for line in lines if line), data=fault)


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


class PrefectRunLogger:
    """A `Sink` that logs notes, commits and evaluations in Prefect, but not every step."""

    def __init__(
        self,
        logger_of_stage: Callable[[], Log | None] = lambda: None,
        *,
        flow_logger: Callable[[], Log | None] | None = None,
    ) -> None:
        """Take the logger of the current flow run, unless `flow_logger` is given.

        Args:
            logger_of_stage: returns the logger of the task run of the stage that runs in this thread, if there is one.
            flow_logger: returns the logger of a flow run; None as long as it has not begun.

        Raises:
            MissingContextError: called outside a flow run.
        """
        if flow_logger is None:
            from prefect import get_run_logger

            current = get_run_logger()
            flow_logger = lambda: current  # noqa: E731
        self._flow_logger = flow_logger
        self._logger_of_stage = logger_of_stage
        # What came before the flow run began, which it may never do.
        self._waiting: deque[tuple[int, str]] = deque(maxlen=_MOST_WAITING)
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Log one event, now or when the flow run has begun."""
        match event:
            case Note(text=text, warning=warning):
                self._log(logging.WARNING if warning else logging.INFO, shown_lines(text))
            case Committed(step=step, path=path, metrics=metrics):
                self._log(logging.INFO, f"step {step} committed as {path} {_text(metrics)}")
            case Evaluated(step=step, metrics=metrics, examples=examples, on=on):
                self._log(
                    logging.INFO, f"step {step} evaluated on {counted(examples, f'{on} example')}: {_text(metrics)}"
                )
            case Hung(message=message, stacks=stacks):
                self._log(logging.ERROR, shown_lines(f"hung: {message}\n{stacks}"))
                self._send()
            case _:
                pass

    def flush(self) -> None:
        """Log what came before the flow run began."""
        logger = self._flow_logger()
        with self._lock:
            if logger is not None:
                while self._waiting:
                    logger.log(*self._waiting.popleft())

    def _log(self, level: int, text: str) -> None:
        self.flush()
        logger = self._logger_of_stage() or self._flow_logger()
        if logger is not None:
            logger.log(level, text)
        else:
            with self._lock:
                self._waiting.append((level, text))

    def _send(self) -> None:
        """Send Prefect what was logged, which it otherwise does every two seconds, in a thread."""
        log = self._logger_of_stage() or self._flow_logger()
        if log is not None:
            from prefect.logging.handlers import APILogHandler

            APILogHandler().flush()


def _text(metrics: object) -> str:
    items = metrics.items() if isinstance(metrics, dict) else ()
    return shown(" ".join(f"{name} {value:.4g}" for name, value in items))


def tags_of(spec: RunSpec) -> tuple[str, str]:
    """Tags of a training run's flow runs and task runs."""
    return "baton", f"run:{spec.run}"


def tag_flow_run(spec: RunSpec, telemetry: Sink) -> None:
    """Add a training run's tags to the current flow run, if it lacks any: a deployment knows no run.

    One request, not retried: if Prefect refuses it or does not respond, a warning says so, and the flow run goes on.

    Args:
        spec: the run file's content.
        telemetry: receives the warning.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException
    from prefect.runtime import flow_run
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    has = list(flow_run.tags)
    missing = [tag for tag in tags_of(spec) if tag not in has]
    if not missing or flow_run.id is None:
        return
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run.id), tags=[*has, *missing])
    except (httpx.HTTPError, PrefectException, RuntimeError, OSError) as fault:
        why = f"{type(fault).__name__}: {fault}".splitlines()[0]
        telemetry.emit(Note(text=f"the flow run lacks the tags {', '.join(missing)} in Prefect ({why})", warning=True))


def recorded_relay(
    run: "Run",
    admission: "Callable[[Sink], Admitted | RelayResult]",
    *,
    telemetry: Sink,
    whole_process: bool,
    on_result: "Callable[[RelayResult], None]" = lambda _: None,
    context: Callable[[], contextvars.Context] | None = None,
) -> "RelayResult":
    """Train a run as the current flow run, or beside the one whose context `context` waits for.

    Args:
        run: the opened run.
        admission: admits it; a result in place of the admitted run ends the flow run at once.
        telemetry: receives every event.
        whole_process: whether the process runs only this.
        on_result: called with the result before the last artifacts are made.
        context: waits for the context of the flow run; None: the current one.

    Raises:
        FlowRunCancelled: the flow run was cancelled, and its worker did not say so.
    """
    # An image whose stages only move files has not what the relay needs.
    from flows.relay import relay
    from flows.result import RelayResult, leaves_time

    attempt = uuid.uuid4().hex
    with (
        ArtifactPublisher(run, notes=telemetry, context=context) as publisher,
        PrefectTasks(context=context) as tasks,
    ):
        sinks = Several((telemetry, publisher))
        admitted = admission(sinks)
        if isinstance(admitted, RelayResult):
            return admitted
        runner: Runner = tasks
        if run.spec.stages.remote():
            from flows.with_prefect.remote_stage import runner_for  # imports Prefect

            limit = admitted.goal.max_seconds
            runner = runner_for(run.spec, tasks, attempt=attempt, telemetry=sinks, max_seconds=limit)
        result = relay(admitted, runner, telemetry=sinks, attempt=attempt, whole_process=whole_process)
        on_result(result)
        if leaves_time(result.exit_reason):
            publisher.draw_curves()
        return result
