"""What the relay asks of Prefect's API: `answer` makes one request, once, by its name and its arguments.

Arguments and results are JSON, because who asks may be another process (`flows/remote_stage.py`, `supervisor.py`). It
also tries again if the API is unreachable.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Final, cast
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling

from baton.flows.remote_stage import FlowRunState
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.telemetry.events import Unreachable

_UNFINISHED = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING)
_SERVER_FAULT: Final = 500
_TEMPORARY: Final = frozenset({408, 429})  # timeout, too many requests
CREDENTIALS: Final = frozenset({401, 403})


def require_temporary(fault: Exception) -> None:
    """Refuse to retry a request to Prefect's API that will fail again.

    Raises:
        InvalidInput: the API refuses the credentials.
        PrefectHTTPStatusError: it refuses the request for another reason.
    """
    if not isinstance(fault, PrefectHTTPStatusError):
        return
    code = fault.response.status_code
    if code in CREDENTIALS:
        url = masked(str(PREFECT_API_URL.value()))
        raise InvalidInput(
            f"PREFECT_API_URL = {url}: Prefect's API refuses the credentials (HTTP {code}). Set "
            "PREFECT_API_KEY (Prefect Cloud) or PREFECT_API_AUTH_STRING (a server with a password), or set "
            "PREFECT_API_URL to another server"
        ) from fault
    if code < _SERVER_FAULT and code not in _TEMPORARY:
        raise fault


def answer(request: str, arguments: Mapping[str, object]) -> object:
    """Make a request to the API that PREFECT_API_URL or a profile names.

    Args:
        request: name of one of the functions below.
        arguments: those of the function.

    Raises:
        InvalidInput: the API refuses the credentials, or does not know the deployment.
        Unreachable: it does not respond.
        PrefectHTTPStatusError: it refuses the request for another reason.
    """
    try:
        with get_client(sync_client=True) as client:
            return _REQUESTS[request](client, **arguments)
    except (httpx.TransportError, PrefectHTTPStatusError) as fault:
        require_temporary(fault)
        raise Unreachable(masked(f"Prefect's API is not responding ({type(fault).__name__}: {fault})")) from fault


def require_deployment(client: SyncPrefectClient, *, name: str, of: str) -> None:
    """See `FlowRuns`."""
    try:
        client.read_deployment_by_name(name)
    except ObjectNotFound:
        raise _no_such_deployment(client, name, of=of) from None


def start(
    client: SyncPrefectClient,
    *,
    deployment: str,
    parameters: dict[str, object],
    name: str,
    tags: Sequence[str],
    key: str,
    environment: Mapping[str, str],
) -> str:
    """See `FlowRuns`; the flow run is a child of the one whose context this is."""
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
    return str(started.id)


def state(client: SyncPrefectClient, *, flow_run: str) -> object:
    """See `FlowRuns`."""
    try:
        return _plain(client.read_flow_run(UUID(flow_run)).state)
    except ObjectNotFound:
        return None


def cancel(client: SyncPrefectClient, *, flow_run: str) -> None:
    """See `FlowRuns`."""
    with suppress(ObjectNotFound):
        client.set_flow_run_state(UUID(flow_run), Cancelling())


def unfinished(client: SyncPrefectClient, *, tags: Sequence[str]) -> object:
    """Each flow run that has not ended and has all of these tags."""
    criteria = {"tags": {"all_": list(tags)}, "state": {"type": {"any_": list(_UNFINISHED)}}}
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(criteria))
    return [{"id": str(each.id), "parameters": each.parameters, "state": _plain(each.state)} for each in found]


_REQUESTS: Final[dict[str, Callable[..., object]]] = {
    request.__name__: request for request in (require_deployment, start, state, cancel, unfinished)
}


def _plain(found: State | None) -> object:
    if found is None:
        return None
    since = found.timestamp.isoformat()
    return asdict(FlowRunState(type=found.type.value, name=found.name, message=found.message, timestamp=since))


def _no_such_deployment(client: SyncPrefectClient, name: str, *, of: str) -> InvalidInput:
    url = masked(str(client.api_url))
    return InvalidInput(
        f"{of} = {name}: Prefect's API at {url} has no such deployment. Deploy it (prefect "
        "deploy --all --prefect-file deploy/prefect.yaml), set PREFECT_API_URL to the server that has it, "
        f"or remove {of} to run the stage in this process"
    )
