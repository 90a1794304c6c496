"""The JobSet's three hosts as three containers of this machine, which are killed by turns.

The test starts and restarts them as JobSet's controller does, with the command, the environment and the failure
policies of deploy/jobset.yaml; only the image, the storage and the addresses are others. They share nothing but the
bucket.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.opening import open_storage
from tests.deploy.rendering import JobOfJobSet
from tests.support.engine import Engine
from tests.support.prefect_server import post, running_server
from tests.support.watching import wait_until
from tests.support.worker_processes import free_addresses

if TYPE_CHECKING:
    from tests.fakes.gcs.server import FakeGcs

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3600)]

MODEL = """
import keras


def build_model():
    layers = [keras.Input((4,)), keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model
"""
DATA = """
def load():
    for number in range(600):
        yield [number / 600, number % 7, number % 5, number % 3], number % 3
"""
RUN = """
run: hosts
storage: ./runs
data: {source: data.py:load, validation_fraction: 0.1}
model: model.py:build_model
train: {steps: 6000, segment_steps: 200, global_batch_size: 48, log_every_steps: 50}
evaluate: {every_steps: 1000}
"""
KILLED = 128 + 9
# The exit codes of a host that gets a signal. TensorFlow can pass SIGTERM on when another host has stopped before.
ENDS = {"KILL": {KILLED}, "TERM": {3, 128 + 15}}
CHIEF, FIRST, LAST = 0, 1, 2


class Hosts:
    """The pods of the JobSet, as containers."""

    def __init__(self, engine: Engine, image: str, code: Path, bucket: str, env: dict[str, str]) -> None:
        self.job, self.containers = JobOfJobSet("jobset.yaml", "worker"), list[str]()
        self._engine, self._image, self._code, self._env = engine, image, code, env
        self._storage = f"gs://bucket/{bucket}"
        self._log = RunLog(open_storage(self._storage, relative_to=code).at("hosts"))

    def start(self, *, hosts: int | None = None) -> None:
        """Start all hosts anew, or the first ones."""
        self.remove()
        addresses = ",".join(free_addresses(self.job.pods))
        words = [word.replace("gs://BUCKET/runs", self._storage) for word in self.job.container["args"]]
        for index in range(self.job.pods if hosts is None else hosts):
            environment = self.job.environment(index) | self._env | {"BATON_HOSTS": addresses}
            options = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
            options += ["--network", "host", "--volume", f"{self._code}:/code:ro"]
            run = self._engine.podman("run", "--detach", "--pull=never", *options, self._image, *words)
            self.containers.append(run.stdout.strip())

    def remove(self) -> None:
        """Remove the containers, and kill those that still run."""
        if self.containers:
            self._engine.podman("rm", "--force", "--time", "0", *self.containers)
        self.containers.clear()

    def send(self, name: str, index: int) -> None:
        """Send a signal to a host."""
        self._engine.podman("kill", "--signal", name, self.containers[index])

    def ends(self) -> list[int]:
        """The exit codes of all hosts; waits for them."""
        return [int(code) for code in self._engine.podman("wait", *self.containers, timeout=900).stdout.split()]

    def output(self, index: int) -> str:
        """What a host has printed."""
        done = self._engine.podman("logs", self.containers[index])
        return done.stdout + done.stderr

    def wait_for_commits(self, count: int) -> None:
        """Wait until the log has so many commits."""
        wait_until(lambda: self.commits() >= count)

    def commits(self) -> int:
        """The number of commits in the log."""
        try:
            head = self._log.head()
        except BatonError:
            return 0
        return 0 if head is None else head.commits

    def tip(self) -> CheckpointRef:
        """The newest committed checkpoint."""
        tip = self._log.require_head().tip
        assert tip is not None
        return tip


@pytest.fixture
def hosts(engine: Engine, cloud: "FakeGcs", tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    for name, text in (("model.py", MODEL), ("data.py", DATA), ("run.yaml", RUN)):
        (tmp_path / "code").mkdir(exist_ok=True)
        (tmp_path / "code" / name).write_text(text, encoding="utf-8")
    image = engine.build("train-cpu")
    with ExitStack() as stack:

        def make(bucket: str, **env: str) -> Hosts:
            more = {"STORAGE_EMULATOR_HOST": cloud.url, "NO_GCE_CHECK": "true"} | env
            made = Hosts(engine, image, tmp_path / "code", bucket, more)
            stack.callback(made.remove)
            return made

        yield make


def test_hosts_killed_by_turns_make_the_same_bits(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    with running_server(tmp_path) as url:
        straight = hosts("straight", PREFECT_API_URL=url)
        straight.start()
        assert straight.ends() == [0, 0, 0], straight.output(CHIEF)
        assert len(post(url, "flow_runs/filter", {})) == 1

        cut = hosts("cut", PREFECT_API_URL=url)
        turns = (("KILL", FIRST), ("KILL", CHIEF), ("TERM", LAST), ("KILL", LAST))
        for name, index in turns:
            before = cut.commits()
            cut.start()
            cut.wait_for_commits(before + 2)
            cut.send(name, index)
            codes = cut.ends()
            # JobSet starts all of them again, and does not count it.
            assert codes.pop(index) in ENDS[name], cut.output(index)
            assert codes == [3, 3], "\n".join(map(cut.output, range(3)))
            assert cut.job.what_follows(KILLED, disrupted=True) == "a new pod"
            assert cut.job.what_follows(3) == "RestartJobSetAndIgnoreMaxRestarts"
        cut.start()
        assert cut.ends() == [0, 0, 0], cut.output(CHIEF)
        assert (cut.tip().step, cut.tip().state_digest) == (straight.tip().step, straight.tip().state_digest)
        # Each start of all hosts is one flow run.
        assert len(post(url, "flow_runs/filter", {})) == 1 + len(turns) + 1
        # A chief that is preempted when the others have completed starts again alone, and does not wait for them.
        cut.start(hosts=1)
        assert cut.ends() == [0], cut.output(CHIEF)
