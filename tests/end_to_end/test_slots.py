"""The slot of a supervisor's deployment is free again after a worker died before its flow run ran."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prefect_server import Server, ask, serving
from tests.support.shipped_runs import CHECKOUT

pytestmark = pytest.mark.slow

# The shortest lease that Prefect allows; 300 seconds by default.
SETTINGS = {
    "PREFECT_SERVER_CONCURRENCY_INITIAL_DEPLOYMENT_LEASE_DURATION": "30",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "1",
}


def shipped_limits() -> list[dict[str, Any]]:
    text = (CHECKOUT / "deploy" / "prefect.yaml").read_text(encoding="utf-8")
    return [each["concurrency_limit"] for each in yaml.safe_load(text)["deployments"] if "concurrency_limit" in each]


def submitted(url: str, deployment: str) -> str:
    """Have a flow run made and made pending, as a worker does before it starts a process; the state that it gets."""
    flow_run = ask(url, f"deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}})
    answer = ask(url, f"flow_runs/{flow_run['id']}/set_state", {"state": {"type": "PENDING"}})
    return str(answer["state"]["type"])


def test_a_worker_that_dies_before_its_flow_run_runs_holds_the_slot_for_one_lease(tmp_path: Path) -> None:
    limit = shipped_limits()[0]
    for each in shipped_limits():
        assert (each["limit"], each["collision_strategy"]) == (1, "CANCEL_NEW")
    with serving(Server(tmp_path, **SETTINGS)) as url:
        flow = ask(url, "flows/", {"name": "train-run"})
        deployment = ask(
            url,
            "deployments/",
            {
                "name": "nightly",
                "flow_id": flow["id"],
                "concurrency_limit": limit["limit"],
                "concurrency_options": {"collision_strategy": limit["collision_strategy"]},
            },
        )["id"]
        assert submitted(url, deployment) == "PENDING"  # and nobody is there who renews its lease
        assert submitted(url, deployment) == "CANCELLED"
        deadline = time.monotonic() + 300
        while submitted(url, deployment) != "PENDING":
            assert time.monotonic() < deadline, "the slot is held for good"
            time.sleep(3)
