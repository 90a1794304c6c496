"""Prefect's API as launching needs it: start a flow run of a deployment, see how it is, cancel it, find left ones.

A server that is away for a while is waited for: the flow runs that it knows go on without it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling

from tasks.foundation.errors import InvalidInput, StageLost
from tasks.foundation.messages import without_password
from tasks.foundation.stops.uninterrupted import last_stop
from tasks.foundation.telemetry.events import Note, Sink

T = TypeVar("T")

# A server that is restarted is back by then; one that is gone for good must not hold the command for ever.
_PATIENCE_SECONDS = 600.0
# Of a process that has been told to go.
_LAST_PATIENCE_SECONDS = 5.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 15.0
_SERVER_FAULT = 500
_PASSING = frozenset({408, 429})  # too slow, too many
_REFUSED = frozenset({401, 403})
_UNFINISHED = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING)
# What was cancelled longer ago has nobody left to tell of its end.
_LONGEST_GOODBYE = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRuns:
    """Flow runs on the API that this process is told of by PREFECT_API_URL or a profile."""

    telemetry: Sink
    connect: Callable[[], AbstractContextManager[SyncPrefectClient]] = lambda: get_client(sync_client=True)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def require_deployment(self, name: str, *, of: str) -> None:
        """Refuse a deployment that is not there, before anything is begun.

        Args:
            name: FLOW/DEPLOYMENT.
            of: the run file's key that names it.

        Raises:
            InvalidInput: the API does not know it.
        """

        def look(client: SyncPrefectClient) -> None:
            try:
                client.read_deployment_by_name(name)
            except ObjectNotFound:
                raise _no_such_deployment(client, name, of=of) from None

        self._patiently(look)

    def start(self, deployment: str, parameters: dict[str, Any], *, name: str, tags: Sequence[str], key: str) -> UUID:
        """Have a flow run of a deployment scheduled, as a child of the running one.

        Args:
            deployment: FLOW/DEPLOYMENT.
            parameters: JSON.
            name: what Prefect's UI calls it.
            tags: of the flow run.
            key: asked twice with the same one, there is still only one flow run.

        Raises:
            InvalidInput: the API does not know it any more.
        """

        def start(client: SyncPrefectClient) -> UUID:
            try:
                started = run_deployment(
                    deployment, parameters=parameters, flow_run_name=name, tags=list(tags), idempotency_key=key,
                    timeout=0,
                )  # fmt: skip
            except ObjectNotFound:
                stage = deployment.partition("/")[0].replace("-", "_")
                raise _no_such_deployment(client, deployment, of=f"stages.{stage}.deployment") from None
            found: UUID = started.id  # type: ignore[union-attr]  # called without an event loop, it returns the flow run
            return found

        return self._patiently(start)

    def state(self, flow_run: UUID) -> State | None:
        """How it is; None if the API does not know it any more."""

        def look(client: SyncPrefectClient) -> State | None:
            try:
                return client.read_flow_run(flow_run).state
            except ObjectNotFound:
                return None

        return self._patiently(look)

    def cancel(self, flow_run: UUID) -> None:
        """Ask for its end: its process is sent SIGTERM, and what has not begun never does."""

        def cancel(client: SyncPrefectClient) -> None:
            try:
                client.set_flow_run_state(flow_run, Cancelling())
            except ObjectNotFound:
                return

        self._patiently(cancel)

    def unfinished(self, tags: Sequence[str], wanted: Callable[[Mapping[str, Any]], bool]) -> list[UUID]:
        """Flow runs with all of these tags, and parameters as wanted, that have not ended; some may be about to.

        Args:
            tags: all of them.
            wanted: is given the parameters of a flow run.
        """
        criteria = FlowRunFilter.model_validate(
            {"tags": {"all_": list(tags)}, "state": {"type": {"any_": list(_UNFINISHED)}}}
        )

        def look(client: SyncPrefectClient) -> list[FlowRun]:
            return client.read_flow_runs(flow_run_filter=criteria)

        return [each.id for each in self._patiently(look) if wanted(each.parameters) and not _is_forgotten(each.state)]

    def _patiently(self, ask: Callable[[SyncPrefectClient], T]) -> T:
        """Ask until there is an answer.

        Raises:
            InvalidInput: the API does not take who asks.
            StageLost: it has been away for too long.
        """
        began, wait = self.clock(), _FIRST_WAIT_SECONDS
        while True:
            try:
                with self.connect() as client:
                    return ask(client)
            except (httpx.TransportError, PrefectHTTPStatusError) as fault:
                require_passing(fault)
                away = self.clock() - began
                said = without_password(f"Prefect's API does not answer ({type(fault).__name__}: {fault})")
                if away >= (_PATIENCE_SECONDS if last_stop() is None else _LAST_PATIENCE_SECONDS):
                    raise StageLost(
                        f"{said}, for {away:.0f} seconds now; what is committed stays. Run the same command again when "
                        "it is back"
                    ) from fault
            if wait == _FIRST_WAIT_SECONDS:
                self.telemetry.emit(Note(text=f"{said}; asking again", warning=True))
            self.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


def _is_forgotten(state: State | None) -> bool:
    if state is None or state.type is not StateType.CANCELLING:
        return False
    return datetime.now(UTC) - state.timestamp > _LONGEST_GOODBYE


def require_passing(fault: Exception) -> None:
    """Refuse to wait for Prefect's API where no time helps.

    Raises:
        InvalidInput: the API does not take who asks.
        PrefectHTTPStatusError: it is not to be had for another reason.
    """
    if not isinstance(fault, PrefectHTTPStatusError):
        return
    code = fault.response.status_code
    if code in _REFUSED:
        url = without_password(str(PREFECT_API_URL.value()))
        raise InvalidInput(
            f"PREFECT_API_URL = {url}: Prefect's API refuses who asks (HTTP {code}). Set "
            "PREFECT_API_KEY (Prefect Cloud) or PREFECT_API_AUTH_STRING (a server with a password) to what it takes, "
            "or PREFECT_API_URL to the server that is meant"
        ) from fault
    if code < _SERVER_FAULT and code not in _PASSING:
        raise fault


def _no_such_deployment(client: SyncPrefectClient, name: str, *, of: str) -> InvalidInput:
    url = without_password(str(client.api_url))
    return InvalidInput(
        f"{of} = {name}: Prefect's API at {url} has no such deployment. Deploy it (prefect "
        "deploy --all --prefect-file deploy/prefect.yaml), set PREFECT_API_URL to the server that has it, "
        f"or leave {of} out to run the stage in this process"
    )
