"""Prefect's API behind flow runs: what of it is heeded, and for how long it is waited for."""

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import httpx
import pytest
from played_api import Heard
from prefect.states import Cancelling, Running

from flows.flow_runs import FlowRuns
from tasks.foundation.contracts.run_spec import StopSpec
from tasks.foundation.errors import (
    StageLost,
)
from tasks.foundation.stops.holding import hold


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

    assert hold(lambda _: runs._patiently(comes_back), StopSpec()) == "here"
    assert times == sorted(set(times))
    assert heard.text.count("does not answer") == 1

    def stays_away(_client: object) -> str:
        raise httpx.ConnectError("refused")

    began = slept[0]
    with pytest.raises(StageLost) as caught:
        hold(lambda _: runs._patiently(stays_away), StopSpec())
    assert caught.value.exit_code == 3
    assert slept[0] - began >= 600

    # Whoever has been told to go has not that much time.
    began = slept[0]
    with pytest.raises(StageLost):
        hold(lambda _: runs._patiently(stays_away), StopSpec(), within_seconds=1e-9)
    assert slept[0] - began < 30


def test_flow_runs_that_were_cancelled_long_ago_are_not_waited_for() -> None:
    now = datetime.now(UTC)
    states = [Running(), Cancelling(timestamp=now), Cancelling(timestamp=now - timedelta(hours=1))]
    found = [SimpleNamespace(id=number, state=state, parameters={}) for number, state in enumerate(states)]
    client = SimpleNamespace(read_flow_runs=lambda **_: found)
    runs = FlowRuns(telemetry=Heard(), connect=lambda: nullcontext(client))  # type: ignore[arg-type]
    assert runs.unfinished(["baton"], lambda _: True) == [0, 1]
