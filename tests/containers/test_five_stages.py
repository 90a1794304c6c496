"""The digits run with each stage in its own container, a Prefect server and a Docker worker.

The containers share only the bucket. One training container is killed and one is stopped. The result has the bits of a
run in one process.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from baton.tasks.foundation.contracts.attempt import AttemptRecord
from baton.tasks.foundation.contracts.log_entry import Commit, EvaluationOnTest
from baton.tasks.foundation.log.attempts import read_attempts
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.opening import open_storage
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.engine import Engine
from tests.support.prefect_server import environment_with, interrupt, patch, post, prefect, running_server
from tests.support.shipped_runs import DRIVER, SHORT, run_file
from tests.support.watching import wait_until

if TYPE_CHECKING:
    from tests.fakes.gcs.server import FakeGcs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

POOLS = {"baton-process": "process", "baton-docker": "docker", "baton-kubernetes": "kubernetes", "baton-tpu": "tpu"}
# The image of each stage. Evaluation uses the training image to save a build; test_built_images.py checks its image.
IMAGES = {
    "prepare-data": "prepare-data",
    "init-or-restore": "train-cpu",
    "train-segment": "train-cpu",
    "checkpoint-to-gcs": "checkpoint",
    "evaluate": "train-cpu",
}
SETTINGS = [
    "accelerator.kind=cpu", *SHORT["digits"], "train.steps=3000", "train.segment_steps=3000",
    "train.log_every_steps=100", "evaluate.every_steps=null", "data.test={source: digits}",
]  # fmt: skip


class Cluster:
    """A Prefect server with Baton's deployments, and a Docker worker on the engine."""

    def __init__(self, url: str, folder: Path, *, engine: Engine, docker_host: str) -> None:
        self.url, self.folder, self.engine = url, folder, engine
        self.environment = environment_with(
            folder / "prefect",
            PREFECT_API_URL=url,
            PREFECT_WORKER_QUERY_SECONDS="1",
            DOCKER_HOST=docker_host,
            BATON_REGISTRY="registry.invalid/",
            BATON_STORAGE="gs://bucket/runs",
        )

    def deploy(self, images: dict[str, str], env: dict[str, str]) -> None:
        """Deploy as in deploy/README.md, then set the images, the network and the Cloud Storage of this test."""
        for pool, template in POOLS.items():
            kind = "kubernetes" if template == "tpu" else template
            file = f"deploy/work-pools/{template}.json"
            prefect(self.environment, "work-pool", "create", pool, "--type", kind, "--base-job-template", file)
        prefect(self.environment, "deploy", "--all", "--prefect-file", "deploy/prefect.yaml")
        for flow, image in images.items():
            (found,) = post(
                self.url,
                "deployments/filter",
                {"flows": {"name": {"any_": [flow]}}, "deployments": {"name": {"any_": ["docker"]}}},
            )
            variables = {
                **found["job_variables"],
                "image": image,
                "network_mode": "host",
                "volumes": [f"{CHECKOUT / 'deploy' / 'runs'}:/code:ro"],
                "env": {**found["job_variables"].get("env", {}), **env},
            }
            patch(self.url, f"deployments/{found['id']}", {"job_variables": variables})

    @contextmanager
    def process(self, name: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", *words]
            process = forked.Popen(command, cwd=CHECKOUT, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                yield process
            finally:
                interrupt(process)

    def flow_runs(self, stage: str) -> list[dict[str, Any]]:
        tags = {"all_": ["baton", "run:digits-cnn", f"stage:{stage}"]}
        wanted = {"flow_runs": {"tags": tags}, "sort": "EXPECTED_START_TIME_ASC"}
        return list(post(self.url, "flow_runs/filter", wanted))

    def containers(self, flow_run: str, *more: str) -> list[str]:
        found = self.engine.podman("ps", "--quiet", *more, "--filter", f"label=io.prefect.flow-run-id={flow_run}")
        return found.stdout.split()

    def remove_containers(self) -> None:
        """Remove all containers that the worker created."""
        made = [self.containers(str(run["id"]), "--all") for stage in IMAGES for run in self.flow_runs(stage)]
        for container in itertools.chain.from_iterable(made):
            self.engine.podman("rm", "--force", "--time", "0", container)


def segments_of(home: Storage) -> list[AttemptRecord]:
    """Attempts of train_segment stages that have trained."""
    return [record for record in read_attempts(home).records if record.within and record.step > record.from_step]


def on_test(home: Storage) -> list[tuple[int, dict[str, float], int]]:
    """Step, metrics and number of examples of each evaluation on the test set."""
    bodies = [entry.body for entry in RunLog(home).entries() if isinstance(entry.body, EvaluationOnTest)]
    return [(body.checkpoint.step, dict(body.metrics), body.examples) for body in bodies]


def straight_digest(folder: Path) -> str:
    """The state digest of the same run in one process, in a local folder."""
    words = [word for setting in [*SETTINGS, f"storage={folder}"] for word in ("--set", setting)]
    done = forked.run(
        [sys.executable, str(DRIVER), str(run_file("digits")), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout.splitlines()[-1])["state_digest"])


@pytest.fixture
def images(engine: Engine) -> Callable[[], dict[str, str]]:
    def build() -> dict[str, str]:
        built = {image: engine.build(image) for image in dict.fromkeys(IMAGES.values())}
        return {stage: built[image] for stage, image in IMAGES.items()}

    return build


def test_five_containers_make_the_same_bits(
    engine: Engine, images: Callable[[], dict[str, str]], cloud: "FakeGcs", tmp_path: Path
) -> None:
    built = images()
    digest = straight_digest(tmp_path / "straight")
    home = open_storage("gs://bucket/runs", relative_to=tmp_path).at("digits-cnn")
    with running_server(tmp_path) as url, engine.serving() as docker_host, ExitStack() as stack:
        cluster = Cluster(url, tmp_path, engine=engine, docker_host=docker_host)
        stack.callback(cluster.remove_containers)
        cluster.deploy(built, {"STORAGE_EMULATOR_HOST": cloud.url, "PREFECT_API_URL": url, "NO_GCE_CHECK": "true"})
        places = [
            f"stages.{stage.replace('-', '_')}={{deployment: {stage}/docker, code_folder: /code/digits}}"
            for stage in IMAGES
        ]
        words = [word for setting in [*SETTINGS, "storage=gs://bucket/runs", *places] for word in ("--set", setting)]
        worker = ("prefect", "worker", "start", "--pool", "baton-docker", "--type", "docker")
        with (
            cluster.process("worker", *worker),
            cluster.process("baton", "baton.flows.commands.main", "run", str(run_file("digits")), *words) as command,
        ):
            for count, name in enumerate(("SIGKILL", "SIGTERM")):
                wait_until(lambda count=count: len(segments_of(home)) > count, command)  # type: ignore[misc]
                (container,) = cluster.containers(str(cluster.flow_runs("train-segment")[-1]["id"]))
                engine.podman("kill", "--signal", name, container)
            assert command.wait(timeout=1200) == 0, (tmp_path / "baton.log").read_text(encoding="utf-8")
        states = {stage: [run["state_type"] for run in cluster.flow_runs(stage)] for stage in IMAGES}

    log = RunLog(home)
    tip = log.require_head().tip
    assert tip is not None
    assert (tip.step, tip.state_digest) == (3000, digest)
    entries = list(log.entries())
    assert [entry.number for entry in entries] == list(range(len(entries)))
    reasons = [entry.body.exit_reason for entry in entries if isinstance(entry.body, Commit)]
    assert "sigterm" in reasons
    assert reasons[-1] == "segment_end"
    # The test set was prepared in a container, and evaluated once, in another one.
    straight = open_storage(str(tmp_path / "straight"), relative_to=tmp_path).at("digits-cnn")
    assert on_test(home) == on_test(straight)
    assert [(step, examples) for step, _, examples in on_test(home)] == [(3000, 1797)]
    # Every stage ran in containers, and one training container was killed.
    assert all(found and found[-1] == "COMPLETED" for found in states.values()), states
    assert "CRASHED" in states["train-segment"]
    assert len({record.process for record in read_attempts(home).records}) >= 8
