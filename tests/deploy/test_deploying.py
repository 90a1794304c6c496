"""Work pools, deployments and the automation on a real Prefect server."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.rendering import container, job_manifest
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.prefect_server import environment_with, post, running_server

pytestmark = pytest.mark.slow

POOLS = {"process": "process", "docker": "docker", "kubernetes": "kubernetes", "tpu": "kubernetes"}

# A flow that ends as Stopped, as train-run does, or runs until it is killed.
FLOWS = """
import os, time
from prefect import flow
from prefect.states import Completed

@flow
def works(marker: str, *, ends: bool = True):
    with open(marker, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(0 if ends else 600)
    return Completed(name="Stopped", message="max segments: step 200, with work left to do")
"""


def google_cloud_page() -> str:
    return (CHECKOUT / "deploy" / "google-cloud.md").read_text(encoding="utf-8")


class Server:
    """A Prefect server, and the commands that a user types."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.environment = environment_with(
            folder / "prefect",
            PREFECT_API_URL=url,
            PREFECT_WORKER_QUERY_SECONDS="1",
            BATON_REGISTRY="registry.example/team/",
            BATON_STORAGE="gs://bucket/runs",
        )

    def prefect(self, *words: str, cwd: Path = CHECKOUT) -> str:
        command = [sys.executable, "-m", "prefect", "--no-prompt", *words]
        done = forked.run(
            command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    def shell(self, typed: str, *, cwd: Path) -> None:
        command = ["/bin/sh", "-ec", f'prefect() {{ "{sys.executable}" -m prefect "$@"; }}\n{typed}']
        done = subprocess.run(
            command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def state(self, flow_run: str) -> tuple[str, str]:
        found = post(self.url, "flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})[0]["state"]
        return found["type"], found["name"]

    def wait(self, flow_run: str, wanted: tuple[str, str]) -> None:
        deadline = time.monotonic() + 300
        while (state := self.state(flow_run)) != wanted:
            assert time.monotonic() < deadline, f"the flow run is {state}"
            time.sleep(0.5)

    @contextmanager
    def worker(self, pool: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]
        with (self.folder / "worker.log").open("ab") as log:
            environment = self.environment | forked.forking_python()
            process = forked.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                yield process
            finally:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("prefect-server")
    with running_server(folder) as url:
        for name, kind in POOLS.items():  # as the `prefect work-pool create` of the pages does, which takes seconds
            template = json.loads((CHECKOUT / "deploy" / "work-pools" / f"{name}.json").read_text(encoding="utf-8"))
            post(url, "work_pools/", {"name": f"baton-{name}", "type": kind, "base_job_template": template})
        yield Server(url, folder)


def test_own_run_is_deployed_by_one_line(server: Server) -> None:
    page = (CHECKOUT / "deploy" / "README.md").read_text(encoding="utf-8")
    [typed] = re.findall(r"^```sh own\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    for _ in range(2):  # typed again, it makes no second one
        server.shell(typed.replace(".venv/bin/", ""), cwd=CHECKOUT)
    [deployment] = post(server.url, "deployments/filter", {"deployments": {"name": {"any_": ["iris"]}}})
    assert deployment["tags"] == ["baton"]
    assert deployment["parameters"] == {"run_file": "/home/me/iris/run.yaml", "max_seconds": 3600}
    assert [(each["schedule"]["cron"], each["active"]) for each in deployment["schedules"]] == [("*/15 * * * *", True)]
    assert deployment["global_concurrency_limit"]["limit"] == 1
    assert deployment["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"


def test_all_deployments_are_created(server: Server) -> None:
    server.prefect("deploy", "--all", "--prefect-file", "deploy/prefect.yaml")

    flows = {flow["id"]: flow["name"] for flow in post(server.url, "flows/filter", {})}
    found = {f"{flows[each['flow_id']]}/{each['name']}": each for each in post(server.url, "deployments/filter", {})}
    written = yaml.safe_load((CHECKOUT / "deploy" / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    found.pop("train-run/iris", None)  # of the test before
    assert len(found) == len(written)
    pools = {pool["name"]: pool["base_job_template"] for pool in post(server.url, "work_pools/filter", {})}

    for name, deployment in found.items():
        assert_form(name, deployment)
        assert deployment["tags"] == ["baton"]
        assert deployment["description"]
        assert not deployment["paused"]
        assert_renders(deployment, pools[deployment["work_pool_name"]])

    scheduled = {name: each["schedules"] for name, each in found.items() if each["schedules"]}
    assert set(scheduled) == {
        "train-run/nightly",
        "train-run/nightly-kubernetes",
        "evaluate-best/weekly",
        "evaluate-best/weekly-kubernetes",
        "audit/weekly",
        "verify/weekly",
    }
    for name, schedules in scheduled.items():
        assert [each["active"] for each in schedules] == [False]
        assert found[name]["global_concurrency_limit"]["limit"] == 1
        assert found[name]["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    assert found["train-run/nightly-kubernetes"]["concurrency_options"]["grace_period_seconds"] == 3600
    assert scheduled["train-run/nightly"][0]["schedule"]["cron"] == "*/15 0-5 * * *"
    assert "storage=gs://bucket/runs" in found["train-run/kubernetes"]["parameters"]["overrides"]

    # Deploy one by one, with another schedule in addition to the inactive one of the file.
    server.prefect(
        *("deploy", "--prefect-file", "deploy/prefect.yaml", "--name", "train-run/nightly", "--cron", "0 3 * * *"),
        *("--param", "max_segments=2"),
    )
    again = post(server.url, "deployments/filter", {"deployments": {"name": {"any_": ["nightly"]}}})[0]
    assert again["id"] == found["train-run/nightly"]["id"]
    crons = {(each["schedule"]["cron"], each["active"]) for each in again["schedules"]}
    assert crons == {("0 3 * * *", True), ("*/15 0-5 * * *", False)}
    assert again["parameters"]["max_segments"] == 2


def assert_form(name: str, deployment: dict[str, Any]) -> None:
    """The form in Prefect's UI: every parameter has a description, and is required or has a default."""
    schema = deployment["parameter_openapi_schema"]
    assert schema["properties"], name
    for parameter, shown in schema["properties"].items():
        assert len(shown.get("description", "")) > 10, f"{name}: {parameter}"
        assert ("default" in shown) != (parameter in schema.get("required", [])), f"{name}: {parameter}"
    assert set(deployment["parameters"]) <= set(schema["properties"])
    assert deployment["enforce_parameter_schema"]


def assert_renders(deployment: dict[str, Any], template: dict[str, Any]) -> None:
    """Render a job as the worker does, from the server's data."""
    pool, variables = deployment["work_pool_name"], deployment["job_variables"]
    directory = deployment["pull_steps"][0]["prefect.deployments.steps.set_working_directory"]["directory"]
    assert directory == (str(CHECKOUT) if pool == "baton-process" else "/opt/baton/baton")
    if pool == "baton-docker":
        assert container(template, variables).image == variables["image"]
    elif pool != "baton-process":
        manifest = job_manifest(template, variables)
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
        spec = manifest["spec"]["template"]["spec"]
        assert spec["containers"][0]["image"].startswith("registry.example/team/baton/")
        assert ("google.com/tpu" in spec["containers"][0]["resources"]["limits"]) == (pool == "baton-tpu")
        assert manifest["spec"]["backoffLimit"] == 0


def test_dead_flow_run_is_marked_crashed_and_stopped_is_not(server: Server) -> None:
    # The shipped automation, with a shorter time: neither flow run lives until its second heartbeat.
    automation = yaml.safe_load((CHECKOUT / "deploy" / "automations" / "zombies.yaml").read_text(encoding="utf-8"))
    automation["trigger"]["within"] = 20
    (server.folder / "zombies.yaml").write_text(yaml.safe_dump(automation), encoding="utf-8")
    # The command in deploy/google-cloud.md must work when it is repeated.
    typed = next(line for line in google_cloud_page().splitlines() if line.startswith("prefect automation "))
    for _ in range(2):
        server.shell(typed.replace("deploy/automations/", ""), cwd=server.folder)
    created = post(server.url, "automations/filter", {})
    assert [each["name"] for each in created] == ["baton-zombies"]

    (server.folder / "flows.py").write_text(FLOWS, encoding="utf-8")
    post(server.url, "work_pools/", {"name": "short", "type": "process"})
    settings = {"name": "tests", "flow_id": post(server.url, "flows/", {"name": "works"})["id"], "path": "."}
    settings |= {"entrypoint": "flows.py:works", "work_pool_name": "short", "enforce_parameter_schema": False}
    step = {"prefect.deployments.steps.set_working_directory": {"directory": str(server.folder)}}
    deployment = post(server.url, "deployments/", settings | {"pull_steps": [step]})["id"]

    def start(**parameters: Any) -> str:
        body = {"parameters": parameters, "job_variables": {"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}}}
        return str(post(server.url, f"deployments/{deployment}/create_flow_run", body)["id"])

    with server.worker("short") as worker:
        stopped = start(marker=str(server.folder / "stopped"))
        server.wait(stopped, ("COMPLETED", "Stopped"))
        vanished = start(marker=str(server.folder / "vanished"), ends=False)
        server.wait(vanished, ("RUNNING", "Running"))
        while not heartbeats(server, vanished):
            time.sleep(0.5)
        # Like a dying machine: kill the worker first, as it would report the other. The flow run's process outlives it.
        worker.kill()
        worker.wait()
        os.kill(int((server.folder / "vanished").read_text(encoding="utf-8")), signal.SIGKILL)
    assert server.state(vanished) == ("RUNNING", "Running")
    server.wait(vanished, ("CRASHED", "Crashed"))
    assert server.state(stopped) == ("COMPLETED", "Stopped")


def heartbeats(server: Server, flow_run: str) -> int:
    wanted = {
        "event": {"name": ["prefect.flow-run.heartbeat"]},
        "resource": {"id": [f"prefect.flow-run.{flow_run}"]},
    }
    return int(post(server.url, "events/filter", {"filter": wanted})["total"])


class Receiver(HTTPServer):
    """A webhook on this machine; `texts` has what arrived."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        received = self.texts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def test_alerts_reach_a_webhook(server: Server, receiver: Receiver) -> None:
    folder = server.folder / "deploy" / "automations"
    folder.mkdir(parents=True)
    shipped = (CHECKOUT / "deploy" / "automations" / "alerts.yaml").read_text(encoding="utf-8")
    assert shipped.count("within: 3600") == 1
    within = 45
    (folder / "alerts.yaml").write_text(shipped.replace("within: 3600", f"within: {within}"), encoding="utf-8")
    page = (CHECKOUT / "deploy" / "README.md").read_text(encoding="utf-8")
    [typed] = re.findall(r"^```sh alerts\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert "https://hooks.example.com/baton" in typed
    typed = typed.replace("https://hooks.example.com/baton", f"http://127.0.0.1:{receiver.server_port}/hook")
    typed = typed.replace(".venv/bin/prefect", "prefect").replace(".venv/bin/python", sys.executable)
    server.shell(f"export TMPDIR={server.folder}\n{typed}", cwd=server.folder)

    def begun(flow: str, name: str) -> str:
        flow_id = post(server.url, "flows/", {"name": flow})["id"]
        flow_run = str(post(server.url, "flow_runs/", {"flow_id": flow_id, "name": name})["id"])
        set_state(flow_run, "RUNNING", "Running")
        return flow_run

    def set_state(flow_run: str, kind: str, name: str, message: str | None = None) -> None:
        state = {"type": kind, "name": name, "message": message}
        post(server.url, f"flow_runs/{flow_run}/set_state", {"state": state, "force": True})

    ends = {
        "failed": ("train-run", "FAILED", "Failed"),
        "damaged": ("verify", "FAILED", "Damaged"),
        "diverged": ("train-run", "FAILED", "BlewUp"),
        "wrong": ("audit", "FAILED", "Differs"),
        "other metrics": ("evaluate-best", "COMPLETED", "Differs"),
        "done": ("train-run", "COMPLETED", "Completed"),
        "cut": ("train-run", "COMPLETED", "Stopped"),
        "lost": ("train-run", "CRASHED", "Crashed"),
        "a stage": ("train-segment", "FAILED", "NonFinite"),
    }
    # A flow run that commits for longer than the automation waits gives no alert. It ends before the first alert: after
    # one, Prefect's event loop can free a cursor of a connection to SQLite that waits for another one to commit; the
    # other cannot, and the server stands still until that wait ends, after 60 s.
    commits, began = begun("train-run", "commits"), time.monotonic()
    flow_id = post(server.url, "flows/", {"name": "train-run"})["id"]
    related = {"prefect.resource.id": f"prefect.flow.{flow_id}", "prefect.resource.role": "flow"}
    silent = None
    while time.monotonic() < began + within + 15:
        if silent is None and time.monotonic() > began + 35:  # its alert comes when the other one has ended
            silent = begun("train-run", "silent")
        commit = {
            "id": str(uuid.uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": "baton.commit",
            "resource": {"prefect.resource.id": f"prefect.flow-run.{commits}"},
            "related": [{**related, "prefect.resource.name": "train-run"}],
        }
        post(server.url, "events", [commit])
        time.sleep(1)
    set_state(commits, "COMPLETED", "Completed")
    for name, (flow, kind, state) in ends.items():
        set_state(begun(flow, name), kind, state, f"why: {name}")
    expected = [
        "baton-blew-up: diverged: why: diverged",
        "baton-differs: other metrics: why: other metrics",
        "baton-differs: wrong: why: wrong",
        "baton-failed: damaged: why: damaged",
        "baton-failed: failed: why: failed",
        "baton-no-commit: silent: Running",
    ]
    deadline = time.monotonic() + 400
    # A set: Prefect calls a webhook at least once, and again when its database was too busy to keep that it did.
    while len(set(receiver.texts)) < len(expected):
        assert time.monotonic() < deadline, receiver.texts
        time.sleep(0.5)
    assert sorted(set(receiver.texts)) == expected
