"""Prefect's API behind flow runs: what of it is heeded, and for how long it is waited for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling, Running

from flows.launching.prefect_api import FlowRuns
from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.errors import InvalidInput, StageLost
from tasks.foundation.stops.uninterrupted import run_uninterrupted
from tests.support.fake_prefect_api import Heard, run_with_code
from tests.support.prefect_server import baton, environment_with


def test_an_api_that_is_away_is_waited_for_and_at_last_given_up() -> None:
    heard, slept = Heard(), [0.0]

    def sleep(seconds: float) -> None:
        slept[0] += seconds

    runs = FlowRuns(telemetry=heard, connect=nullcontext, clock=lambda: slept[0], sleep=sleep)  # type: ignore[arg-type]
    times = []

    def comes_back(_client: object) -> str:
        times.append(slept[0])
        if len(times) < 4:
            raise httpx.ConnectError("refused")
        return "here"

    assert run_uninterrupted(lambda _: runs._patiently(comes_back), StopSpec()) == "here"
    assert times == sorted(set(times))
    assert heard.text.count("does not answer") == 1

    def stays_away(_client: object) -> str:
        raise httpx.ConnectError("refused")

    began = slept[0]
    with pytest.raises(StageLost) as caught:
        run_uninterrupted(lambda _: runs._patiently(stays_away), StopSpec())
    assert caught.value.exit_code == 3
    assert slept[0] - began >= 600

    # Whoever has been told to go has not that much time.
    began = slept[0]
    with pytest.raises(StageLost):
        run_uninterrupted(lambda _: runs._patiently(stays_away), StopSpec(), within_seconds=1e-9)
    assert slept[0] - began < 30


def test_flow_runs_that_were_cancelled_long_ago_are_not_waited_for() -> None:
    now = datetime.now(UTC)
    states = [Running(), Cancelling(timestamp=now), Cancelling(timestamp=now - timedelta(hours=1))]
    found = [SimpleNamespace(id=number, state=state, parameters={}) for number, state in enumerate(states)]
    client = SimpleNamespace(read_flow_runs=lambda **_: found)
    runs = FlowRuns(telemetry=Heard(), connect=lambda: nullcontext(client))  # type: ignore[arg-type]
    assert runs.unfinished(["baton"], lambda _: True) == [0, 1]


@contextmanager
def server_that_says(code: int) -> Iterator[str]:
    """An API that answers everything alike; its address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = answer  # noqa: N815 - as http.server has it

        def log_message(self, *_: object) -> None:
            """Nothing is said."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/api"
            with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
                yield url
        finally:
            server.shutdown()


@pytest.mark.parametrize("code", [401, 403])
def test_an_api_that_refuses_who_asks_is_told_of_with_what_to_set(code: int) -> None:
    remedies = "PREFECT_API_KEY .* PREFECT_API_AUTH_STRING .* PREFECT_API_URL"
    with server_that_says(code) as url:
        for ask in asks():
            with pytest.raises(InvalidInput, match=rf"PREFECT_API_URL = {url}: .*\(HTTP {code}\).*{remedies}"):
                ask()


@pytest.mark.parametrize("code", [401, 404])
def test_the_password_of_the_api_is_not_told(code: int) -> None:
    with server_that_says(code) as url:
        known = url.replace("//", "//me:secret@")
        with temporary_settings({PREFECT_API_URL: known}):
            for ask in asks():
                with pytest.raises(InvalidInput) as caught:
                    ask()
                assert "secret" not in str(caught.value)
                assert url.replace("//", "//***@") in str(caught.value)


def test_a_deployment_that_is_not_there_or_not_any_more_is_refused_alike() -> None:
    said = set()
    with server_that_says(404) as url:
        for ask in asks():
            with pytest.raises(InvalidInput, match="has no such deployment") as caught:
                ask()
            said.add(str(caught.value))
    (text,) = said
    assert text.startswith(f"stages.train_segment.deployment = train-segment/docker: Prefect's API at {url}")


def asks() -> tuple[Callable[[], object], Callable[[], object]]:
    """What is asked of a deployment: whether it is there, and to run."""
    runs, name = FlowRuns(telemetry=Heard()), "train-segment/docker"
    return (
        lambda: runs.require_deployment(name, of="stages.train_segment.deployment"),
        lambda: runs.start(name, {"call": "{}"}, name="digits", tags=["baton"], key="a/0"),
    )


@pytest.mark.parametrize(("code", "passes"), [(408, True), (400, False), (409, False)])
def test_what_is_too_slow_is_asked_again_and_what_is_wrong_is_not(code: int, *, passes: bool) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)

    runs = FlowRuns(telemetry=Heard(), clock=lambda: 1000.0 * len(slept), sleep=sleep)
    with server_that_says(code), pytest.raises(StageLost if passes else PrefectHTTPStatusError):
        runs.require_deployment("train-segment/docker", of="stages.train_segment.deployment")
    assert bool(slept) == passes


@pytest.mark.slow
def test_the_command_refuses_a_wrong_key_and_writes_nothing(tmp_path: Path) -> None:
    run = run_with_code(tmp_path)
    before = run.files()
    with server_that_says(401) as url:
        environment = environment_with(tmp_path / "prefect", PREFECT_API_URL=url)
        done = baton(environment, "run", str(run.run_file()), "--set", "train.steps=200")
    assert done.returncode == 2, done.stderr
    assert "PREFECT_API_KEY" in done.stderr
    assert "unexpected" not in done.stderr
    assert run.files() == before
