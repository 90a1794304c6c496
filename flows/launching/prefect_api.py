"""Requests to Prefect's API: start a flow run of a deployment, read its state, cancel it, find unfinished ones.

If the server is unreachable, requests are retried for a while: flow runs continue without it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar, cast
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelling

from flows.prefect_compat.api_refusals import require_temporary
from tasks.foundation.errors import InvalidInput, StageLost
from tasks.foundation.machine.threads import last_stop
from tasks.foundation.messages import masked
from tasks.foundation.telemetry.events import Note, Sink

T = TypeVar("T")

# A restarted server is back by then; one that is gone must not block the command.
_RETRY_SECONDS = 600.0
# In a process that was asked to stop.
_RETRY_SECONDS_ON_STOP = 5.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 15.0
_SERVER_FAULT = 500
_TEMPORARY = frozenset({408, 429})  # timeout, too many requests
_REFUSED = frozenset({401, 403})
_UNFINISHED = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING)
# A flow run that was cancelled longer ago has lost its worker, and its end will not be reported.
_LONGEST_CANCELLING = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRuns:
    """Flow runs on the API that PREFECT_API_URL or a profile names."""

    telemetry: Sink
    connect: Callable[[], AbstractContextManager[SyncPrefectClient]] = lambda: get_client(sync_client=True)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def require_deployment(self, name: str, *, of: str) -> None:
        """Refuse a deployment that does not exist, before anything begins.

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

        self._with_retries(look)

    def start(
        self,
        deployment: str,
        parameters: dict[str, object],
        *,
        name: str,
        tags: Sequence[str],
        key: str,
        environment: Mapping[str, str],
    ) -> UUID:
        """Schedule a flow run of a deployment, as a child of the current one.

        Args:
            deployment: FLOW/DEPLOYMENT.
            parameters: JSON.
            name: name of the flow run.
            tags: tags of the flow run.
            key: idempotency key; a second request with the same key starts no second flow run.
            environment: variables of the flow run's process, besides those of its deployment.

        Raises:
            InvalidInput: the API does not know the deployment any more.
        """

        def start(client: SyncPrefectClient) -> UUID:
            try:
                # Only within an event loop does it return a coroutine.
                started = cast(
                    FlowRun,
                    run_deployment(
                        deployment,
                        parameters=parameters,
                        flow_run_name=name,
                        tags=list(tags),
                        idempotency_key=key,
                        job_variables={"env": dict(environment)} if environment else None,
                        timeout=0,
                    ),
                )
            except ObjectNotFound:
                stage = deployment.partition("/")[0].replace("-", "_")
                raise _no_such_deployment(client, deployment, of=f"stages.{stage}.deployment") from None
            return started.id

        return self._with_retries(start)

    def state(self, flow_run: UUID) -> State | None:
        """The state of a flow run; None if the API does not know it any more."""

        def look(client: SyncPrefectClient) -> State | None:
            try:
                return client.read_flow_run(flow_run).state
            except ObjectNotFound:
                return None

        return self._with_retries(look)

    def cancel(self, flow_run: UUID) -> None:
        """Cancel a flow run: its process receives SIGTERM; a flow run that has not started never starts."""

        def cancel(client: SyncPrefectClient) -> None:
            try:
                client.set_flow_run_state(flow_run, Cancelling())
            except ObjectNotFound:
                return

        self._with_retries(cancel)

    def unfinished(self, tags: Sequence[str], wanted: Callable[[Mapping[str, object]], bool]) -> list[UUID]:
        """Flow runs that have not ended; some of them may be about to.

        Args:
            tags: only flow runs with all of these tags.
            wanted: only flow runs for whose parameters it returns true.
        """
        criteria = FlowRunFilter.model_validate(
            {"tags": {"all_": list(tags)}, "state": {"type": {"any_": list(_UNFINISHED)}}}
        )

        def look(client: SyncPrefectClient) -> list[FlowRun]:
            return client.read_flow_runs(flow_run_filter=criteria)

        return [each.id for each in self._with_retries(look) if wanted(each.parameters) and not _is_stuck(each.state)]

    def _with_retries(self, request: Callable[[SyncPrefectClient], T]) -> T:
        """Make a request, and retry it while the API is unreachable.

        Raises:
            InvalidInput: the API refuses the credentials.
            StageLost: the API was unreachable for too long.
        """
        began, wait = self.clock(), _FIRST_WAIT_SECONDS
        while True:
            try:
                with self.connect() as client:
                    return request(client)
            except (httpx.TransportError, PrefectHTTPStatusError) as fault:
                require_temporary(fault)
                waited = self.clock() - began
                absent = masked(f"Prefect's API is not responding ({type(fault).__name__}: {fault})")
                if waited >= (_RETRY_SECONDS if last_stop() is None else _RETRY_SECONDS_ON_STOP):
                    raise StageLost(
                        f"{absent}, for {waited:.0f} seconds now; committed checkpoints are kept. Run the same command "
                        "again when it responds"
                    ) from fault
            if wait == _FIRST_WAIT_SECONDS:
                self.telemetry.emit(Note(text=f"{absent}; retrying", warning=True))
            self.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


def _is_stuck(state: State | None) -> bool:
    if state is None or state.type is not StateType.CANCELLING:
        return False
    return datetime.now(UTC) - state.timestamp > _LONGEST_CANCELLING


def _no_such_deployment(client: SyncPrefectClient, name: str, *, of: str) -> InvalidInput:
    url = masked(str(client.api_url))
    return InvalidInput(
        f"{of} = {name}: Prefect's API at {url} has no such deployment. Deploy it (prefect "
        "deploy --all --prefect-file deploy/prefect.yaml), set PREFECT_API_URL to the server that has it, "
        f"or remove {of} to run the stage in this process"
    )
