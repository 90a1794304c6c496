"""Requests to Prefect's API: which errors are retried, for how long, and which are refused."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import pytest
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling, Running

from baton.flows.with_prefect.flow_runs import FlowRuns
from baton.tasks.foundation.contracts.run_spec import StopSpec
from baton.tasks.foundation.errors import InvalidInput, StageLost
from baton.tasks.foundation.machine.threads import run_uninterrupted
from tests.support.event_recorder import EventRecorder


def test_unreachable_api_is_retried_for_a_limited_time() -> None:
    recorder, slept = EventRecorder(), [0.0]

    def sleep(seconds: float) -> None:
        slept[0] += seconds

    runs = FlowRuns(telemetry=recorder, connect=nullcontext, clock=lambda: slept[0], sleep=sleep)  # type: ignore[arg-type]
    times = []

    def comes_back(_client: object) -> str:
        times.append(slept[0])
        if len(times) < 4:
            raise httpx.ConnectError("refused")
        return "here"

    assert run_uninterrupted(lambda _: runs._with_retries(comes_back), StopSpec()) == "here"
    assert times == sorted(set(times))
    assert recorder.text.count("is not responding") == 1

    def stays_unreachable(_client: object) -> str:
        raise httpx.ConnectError("refused")

    began = slept[0]
    with pytest.raises(StageLost) as caught:
        run_uninterrupted(lambda _: runs._with_retries(stays_unreachable), StopSpec())
    assert caught.value.exit_code == 3
    assert slept[0] - began >= 600

    # After a stop request, a process retries for only a few seconds.
    began = slept[0]
    with pytest.raises(StageLost):
        run_uninterrupted(lambda _: runs._with_retries(stays_unreachable), StopSpec(), within_seconds=1e-9)
    assert slept[0] - began < 30


def test_flow_runs_cancelled_long_ago_count_as_finished() -> None:
    now = datetime.now(UTC)
    states = [Running(), Cancelling(timestamp=now), Cancelling(timestamp=now - timedelta(hours=1))]
    found = [SimpleNamespace(id=number, state=state, parameters={}) for number, state in enumerate(states)]
    client = SimpleNamespace(read_flow_runs=lambda **_: found)
    runs = FlowRuns(telemetry=EventRecorder(), connect=lambda: nullcontext(client))  # type: ignore[arg-type]
    assert runs.unfinished(["baton"], lambda _: True) == [0, 1]


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
    runs, name = FlowRuns(telemetry=EventRecorder()), "train-segment/docker"
    return (
        lambda: runs.require_deployment(name, of="stages.train_segment.deployment"),
        lambda: runs.start(name, {"call": "{}"}, name="digits", tags=["baton"], key="a/0", environment={}),
    )


@pytest.mark.parametrize(("code", "passes"), [(408, True), (400, False), (409, False)])
def test_timeout_is_retried_and_bad_request_is_not(code: int, *, passes: bool) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)

    runs = FlowRuns(telemetry=EventRecorder(), clock=lambda: 1000.0 * len(slept), sleep=sleep)
    with server_with_status(code), pytest.raises(StageLost if passes else PrefectHTTPStatusError):
        runs.require_deployment("train-segment/docker", of="stages.train_segment.deployment")
    assert bool(slept) == passes
