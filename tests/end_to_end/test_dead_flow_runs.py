"""Flow runs that died in any state free the only slot of their deployment, even if the server forgot their leases."""

import json
import os
import signal
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.homes import tip_of
from tests.support.prefect_deployments import ENDED, Prefect
from tests.support.prefect_server import Server, post, serving
from tests.support.shipped_runs import SLOW, slow_digits
from tests.support.watching import attempts_of, wait_until

pytestmark = pytest.mark.slow

# The server keeps its leases in memory, which is Prefect's default.
SETTINGS = {
    # A machine that takes long to start the server again does not lose what the automations wait for.
    "PREFECT_SERVER_EVENTS_EXPIRED_BUCKET_BUFFER": "PT1H",
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_LOOP_SECONDS": "1",
}
AFTER_THE_RESTART = {"PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_CANCELLING_TIMEOUT_SECONDS": "1"}  # otherwise 300
STEPS = ["train.steps=30", "train.log_every_steps=10"]  # pauses at step 10 until it is killed
COPIED = (
    "flow_id", "entrypoint", "path", "pull_steps", "parameters", "tags", "work_pool_name", "job_variables",
    "concurrency_options",
)  # fmt: skip


def copy_of(prefect: Prefect, deployment: str, name: str, **changes: Any) -> str:
    """A deployment like another one, with a concurrency limit of its own; returns its id."""
    shipped = prefect.deployment(deployment)
    body = {key: shipped[key] for key in COPIED} | {"name": name, "concurrency_limit": 1} | changes
    return str(post(prefect.url, "deployments/", body)["id"])


def tick(prefect: Prefect, deployment: str) -> str:
    """Create a flow run and set it to PENDING, as a worker does first; returns its new state."""
    flow_run = prefect.start(deployment)
    response = post(prefect.url, f"flow_runs/{flow_run}/set_state", {"state": {"type": "PENDING"}})
    return str(response["state"]["type"])


def waited_for(server_home: Path) -> set[tuple[str, str]]:
    """Each automation and flow run whose next event the automation waits for, as the server has stored it."""
    query = (
        "SELECT automation.name, bucketing_key FROM automation_bucket "
        "JOIN automation ON automation.id = automation_id WHERE count < 1"
    )
    with closing(sqlite3.connect(f"file:{server_home / 'prefect.db'}?mode=ro", uri=True)) as database:
        rows = database.execute(query).fetchall()
    return {(name, json.loads(key)[0].removeprefix("prefect.flow-run.")) for name, key in rows}


def let_automations_time_out(server_home: Path) -> None:
    """Set the clock of the automations of a server that is down to the end of their wait, which takes minutes."""
    now = datetime.now(UTC).replace(tzinfo=None)
    with closing(sqlite3.connect(server_home / "prefect.db")) as database, database:
        database.execute('UPDATE automation_bucket SET "end" = ?', (now.isoformat(" ", "microseconds"),))


class Waiting:
    """Processes in the place of flow runs', which never report to Prefect: like a machine that is slow to start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._script = folder / "waits.sh"
        self._script.write_text('echo $$ > "$1.new"\nmv "$1.new" "$1"\nexec sleep 600\n', encoding="utf-8")

    def start(self, prefect: Prefect, deployment: str, name: str) -> str:
        """Create a flow run with such a process; returns its id."""
        return prefect.start(deployment, job_variables={"command": f"sh {self._script} {self._folder / name}"})

    def pid(self, name: str) -> int:
        """Wait until the worker has started it."""
        wait_until((self._folder / name).exists)
        return int((self._folder / name).read_text(encoding="utf-8"))


def die(
    prefect: Prefect, deployments: dict[str, str], *, waiting: Waiting, home: Path, server_home: Path
) -> dict[str, str]:
    """Kill a worker, two flow runs that it has not started yet, and one that it has; returns their ids."""
    with prefect.worker() as worker:
        # One after another: Prefect's SQLite database blocks for a minute if several flow runs take slots at once.
        flow_runs, pids = {}, []
        for name in ("pending", "cancelled", "unwatched"):
            flow_runs[name] = waiting.start(prefect, deployments[name], name)
            pids.append(waiting.pid(name))
        flow_runs["running"] = prefect.start(deployments["running"])
        wait_until(lambda: len(attempts_of(home)) == 1)
        pids.append(attempts_of(home)[0].pid)
        expected = {("baton-pending-processes", flow_runs["pending"]), ("baton-zombies", flow_runs["running"])}
        wait_until(lambda: expected <= waited_for(server_home))
        worker.kill()
        worker.wait()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return flow_runs


@pytest.mark.timeout(1500)
def test_dead_flow_runs_free_their_slots(tmp_path: Path) -> None:
    """Three flow runs die before, at and after their start, and then the server, which keeps no leases on disk."""
    server_home, home = tmp_path / "server", tmp_path / "runs" / "digits-cnn"
    server_home.mkdir()
    server = Server(server_home, **SETTINGS)
    with serving(server) as url:
        prefect = Prefect(url, tmp_path)
        prefect.environment |= {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30", "BATON_TEST_PAUSE_SECONDS": "600"}
        for name in ("zombies", "pending"):
            prefect.command("automation", "create", "--from-file", f"deploy/automations/{name}.yaml")
        file = str(slow_digits(tmp_path / "slow"))
        overrides = [f"storage={tmp_path / 'runs'}", "accelerator.kind=cpu", *SLOW, *STEPS]
        nightly = prefect.deploy_shipped("train-run", "nightly", run_file=file, overrides=overrides)
        deployments = {name: copy_of(prefect, nightly, name) for name in ("pending", "cancelled", "running")}
        # The shipped automation of flow runs that do not start is for those of Baton's deployments.
        deployments["unwatched"] = copy_of(prefect, nightly, "unwatched", tags=[])

        # A flow run that no worker has taken holds no slot. It is cancelled at once.
        early = prefect.start(deployments["cancelled"])
        prefect.cancel(early)
        assert prefect.state(early) == "CANCELLED"

        dead = die(prefect, deployments, waiting=Waiting(tmp_path), home=home, server_home=server_home)
        states = {name: prefect.state(flow_run) for name, flow_run in dead.items()}
        assert states == {"pending": "PENDING", "cancelled": "PENDING", "unwatched": "PENDING", "running": "RUNNING"}
        prefect.cancel(dead["cancelled"])
        assert prefect.state(dead["cancelled"]) == "CANCELLING"
        # All of them hold their slots, and the next flow runs are cancelled.
        assert {tick(prefect, each) for each in deployments.values()} == {"CANCELLED"}

        server.kill()
        let_automations_time_out(server_home)
        server.start(**AFTER_THE_RESTART)
        # The automations mark two, and Prefect itself the one that was to be cancelled.
        ends = {"pending": "CRASHED", "cancelled": "CANCELLED", "running": "CRASHED"}
        wait_until(lambda: all(prefect.state(dead[name]) == end for name, end in ends.items()))
        # Without them a slot stays taken: the server has forgotten the lease, and nothing else frees it.
        assert prefect.state(dead["unwatched"]) == "PENDING"
        assert tick(prefect, deployments["unwatched"]) == "CANCELLED"

        # The next flow run trains the run to its end; the other slots are free too.
        prefect.environment["BATON_TEST_PAUSE_SECONDS"] = "0"
        with prefect.worker():
            following = prefect.start(deployments["pending"])
            wait_until(lambda: prefect.state(following) in ENDED)
        assert prefect.run(following)["state_name"] == "Completed"
        assert tip_of(home).step == 30
        assert [tick(prefect, deployments[name]) for name in ("cancelled", "running")] == ["PENDING", "PENDING"]


def test_waiting_flow_run_is_cancelled_by_its_worker(server: str, tmp_path: Path) -> None:
    prefect = Prefect(server, tmp_path)
    deployment = copy_of(prefect, prefect.deploy_shipped("train-run", "nightly"), "waits")
    waiting = Waiting(tmp_path)
    with prefect.worker():
        flow_run = waiting.start(prefect, deployment, "flow-run")
        waiting.pid("flow-run")
        assert tick(prefect, deployment) == "CANCELLED"
        prefect.cancel(flow_run)
        wait_until(lambda: prefect.state(flow_run) == "CANCELLED")
    assert tick(prefect, deployment) == "PENDING"
