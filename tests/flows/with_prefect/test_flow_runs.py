"""Requests to Prefect's API: what they answer, which errors another try may help, and which are refused."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from uuid import UUID

import pytest
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling

from baton.flows.remote_stage import FlowRuns, FlowRunState, is_over
from baton.flows.with_prefect import flow_runs
from baton.tasks.foundation.errors import InvalidInput, StageLost
from tests.support.event_recorder import EventRecorder


def test_states_and_parameters_are_json() -> None:
    at = datetime.now(UTC)
    found = SimpleNamespace(id=UUID(int=7), state=Cancelling(timestamp=at), parameters={"call": "{}"})
    client = SimpleNamespace(read_flow_runs=lambda **_: [found], read_flow_run=lambda _: found)
    state = {"type": "CANCELLING", "name": "Cancelling", "message": None, "timestamp": at.isoformat()}
    flow_run = {"id": str(UUID(int=7)), "parameters": {"call": "{}"}, "state": state}
    assert flow_runs.unfinished(client, tags=["baton"]) == [flow_run]  # type: ignore[arg-type]
    assert flow_runs.state(client, flow_run=flow_run["id"]) == state  # type: ignore[arg-type]


def test_states_are_over_when_prefect_says_so() -> None:
    for kind in StateType:
        state = FlowRunState(type=kind.value, name=None, message=None, timestamp="")
        assert is_over(state) == State(type=kind).is_final()


@contextmanager
def server_with_status(code: int) -> Iterator[str]:
    """Run a server that answers every request with one status code, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = answer  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/api"
            with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
                yield url
        finally:
            server.shutdown()


@pytest.mark.parametrize("code", [401, 403])
def test_refused_credentials_name_the_settings_to_change(code: int) -> None:
    remedies = "PREFECT_API_KEY .* PREFECT_API_AUTH_STRING .* PREFECT_API_URL"
    with server_with_status(code) as url:
        for request in requests():
            with pytest.raises(InvalidInput, match=rf"PREFECT_API_URL = {url}: .*\(HTTP {code}\).*{remedies}"):
                request()


@pytest.mark.parametrize("code", [401, 404])
def test_password_of_the_api_is_not_shown(code: int) -> None:
    with server_with_status(code) as url:
        known = url.replace("//", "//me:secret@")
        with temporary_settings({PREFECT_API_URL: known}):
            for request in requests():
                with pytest.raises(InvalidInput) as caught:
                    request()
                assert "secret" not in str(caught.value)
                assert url.replace("//", "//***@") in str(caught.value)


def test_missing_deployment_is_refused_with_one_message() -> None:
    messages = set()
    with server_with_status(404) as url:
        for request in requests():
            with pytest.raises(InvalidInput, match="has no such deployment") as caught:
                request()
            messages.add(str(caught.value))
    (text,) = messages
    assert text.startswith(f"stages.train_segment.deployment = train-segment/docker: Prefect's API at {url}")


def requests() -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the two requests about a deployment: find it, and run it."""
    runs, name = FlowRuns(ask=flow_runs.answer, telemetry=EventRecorder()), "train-segment/docker"
    return (
        lambda: runs.require_deployment(name, of="stages.train_segment.deployment"),
        lambda: runs.start(name, {"call": "{}"}, name="digits", tags=["baton"], key="a/0", environment={}),
    )


@pytest.mark.parametrize(("code", "passes"), [(408, True), (400, False), (409, False)])
def test_timeout_is_retried_and_bad_request_is_not(code: int, *, passes: bool) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)

    runs = FlowRuns(ask=flow_runs.answer, telemetry=EventRecorder(), clock=lambda: 1000.0 * len(slept), sleep=sleep)
    with server_with_status(code), pytest.raises(StageLost if passes else PrefectHTTPStatusError):
        runs.require_deployment("train-segment/docker", of="stages.train_segment.deployment")
    assert bool(slept) == passes
