"""Stages as Prefect tasks while Prefect's API is there, and as the plain functions that they are while it is not.

A task asks the API before it begins (for the concurrency limits of its tags), and where that fails so does the task,
for reasons that are not the stage's: what was trained would not be committed. Prefect is told of what is done, it does
not do it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from prefect import Task
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks.foundation.messages import without_password
from tasks.foundation.telemetry.events import Note, Sink

# How long a server may take to say that it is there; it is asked between stages, when nothing trains.
_PATIENCE_SECONDS: Final = 20.0


def prefect_answers() -> bool:
    """Whether Prefect's API, this process's own or a server, is there: asked once, without the client's patience."""
    try:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(httpx_settings={"timeout": _PATIENCE_SECONDS}, sync_client=True) as client,
        ):
            return client.api_healthcheck() is None
    except (httpx.HTTPError, PrefectException, RuntimeError, OSError):
        return False


@dataclass(slots=True)
class Prefect:
    """Whether Prefect is there, and whether it has been said that it is not."""

    answers: Callable[[], bool] = prefect_answers
    said: bool = False

    def is_there(self, telemetry: Sink) -> bool:
        """Ask; an absence is said once."""
        there = self.answers()
        if not there and not self.said:
            _say(telemetry, "Prefect does not answer and is not told of what is done; the run goes on")
        self.said = not there
        return there


@dataclass(slots=True)
class _Outcome:
    """What became of the stage itself, whatever Prefect made of it."""

    values: list[Any] = field(default_factory=list)
    fault: Exception | None = None


@dataclass(frozen=True, slots=True)
class PrefectReported:
    """A stage of which Prefect is told, if it can be."""

    task: Task[..., Any]
    prefect: Prefect

    def __call__(self, *arguments: Any, telemetry: Sink, **settings: Any) -> Any:
        """Run the stage, once; raises what it raises."""
        if not self.prefect.is_there(telemetry):
            return self.task.fn(*arguments, telemetry=telemetry, **settings)
        outcome = _Outcome()
        try:
            return _watched(self.task, outcome)(*arguments, telemetry=telemetry, **settings)
        except Exception as fault:
            if fault is outcome.fault:
                raise
            why = f"{type(fault).__name__}: {fault}"
        if outcome.fault is not None:
            raise outcome.fault
        _say(telemetry, f"Prefect could not be told of {self.task.name} ({why}); the run goes on")
        return outcome.values[0] if outcome.values else self.task.fn(*arguments, telemetry=telemetry, **settings)


def _watched(task: Task[..., Any], outcome: _Outcome) -> Task[..., Any]:
    """The same task; what its function returns or raises is noted before Prefect hears of it."""

    @functools.wraps(task.fn)
    def stage(*arguments: Any, **settings: Any) -> Any:
        try:
            value = task.fn(*arguments, **settings)
        except Exception as fault:
            outcome.fault = fault
            raise
        outcome.values.append(value)
        return value

    watched = task.with_options()
    watched.fn = stage
    return watched


def _say(telemetry: Sink, text: str) -> None:
    telemetry.emit(Note(text=without_password(text.splitlines()[0]), warning=True))
