"""What Prefect shows of a run: the log of a flow run, its tags and its last state; and the relay within a flow run.

The flow run of a training belongs to the process that supervises the trainer (`supervise`): a deployment's,
or a command's with stages in other processes. Or it belongs to the process that records what a command does
(`recorder.py`).
"""

import logging
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar
from uuid import UUID

from baton.flows.supervisor import Outcome, Trainer
from baton.flows.with_prefect.artifacts import ArtifactPublisher
from baton.flows.with_prefect.internals import worker_shield
from baton.flows.with_prefect.task_runs import LAST_RECORDS_SECONDS, PrefectTasks
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BatonError, BlowUp
from baton.tasks.foundation.machine.stops import STOP_SIGNALS, Stops
from baton.tasks.foundation.machine.threads import run_uninterrupted
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.telemetry.events import (
    Ask,
    Committed,
    Ended,
    Evaluated,
    Event,
    Hung,
    Note,
    Several,
    Sink,
    warnings_as_notes,
)
from baton.tasks.foundation.telemetry.formatting import metric_words, step_words
from baton.tasks.foundation.text import counted, shown, shown_lines

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from baton.flows.opened_run import OpenedRun
    from baton.flows.result import RelayResult


R = TypeVar("R")
Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

_ENGINE_LOGGERS: Final = ("prefect.flow_runs", "prefect.engine")
# Exit reasons that the metadata server causes.
MACHINE_GOES: Final = frozenset({"preempted", "maintenance"})
CANCELLED: Final = "cancelled"
_LOOK_SECONDS: Final = 0.2


def target_name(spec: RunSpec, until_step: int | None) -> str:
    """Name of a flow run that trains: the run and its target, as `digits-cnn → 2000`."""
    target = until_step or spec.train.known_target
    return f"{spec.run} → {f'epoch {spec.train.epochs:g}' if target is None else target}"


def state_of(ended: Ended, spec: RunSpec) -> "State[R]":
    """The last state of the flow run of a training; called within it."""
    from prefect import get_run_logger, states

    if ended.stopped:
        return cancelled() if ended.stopped == CANCELLED else stopped(ended.stopped)
    if ended.error is None and ended.result:
        from baton.flows.result import RelayResult

        return final_state(RelayResult.model_validate_json(ended.result), spec)
    if ended.error is None:
        _hide_tracebacks_of_known_errors()
        return states.Crashed(message=ended.crashed, data=BatonError(ended.crashed))
    if ended.error.is_expected:
        return failed(ended.error.to_error())
    # As the engine does with an error that nobody expects.
    get_run_logger().error("Encountered exception during execution:\n%s", ended.error.traceback)
    return states.Failed(message=f"Flow run encountered an exception: {ended.error.message}")


def final_state(result: "RelayResult", spec: RunSpec) -> "State[R]":
    """The flow run's last state, whose message says where the run stands."""
    from prefect.states import Completed, Crashed

    if result.exit_reason in MACHINE_GOES:
        return Crashed(message=f"{result.exit_reason}: this machine is about to go")
    prefix = "validation_"
    evaluated = {name.removeprefix(prefix): value for name, value in result.metrics.items() if name.startswith(prefix)}
    words = metric_words(evaluated or result.metrics, between=", ")
    where = f"{spec.run} is at {step_words(result.step, result.target, result.epoch)}"
    if words:
        where += f", {'validation' if evaluated else 'training'} {words}"
    if result.stopped:
        why = result.exit_reason.replace("_", " ")
        return Completed(name="Stopped", message=f"{why}: {where}, with work left to do", data=result)
    why = {"nothing_to_do": "nothing to do: ", "finished_early": "ended early: "}.get(result.exit_reason, "")
    return Completed(message=f"{why}{where}", data=result)


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

    _hide_tracebacks_of_known_errors()
    lines = [line.strip() for line in masked(f"{type(fault).__name__}: {fault}").splitlines()]
    name = "BlewUp" if isinstance(fault, BlowUp) else "Failed"
    return Failed(name=name, message="; ".join(line for line in lines if line), data=fault)


def _hide_tracebacks_of_known_errors() -> None:
    for name in _ENGINE_LOGGERS:
        logging.getLogger(name).addFilter(_without_known_errors)


def _without_known_errors(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], BatonError))


class PrefectRunLogger:
    """A `Sink` that logs notes, commits and evaluations in Prefect, but not every step."""

    def __init__(self, logger_of_stage: Callable[[], Log | None] = lambda: None) -> None:
        """Take the logger of the current flow run.

        Args:
            logger_of_stage: returns the logger of the task run of the stage that runs in this thread, if there is one.

        Raises:
            MissingContextError: called outside a flow run.
        """
        from prefect import get_run_logger

        self._flow_logger = get_run_logger()
        self._logger_of_stage = logger_of_stage

    def emit(self, event: Event) -> None:
        """Log one event."""
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

    def _log(self, level: int, text: str) -> None:
        (self._logger_of_stage() or self._flow_logger).log(level, text)

    def _send(self) -> None:
        """Send Prefect what was logged, which it otherwise does every two seconds, in a thread."""
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


@contextmanager
def recorded(
    run: "OpenedRun",
    *,
    notes: Sink,
    on_cancelled: Callable[[], None],
    logger: Sink,
    only_progress: bool = False,
    seconds: float = LAST_RECORDS_SECONDS,
) -> Iterator[Sink]:
    """Give a sink that records the events of a trainer in the current flow run: task runs, log and artifacts.

    Args:
        run: what is trained; its log is read.
        notes: receives what Prefect does not record.
        on_cancelled: called in a thread, perhaps repeatedly, when the flow run was cancelled.
        logger: keeps the flow run's log.
        only_progress: for a stage's flow run, whose parent shows the other artifacts and notices a cancel.
        seconds: so long may Prefect take for the last task runs, when the trainer has ended.
    """
    publisher = ArtifactPublisher(run, notes=notes, only_progress=only_progress, on_cancelled=on_cancelled)
    with publisher, PrefectTasks(notes) as tasks:
        try:
            yield Several((tasks, logger, publisher))
        finally:
            tasks.end_all()
            tasks.close(seconds)


def supervise(
    words: Sequence[str],
    run: "OpenedRun",
    *,
    logger: Sink,
    answer: Ask | None = None,
    only_progress: bool = False,
    of_command: bool = False,
) -> Outcome:
    """Have a trainer work, and record it in the current flow run.

    A signal is passed on to it; so is a cancel in Prefect. A worker that is lost, or a lease that cannot be renewed,
    ends the flow run when the trainer has ended.

    Args:
        words: the trainer's arguments.
        run: what is trained.
        logger: keeps the flow run's log.
        answer: answers what the trainer asks of Prefect; None: it runs one stage, and may not ask.
        only_progress: see `recorded`.
        of_command: whether the trainer may have the terminal, and Prefect's handler of SIGTERM may be replaced: no
            worker stops this process.

    Returns:
        How the trainer ended.

    Raises:
        BaseException: what a signal's handler raised, once the trainer has ended; not if `of_command`.
    """
    cancelled = threading.Event()

    def cancel() -> None:
        if not cancelled.is_set():
            cancelled.set()
            logger.emit(Note(text="the flow run was cancelled in Prefect", warning=True))
            trainer.send(signal.SIGTERM)

    def follow(stops: Stops) -> Outcome:
        while stops.requested is None and trainer.process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                trainer.process.wait(_LOOK_SECONDS)
        trainer.send(signal.SIGTERM)
        return trainer.outcome()

    with (
        worker_shield(),
        warnings_as_notes(logger),
        recorded(run, notes=logger, on_cancelled=cancel, logger=logger, only_progress=only_progress) as reader,
    ):
        # In a session of its own, Ctrl-C in the terminal of a worker is for the worker.
        trainer = Trainer(words, [reader], own_session=not of_command, answer=answer)
        if of_command:
            outcome = trainer.wait(*STOP_SIGNALS)
        else:  # Prefect's handler of SIGTERM stays, as threads.py says; notices of the machine are for the trainer
            outcome = run_uninterrupted(follow, run.spec.stop, of_machine=False)
    if cancelled.is_set() and outcome.ended is not None and outcome.ended.stopped:
        return replace(outcome, ended=replace(outcome.ended, stopped=CANCELLED))
    return outcome
