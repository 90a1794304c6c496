"""Stages as Prefect tasks while Prefect's API responds, and as plain functions while it does not.

A task asks the API before it begins, for the concurrency limits of its tags. If that fails, the task fails, although
nothing is wrong with the stage, and what was trained would not be committed. So Prefect records what a run does; the
run does not depend on it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import httpx
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.stage_calls import StageCall
from tasks.foundation.messages import without_password
from tasks.foundation.stage import Place, Stage
from tasks.foundation.telemetry.events import Note, Sink

C = TypeVar("C", bound=StageCall)
A = TypeVar("A", bound=Contract)

# How long a server may take to respond. It is asked between stages, when nothing trains.
_HEALTH_CHECK_SECONDS: Final = 20.0


def prefect_responds() -> bool:
    """Whether Prefect's API, embedded or a server, responds to one request without retries."""
    try:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(httpx_settings={"timeout": _HEALTH_CHECK_SECONDS}, sync_client=True) as client,
        ):
            return client.api_healthcheck() is None
    except (httpx.HTTPError, PrefectException, RuntimeError, OSError):
        return False


@dataclass(slots=True)
class PrefectStatus:
    """Whether Prefect responds, and whether its absence has been reported."""

    responds: Callable[[], bool] = prefect_responds
    reported_absent: bool = False

    def check(self, telemetry: Sink) -> bool:
        """Ask Prefect's API; report an absence once."""
        responds = self.responds()
        if not responds and not self.reported_absent:
            _warn(telemetry, "Prefect is not responding and does not record what is done; the run continues")
        self.reported_absent = not responds
        return responds


@dataclass(slots=True)
class _Outcome(Generic[A]):
    """What the stage returned or raised, whatever Prefect's engine does afterwards."""

    answers: list[A] = field(default_factory=list)
    fault: Exception | None = None


@dataclass(frozen=True, slots=True)
class PrefectTasks:
    """Runs every stage in this process, as a Prefect task if Prefect responds.

    The task is called, never submitted: the main thread waits for it, where signals arrive.
    """

    status: PrefectStatus = field(default_factory=PrefectStatus)
    remote: frozenset[str] = frozenset()

    def run(self, stage: Stage[C, A], call: C, place: Place) -> A:
        """Run the stage once; raises what it raises."""
        work, telemetry = stage.load(), place.telemetry
        if not self.status.check(telemetry):
            return work(call, place)
        outcome: _Outcome[A] = _Outcome()

        def watched() -> A:
            try:
                answer = work(call, place)
            except Exception as fault:
                outcome.fault = fault
                raise
            outcome.answers.append(answer)
            return answer

        # Never cached: only the run's log says what is done already.
        as_task = task(
            name=stage.label,
            task_run_name=lambda: f"{stage.label} {stage.subject(call)}",
            cache_policy=NO_CACHE,
        )(watched)
        try:
            return as_task()
        except Exception as fault:
            if fault is outcome.fault:
                raise
            why = f"{type(fault).__name__}: {fault}"
        if outcome.fault is not None:
            raise outcome.fault
        _warn(telemetry, f"Prefect could not record {stage.label} ({why}); the run continues")
        return outcome.answers[0] if outcome.answers else work(call, place)


def _warn(telemetry: Sink, text: str) -> None:
    telemetry.emit(Note(text=without_password(text.splitlines()[0]), warning=True))
