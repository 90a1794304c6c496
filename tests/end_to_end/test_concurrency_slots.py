"""Prefect releases the slot of a flow run whose worker died, also if the server restarts: with leases on disk."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.checkout import CHECKOUT
from tests.support.prefect_server import Server, post, serving

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

# The shortest lease that Prefect allows; the default is 300 seconds.
SETTINGS = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_CONCURRENCY_INITIAL_DEPLOYMENT_LEASE_DURATION": "30",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "1",
}


def shipped_limits() -> list[dict[str, Any]]:
    text = (CHECKOUT / "deploy" / "prefect.yaml").read_text(encoding="utf-8")
    return [each["concurrency_limit"] for each in yaml.safe_load(text)["deployments"] if "concurrency_limit" in each]


def submitted(url: str, deployment: str) -> str:
    """Create a flow run and set it to PENDING, as a worker does before it starts a process; returns its new state."""
    flow_run = post(url, f"deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}})
    response = post(url, f"flow_runs/{flow_run['id']}/set_state", {"state": {"type": "PENDING"}})
    return str(response["state"]["type"])


def test_dead_worker_holds_the_slot_for_one_lease(tmp_path: Path) -> None:
    limit = shipped_limits()[0]
    for each in shipped_limits():
        assert (each["limit"], each["collision_strategy"]) == (1, "CANCEL_NEW")
    server = Server(tmp_path, **SETTINGS)
    with serving(server) as url:
        flow = post(url, "flows/", {"name": "train-run"})
        deployment = post(
            url,
            "deployments/",
            {
                "name": "nightly",
                "flow_id": flow["id"],
                "concurrency_limit": limit["limit"],
                "concurrency_options": {"collision_strategy": limit["collision_strategy"]},
            },
        )["id"]
        assert submitted(url, deployment) == "PENDING"  # no process renews its lease
        assert submitted(url, deployment) == "CANCELLED"
        server.kill()
        server.start()
        deadline = time.monotonic() + 300
        while submitted(url, deployment) != "PENDING":
            assert time.monotonic() < deadline, "the slot is never released"
            time.sleep(3)
