"""Fault plans can be replayed, keep their rates, and are checked."""

import json
from typing import Any

import pytest

from tests.fakes.gcs.faults import FAULTS, FaultPlan, FaultRun

# Without checksum headers a client cannot verify the bytes.
DRAWN = [kind for kind in FAULTS if kind != "bare"]
EVERYTHING = FaultPlan.random(seed=7, rates=dict.fromkeys(DRAWN, 0.05))


def replay(plan: FaultPlan, requests: int = 300) -> list[Any]:
    run = FaultRun(plan)
    kinds = ("object.insert", "object.media", "upload.chunk", "object.list")
    return [run.next("GET", kinds[number % 4], f"/b/bucket/o/{number % 7}") for number in range(requests)]


def test_same_plan_gives_the_same_faults() -> None:
    assert replay(EVERYTHING) == replay(FaultPlan(**json.loads(EVERYTHING.to_json())))
    assert {found.kind for found in replay(EVERYTHING, 3000) if found} == set(DRAWN)


def test_other_seed_gives_other_faults() -> None:
    assert replay(EVERYTHING) != replay(FaultPlan.random(seed=8, rates=EVERYTHING.rates))


def test_fault_rates_are_met() -> None:
    found = replay(FaultPlan.random(seed=1, rates={"status": 0.1}, max_consecutive=100), 5000)
    assert 400 < sum(one is not None for one in found) < 600
    assert {one.code for one in found if one} == {429, 500, 503}


def test_consecutive_faults_are_limited() -> None:
    run = FaultRun(FaultPlan.random(seed=1, rates={"status": 1.0}))
    found = [run.next("GET", "object.get", "/b/bucket/o/n") is not None for _ in range(8)]
    assert found == [True, True, True, False] * 2
    assert run.next("GET", "object.get", "/b/bucket/o/other") is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"rates": {"nonsense": 0.1}},
        {"rates": {"status": 0.9, "stall": 0.2}},
        {"rates": {"status": -0.1}},
        {"script": [{"fault": "nonsense"}]},
        {"script": [{"fault": "status", "matches": {}}]},
        {"script": [{"fault": "status", "fraction": 1.5}]},
    ],
)
def test_invalid_plan_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"nonsense|probabilities|unknown|within"):
        FaultPlan(**wrong)
