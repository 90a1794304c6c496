"""Flow runs on Prefect's API: start one of a deployment, read its state, wait for it, cancel it, find unfinished ones.

If the server is unreachable, requests are retried for a while: flow runs continue without it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar, cast
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling

from baton.flows.runner import StageStopped
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import InvalidInput, StageLost
from baton.tasks.foundation.log.stage_results import has_answer
from baton.tasks.foundation.machine.stops import Stop, Stops
from baton.tasks.foundation.machine.threads import last_stop
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.stage import label_of
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.telemetry.events import Note, Sink

T = TypeVar("T")

# A restarted server is back by then; one that is gone must not block the command.
_RETRY_SECONDS = 600.0
# In a process that was asked to stop.
_RETRY_SECONDS_ON_STOP = 5.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 15.0
_UNFINISHED = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING)
# A flow run that was cancelled longer ago has lost its worker, and its end will not be reported.
_LONGEST_CANCELLING = timedelta(minutes=10)
POLL_SECONDS = 1.0
# A cancelled stage commits within its grace period; this is for the news of it.
NEWS_SECONDS = 30.0
# A running segment knows the time budget itself and commits in order; SIGTERM would leave it the grace period only.
_ORDERLY_SECONDS = 300.0
# Longer than a container takes to start; a machine may take longer, so it is a warning and no more.
_QUEUE_SECONDS = 120.0
# What this process needs of its own grace period, to say where the run stands.
TO_LEAVE_SECONDS = 2.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCall:
    """A call to a stage in another process.

    Attributes:
        stage: its name, such as train_segment.
        deployment: FLOW/DEPLOYMENT.
        spec: the run file.
        text: the call as JSON.
        aim: what the stage is to reach, for messages.
        cancellable: whether to cancel the stage when this process is asked to stop.
    """

    stage: str
    deployment: str
    spec: RunSpec
    text: str
    aim: str
    cancellable: bool

    def __str__(self) -> str:
        return f"{label_of(self.stage)} {self.aim}".strip()


@dataclass(slots=True, kw_only=True)
class FlowRunWait:
    """Waits for one flow run.

    Attributes:
        flow_run: id of the flow run.
        call: what it was started with.
        home: the run's home, where it leaves its answer.
        telemetry: receives a warning if the flow run stays queued.
        flow_runs: Prefect's API.
    """

    flow_run: UUID
    call: RemoteCall
    home: Storage
    telemetry: Sink
    flow_runs: FlowRuns
    _warned: bool = False
    _has_run: bool = False
    _cancelling_since: float | None = None
    _stopping_since: float | None = None

    def until_over(self, stops: Stops) -> State | None:
        """Wait until it is over.

        Args:
            stops: requests to stop this process; a cancellable stage is cancelled then.

        Returns:
            The last state; None if Prefect does not know the flow run any more.

        Raises:
            StageStopped: this process was asked to stop, or the flow run was cancelled and its end was not reported.
        """
        began = self.flow_runs.clock()
        while True:
            state = self.flow_runs.state(self.flow_run)
            self._has_run = self._has_run or (state is not None and state.type is StateType.RUNNING)
            if self._has_run and _is_queued(state) and has_answer(self.home, str(self.flow_run)):
                # Its machine was lost, and Prefect has scheduled it again; there is nothing left to do for it.
                self.flow_runs.cancel(self.flow_run)
                return state
            self._warn_of_queue(state, self.flow_runs.clock() - began)
            self._require_end_of_cancelled(state)
            if is_over(state) and (self._stopping_since is None or not self.call.cancellable):
                return state
            if stops.requested is not None:
                self._stop(stops.requested, stops.grace_left(), state)
            self.flow_runs.sleep(POLL_SECONDS)

    def _warn_of_queue(self, state: State | None, waited_seconds: float) -> None:
        if self._warned or self._has_run or not _is_queued(state) or waited_seconds < _QUEUE_SECONDS:
            return
        self._warned = True
        hint = "check that its work pool has a worker and is neither paused nor full"
        self.telemetry.emit(
            Note(text=f"{self.call} has not started after {_QUEUE_SECONDS:.0f} s; {hint}", warning=True)
        )

    def _require_end_of_cancelled(self, state: State | None) -> None:
        if state is None or state.type is not StateType.CANCELLING:
            self._cancelling_since = None
            return
        if self._cancelling_since is None:
            self._cancelling_since = self.flow_runs.clock()
        if self.flow_runs.clock() >= self._cancelling_since + self.call.spec.stop.grace_seconds + NEWS_SECONDS:
            raise StageStopped("cancelled", f"{self.call} was cancelled, and its end was not reported")

    def _stop(self, stop: Stop, grace_left: float, state: State | None) -> None:
        """Cancel the flow run, if it has not been done; give up waiting when the time for that is over."""
        if self._stopping_since is None:
            if not self._sees_to_it(stop, state):
                if self.call.cancellable:
                    self.flow_runs.cancel(self.flow_run)
                self._stopping_since = self.flow_runs.clock()
            return
        too_long = self.flow_runs.clock() >= self._stopping_since + self.call.spec.stop.grace_seconds + NEWS_SECONDS
        if is_over(state) or too_long or grace_left <= TO_LEAVE_SECONDS:
            how = "was cancelled" if self.call.cancellable else "continues by itself"
            raise StageStopped(stop.reason, f"{self.call} {how} ({stop.reason.replace('_', ' ')})")

    def _sees_to_it(self, stop: Stop, state: State | None) -> bool:
        """Whether the stage handles this stop itself: it was given the time budget, once it runs."""
        if stop.reason != "time_budget" or state is None or state.type is not StateType.RUNNING:
            return False
        orderly_seconds = max(self.call.spec.stop.grace_seconds, _ORDERLY_SECONDS)
        return self.call.stage != "train_segment" or self.flow_runs.clock() < stop.at + orderly_seconds


def is_over(state: State | None) -> bool:
    """Whether a flow run has ended, or is not known any more."""
    return state is None or state.is_final()


def _is_queued(state: State | None) -> bool:
    return state is not None and state.type in {StateType.SCHEDULED, StateType.PENDING}
