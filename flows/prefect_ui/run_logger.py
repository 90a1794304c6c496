"""A sink that writes to a flow run's log in Prefect, and the tags by which Prefect's pages find a run's flow runs."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final
from uuid import UUID

from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.messages import counted, shown, shown_lines
from tasks.foundation.telemetry.events import Committed, Evaluated, Event, Hung, Note, Sink

_MOST_WAITING: Final = 1000
Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


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
