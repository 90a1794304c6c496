"""A slice of several TPU hosts: one client and a TensorFlow server on each host, with a stand-in for TPUs.

Whatever is killed, the bits are those of one process with as many local replicas.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.placement import AcceleratorSpec
from baton.tasks.foundation.machine.stops import RESUMABLE
from baton.tasks.foundation.machine.tpu import tpu_strategy
from tests.end_to_end.chaos import ALWAYS
from tests.end_to_end.test_elastic import TOLERANCE
from tests.fakes.gcs.server import FakeGcs
from tests.support.cloud_runs import copied, entries_in
from tests.support.google_proxy import google_proxy
from tests.support.homes import log_of, read_history
from tests.support.lab import in_fresh_process
from tests.support.moments import MOMENTS, RESTORE, VARIABLE, hold_at
from tests.support.shipped_runs import slow_digits
from tests.support.stand_in_slice import DRIVER, LOCAL, Servers, install, servers
from tests.support.training_child import Child

pytestmark = pytest.mark.slow

# TPUs have no deterministic operations of TensorFlow, and a server of the stand-in has one thread for an operation. A
# callback can pause at each row.
COMMON = [
    "train.deterministic=false", "accelerator.intra_op_threads=1", "train.segment_steps=13", "train.steps=80",
    "evaluate.every_steps=20", "model.build=model.py:settable", "train.callbacks=model.py:acting",
    "train.drop_remainder=true", "data.transform=data.py:jitter", "data.batch_transform=data.py:mix",
    "data.validation_transform=data.py:halved", "data.shard_examples=300",
]  # fmt: skip
# Its callbacks set the learning rate at each row and each evaluation, and end the training at step 60.
_ACTING = """

class Cooling(keras.callbacks.Callback):
    accepts_several_steps = True

    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * (1 - 0.01 * logs["loss"])


def settable(width, model=None):
    model = model or build_model(width)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


def independent(width):
    layers = keras.layers
    images = [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(16 * width, "relu"), layers.Dense(10)]
    return settable(width, keras.Sequential(images))


def acting():
    plateau = {"monitor": "val_loss", "min_delta": 100.0}
    reduce = keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, **plateau)
    return [*pauses(), Cooling(), reduce, keras.callbacks.EarlyStopping(patience=2, **plateau)]
"""
_TRANSFORMS = """
import tensorflow as tf


def jitter(example, *, seed):
    return example[0] + tf.random.stateless_normal(tf.shape(example[0]), seed, stddev=0.1), example[1]


def mix(batch, *, seed):
    order = tf.argsort(tf.random.stateless_uniform(tf.shape(batch[1])[:1], seed), stable=True)
    return 0.8 * batch[0] + 0.2 * tf.gather(batch[0], order), batch[1]


def halved(example):
    return example[0] * 0.5, example[1]


def in_python(example):
    value = tf.numpy_function(lambda x: x, [example[0]], tf.float32, stateful=False)
    return tf.ensure_shape(value, example[0].shape), example[1]
"""


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Servers]:
    with servers(2) as found:
        yield found


class Slices:
    """Runs of one file on slices and on local replicas."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = slow_digits(folder / "code")
        self._file.with_name("data.py").write_text(_TRANSFORMS, encoding="utf-8")
        with self._file.with_name("model.py").open("a", encoding="utf-8") as model:
            model.write(_ACTING)

    def start(self, name: str, tpu: str, *options: str, extra: Sequence[str] = (), **given: Any) -> Child:
        return self._start(name, *options, extra=["accelerator.kind=tpu", f"accelerator.tpu={tpu}", *extra], **given)

    def start_local(self, name: str, *options: str, extra: Sequence[str] = ()) -> Child:
        return self._start(name, LOCAL, *options, extra=["accelerator.replicas=4", *extra])

    def local(self, name: str, extra: Sequence[str] = ()) -> tuple[Any, ...]:
        return self._results(name, self.start_local(name, extra=extra))

    def finish(self, name: str, tpu: str, extra: Sequence[str] = ()) -> tuple[Any, ...]:
        return self._results(name, self.start(name, tpu, extra=extra))

    def _results(self, name: str, child: Child) -> tuple[Any, ...]:
        result = child.finish(0).result
        return result["state_digest"], result["exit_reason"], *read_history(self.home(name))

    def home(self, name: str) -> Path:
        return self._folder / name / "digits-cnn"

    def _start(
        self, name: str, *options: str, extra: Sequence[str], pause: float = 0, env: Mapping[str, str] | None = None
    ) -> Child:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        env = {"BATON_TEST_PAUSE_SECONDS": str(pause), VARIABLE: "", **(env or {})}
        return Child(
            "digits", folder, *options, extra=[*COMMON, *extra], notes=folder, driver=DRIVER, file=self._file, env=env
        )


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Slices:
    return Slices(tmp_path_factory.mktemp("slices"))


@pytest.fixture(scope="module")
def expected(slices: Slices) -> tuple[Any, ...]:
    """The digest at the end, why it ended, the rows, and the evaluations."""
    found = slices.local("local")
    _, reason, rows, evaluations = found
    assert (reason, len(rows), [step for step, _ in evaluations]) == ("finished_early", 8, [20, 40, 60])
    return found


def test_killed_and_moved_run_in_a_bucket_has_the_bits_of_local_replicas(
    slices: Slices, cloud: FakeGcs, expected: tuple[Any, ...], tmp_path: Path
) -> None:
    """The servers read the bucket themselves; the client waits for one that is missing."""
    bucket, home = ["storage=gs://bucket/runs"], "runs/digits-cnn/"
    with google_proxy(cloud.url, tmp_path) as proxy, servers(2, env=proxy.environment) as hosts:
        client = slices.start("bucket", hosts.tpu, extra=bucket, pause=2)
        assert client.until(lambda: entries_in(cloud, home) >= 4)
        assert client.kill()

        shard = next(name for name in cloud.store.names("bucket") if "/train-" in name)
        intact = cloud.store.bytes("bucket", shard)
        cloud.store.put("bucket", shard, intact[:-1] + b"x")
        refused = slices.start("bucket", hosts.tpu, extra=bucket).finish(4)
        assert f"gs://bucket/{shard} has {len(intact)} bytes and crc32c " in refused.stderr
        cloud.store.put("bucket", shard, intact)

        slices.start_local("bucket", "--until-step", "45", extra=bucket).finish(0)
        client = slices.start("bucket", hosts.tpu, extra=bucket, pause=5)
        assert client.until_printed("started in")
        hosts.kill(1)
        assert "AcceleratorLost: the accelerator (tpu, 4 replicas) was lost: " in client.finish(3).stderr

        client = slices.start("bucket", hosts.tpu, extra=[*bucket, "accelerator.connect_seconds=2"])
        assert f"no TensorFlow server responds at {hosts.addresses[1]} " in client.finish(3).stderr
        client = slices.start("bucket", hosts.tpu, extra=bucket)
        assert client.until_printed(f"waiting for the TensorFlow server at {hosts.addresses[1]}, up to 600 s in all")
        hosts.start(1)  # the other one goes on
        result = client.finish(0).result
        assert len({path for path in proxy.downloads if ".tfrecord" in path}) == 7
        assert hosts.end(1) == RESUMABLE
    copy = copied(cloud, "runs", tmp_path) / "digits-cnn"
    assert (result["state_digest"], result["exit_reason"], *read_history(copy)) == expected
    assert log_of(copy).require_head().environment.devices == "tpu, 4 replicas on 2 TensorFlow servers"


@pytest.mark.nightly
def test_four_servers_that_are_all_killed_change_no_bit(slices: Slices, expected: tuple[Any, ...]) -> None:
    with servers(4, cpus=1) as four_hosts:
        client = slices.start("four", four_hosts.tpu, pause=5)
        assert client.until_printed("started in")
        four_hosts.kill_all()
        assert "AcceleratorLost: the accelerator (tpu, 4 replicas) was lost: " in client.finish(3).stderr
        four_hosts.start(*range(4))
        assert slices.finish("four", four_hosts.tpu) == expected


@pytest.mark.nightly
def test_client_of_a_server_that_hangs_exits(slices: Slices, expected: tuple[Any, ...]) -> None:
    with servers(2) as hosts:
        client = slices.start("hung", hosts.tpu, extra=["stop.hang_seconds=30"], pause=2)
        assert client.until_commits(2)
        hosts.send(1, signal.SIGSTOP)
        assert " s, from stop.hang_seconds" in client.finish(3).stderr
        hosts.send(1, signal.SIGCONT)
        assert slices.finish("hung", hosts.tpu) == expected


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["client", "server", "both"])
def test_kills_at_any_moment_change_no_bit(
    slices: Slices, two_hosts: Servers, expected: tuple[Any, ...], tmp_path: Path, target: str
) -> None:
    """Twelve kills: before and after each moment. What a kill leaves is continued to the next one."""
    left = [(moment, side) for moment in (*MOMENTS, *RESTORE) for side in ("before", "after")]
    number, is_new = 0, True
    while left:
        (moment, side), name = left[0], f"{target}-{number}"
        held = tmp_path / f"{name}-{moment}-{side}"
        if moment in RESTORE and is_new:  # a process that begins a run restores nothing
            slices.start(name, two_hosts.tpu, "--until-step", "10", extra=ALWAYS).finish(0)
        client = slices.start(name, two_hosts.tpu, extra=ALWAYS, env=hold_at(moment, side, 1, held))
        if client.until(held.exists):
            if target != "client":
                two_hosts.kill(1)
            if target != "server":
                assert client.kill()
            held.unlink()
            assert client.finish().code in ({0, 3} if target == "server" else {-signal.SIGKILL})
            if target != "client":
                two_hosts.start(1)
            left.pop(0)
            is_new = False
            continue
        assert not is_new, f"a whole run never comes to {moment}"
        client.finish(0)
        assert slices.finish(name, two_hosts.tpu, ALWAYS) == expected
        number, is_new = number + 1, True
    assert slices.finish(name, two_hosts.tpu, ALWAYS) == expected


def test_run_on_a_disk_moves_to_a_smaller_slice(slices: Slices, two_hosts: Servers) -> None:
    """Nothing in the model depends on the replicas, so only the order of sums changes."""
    of_six = ["train.global_batch_size=60", "model.build=model.py:independent"]
    with servers(3) as three_hosts:
        expected = slices.finish("three", three_hosts.tpu, of_six)
        slices.start("smaller", three_hosts.tpu, "--until-step", "33", extra=of_six).finish(0)
    moved = slices.start("smaller", two_hosts.tpu, extra=of_six).finish(0)
    assert "6 replicas became 4" in moved.stderr
    assert moved.result["exit_reason"] == expected[1]
    for found, straight in zip(read_history(slices.home("smaller")), expected[2:], strict=True):
        assert [step for step, _ in found] == [step for step, _ in straight]
        values, others = ([list(metrics.values()) for _, metrics in each] for each in (found, straight))
        assert np.abs(np.subtract(values, others)).max() < TOLERANCE


def test_transform_in_python_is_refused(slices: Slices, two_hosts: Servers) -> None:
    refused = slices.start("python", two_hosts.tpu, extra=["data.transform=data.py:in_python"]).finish(2)
    assert "calls Python (PyFuncStateless), which the TensorFlow servers of accelerator.tpu cannot" in refused.stderr
    assert not list(slices.home("python").glob("log/*"))


def count_overtaken(tpu: str) -> int:
    """How often a function on a server sees an older value than the one that was assigned before it was called."""
    install()
    import tensorflow as tf

    tpu_strategy(AcceleratorSpec(kind="tpu", tpu=tpu))
    with tf.device("/job:worker/task:1/device:CPU:0"):
        variables = [tf.Variable(tf.zeros([20_000])) for _ in range(8)]

    @tf.function
    def add() -> None:
        with tf.device("/job:worker/task:1/device:CPU:0"):
            for variable in variables:
                variable.assign_add(tf.ones([20_000]))

    overtaken = 0
    for _ in range(100):
        for variable in variables:
            variable.assign(tf.zeros([20_000]))
        add()
        overtaken += any(variable[0].numpy() != 1 for variable in variables)
    return overtaken


def test_functions_do_not_overtake_assignments(two_hosts: Servers) -> None:
    assert in_fresh_process(count_overtaken, tpu=two_hosts.tpu) == 0
