"""What a user of a Prefect server does: a work pool, deployments, workers, flow runs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.prefect_server import ask, environment_with, interrupt
from tests.support.shipped_runs import CHECKOUT

POOL = "baton-process"  # as in deploy/prefect.yaml
ENDED = {"CANCELLED", "COMPLETED", "CRASHED", "FAILED"}


class Prefect:
    """One user, with one process pool, against one server."""

    def __init__(self, url: str, folder: Path) -> None:
        """Make the pool.

        Args:
            url: of the server's API.
            folder: an existing one, for the user's PREFECT_HOME and what workers say.
        """
        self.url = url
        self.environment = environment_with(folder / "prefect", PREFECT_API_URL=url, PREFECT_WORKER_QUERY_SECONDS="1")
        self.folder = folder
        self.command("work-pool", "create", POOL, "--type", "process", "--overwrite")

    def command(self, *words: str) -> str:
        """What a `prefect` command says."""
        done = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *words],
            cwd=CHECKOUT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self, entrypoint: str, name: str) -> str:
        """A deployment of a flow on the pool, with nothing set; its id."""
        self.command("deploy", entrypoint, "--name", name, "--pool", POOL)
        return self._id_of(name)

    def deploy_shipped(self, flow: str, name: str, *words: str, **parameters: Any) -> str:
        """A deployment of deploy/prefect.yaml, with other settings; its id."""
        given = ["--prefect-file", "deploy/prefect.yaml", "--params", json.dumps(parameters)]
        self.command("deploy", "--name", f"{flow}/{name}", *given, *words)
        return self._id_of(name)

    def _id_of(self, name: str) -> str:
        found = ask(self.url, "deployments/filter", {"deployments": {"name": {"any_": [name]}}})
        return str(found[0]["id"])

    @contextmanager
    def worker(self, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]
        with (self.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=CHECKOUT, env=self.environment | environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                yield process
            finally:
                interrupt(process)

    @contextmanager
    def executing(self, flow_run: str) -> Iterator[subprocess.Popen[bytes]]:
        """`prefect flow-run execute`, told to reschedule on SIGTERM."""
        command = [sys.executable, "-m", "prefect", "flow-run", "execute", flow_run]
        environment = self.environment | {"PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule"}
        with (self.folder / "execute.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()

    def start(self, deployment: str, **parameters: Any) -> str:
        """A flow run of a deployment; its id."""
        answer = ask(self.url, f"deployments/{deployment}/create_flow_run", {"parameters": parameters})
        return str(answer["id"])

    def set_state(self, flow_run: str, **state: str) -> None:
        ask(self.url, f"flow_runs/{flow_run}/set_state", {"state": state})

    def cancel(self, flow_run: str) -> None:
        ask(self.url, f"flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})

    def deployment(self, deployment: str) -> dict[str, Any]:
        """A deployment as the API has it."""
        found = ask(self.url, "deployments/filter", {"deployments": {"id": {"any_": [deployment]}}})
        return dict(found[0])

    def pause(self, deployment: str) -> None:
        """Its schedule starts nothing more."""
        ask(self.url, f"deployments/{deployment}/pause_deployment", {})

    def resume(self, deployment: str) -> None:
        ask(self.url, f"deployments/{deployment}/resume_deployment", {})

    def run(self, flow_run: str) -> dict[str, Any]:
        """A flow run as the API has it."""
        found = ask(self.url, "flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
        return dict(found[0])

    def state(self, flow_run: str) -> str:
        return str(self.run(flow_run)["state_type"])

    def runs(self, deployment: str, *states: str) -> list[dict[str, Any]]:
        """Flow runs of a deployment in one of these states, in the order of their times."""
        filters = {"state": {"type": {"any_": list(states)}}}
        wanted = {
            "deployments": {"id": {"any_": [deployment]}},
            "flow_runs": filters,
            "sort": "EXPECTED_START_TIME_ASC",
        }
        return list(ask(self.url, "flow_runs/filter", wanted))
