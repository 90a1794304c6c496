"""A user of a Prefect server: work pool, deployments, workers, flow runs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.prefect_server import environment_with, interrupt, post, prefect

POOL = "baton-process"  # as in deploy/prefect.yaml
ENDED = {"CANCELLED", "COMPLETED", "CRASHED", "FAILED"}


class Prefect:
    """A user with one process work pool on one server."""

    def __init__(self, url: str, folder: Path) -> None:
        """Create the work pool.

        Args:
            url: the server's API.
            folder: an existing folder for the user's PREFECT_HOME and the logs.
        """
        self.url = url
        self.environment = environment_with(folder / "prefect", PREFECT_API_URL=url, PREFECT_WORKER_QUERY_SECONDS="1")
        self.folder = folder
        with suppress(HTTPError):  # it is there
            post(url, "work_pools/", {"name": POOL, "type": "process"})

    def command(self, *words: str) -> str:
        """Run a `prefect` command; returns its output."""
        return prefect(self.environment, *words)

    def deploy(self, entrypoint: str, name: str) -> str:
        """Deploy a flow to the pool as `prefect deploy` does, which takes four seconds; returns the deployment id."""
        flow = post(self.url, "flows/", {"name": entrypoint.rpartition(":")[2].replace("_", "-")})
        settings = {"name": name, "flow_id": flow["id"], "entrypoint": entrypoint, "work_pool_name": POOL}
        step = {"prefect.deployments.steps.set_working_directory": {"directory": str(CHECKOUT)}}
        made = post(self.url, "deployments/", settings | {"pull_steps": [step], "enforce_parameter_schema": False})
        return str(made["id"])

    def deploy_shipped(self, flow: str, name: str, *words: str, **parameters: Any) -> str:
        """Deploy one of deploy/prefect.yaml with other settings; returns the deployment id."""
        given = ["--prefect-file", "deploy/prefect.yaml", "--params", json.dumps(parameters)]
        self.command("deploy", "--name", f"{flow}/{name}", *given, *words)
        return self._id_of(flow, name)

    def _id_of(self, flow: str, name: str) -> str:
        # Tests share a server, and two flows may have deployments of the same name.
        wanted = {"flows": {"name": {"any_": [flow]}}, "deployments": {"name": {"any_": [name]}}}
        (found,) = post(self.url, "deployments/filter", wanted)
        return str(found["id"])

    @contextmanager
    def worker(self, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        """A worker; its flow runs are forks unless `environment` changes what is imported, in PYTHONPATH."""
        forks = {} if "PYTHONPATH" in environment else forked.forking_python()
        environment = self.environment | forks | environment
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]
        with (self.folder / "worker.log").open("ab") as log:
            process = forked.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                yield process
            finally:
                interrupt(process)

    @contextmanager
    def executing(self, flow_run: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run `prefect flow-run execute`, configured to reschedule on SIGTERM."""
        command = [sys.executable, "-m", "prefect", "flow-run", "execute", flow_run]
        environment = (
            self.environment | {"PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule"} | forked.forking_python()
        )
        with (self.folder / "execute.log").open("ab") as log:
            process = forked.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            with forked.killed_at_end(process):
                yield process

    def start(self, deployment: str, **parameters: Any) -> str:
        """Create a flow run of a deployment; returns its id."""
        answer = post(self.url, f"deployments/{deployment}/create_flow_run", {"parameters": parameters})
        return str(answer["id"])

    def set_state(self, flow_run: str, **state: str) -> None:
        post(self.url, f"flow_runs/{flow_run}/set_state", {"state": state})

    def cancel(self, flow_run: str) -> None:
        post(self.url, f"flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})

    def deployment(self, deployment: str) -> dict[str, Any]:
        """The API's record of a deployment."""
        found = post(self.url, "deployments/filter", {"deployments": {"id": {"any_": [deployment]}}})
        return dict(found[0])

    def pause(self, deployment: str) -> None:
        """Pause the schedule."""
        post(self.url, f"deployments/{deployment}/pause_deployment", {})

    def resume(self, deployment: str) -> None:
        post(self.url, f"deployments/{deployment}/resume_deployment", {})

    def run(self, flow_run: str) -> dict[str, Any]:
        """The API's record of a flow run."""
        found = post(self.url, "flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
        return dict(found[0])

    def state(self, flow_run: str) -> str:
        return str(self.run(flow_run)["state_type"])

    def runs(self, deployment: str, *states: str) -> list[dict[str, Any]]:
        """Flow runs of a deployment in one of these states, ordered by start time."""
        filters = {"state": {"type": {"any_": list(states)}}}
        wanted = {
            "deployments": {"id": {"any_": [deployment]}},
            "flow_runs": filters,
            "sort": "EXPECTED_START_TIME_ASC",
        }
        return list(post(self.url, "flow_runs/filter", wanted))
