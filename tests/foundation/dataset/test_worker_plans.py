"""Plans as tensors give the batches of plans in Python, also in a TensorFlow server that has other files."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.dataset import read
from tasks.foundation.dataset.read import WorkerFiles
from tasks.foundation.errors import AcceleratorError
from tasks.foundation.storage.local import LocalStorage
from tests.foundation.dataset.conftest import make_numbered
from tests.foundation.dataset.test_mixed_batches import Mixed, mixed
from tests.foundation.dataset.test_transformed_batches import BATCH, BOTH
from tests.support import forked
from tests.support.worker_processes import free_addresses

__all__ = ["mixed"]

FEW = settings(max_examples=8, derandomize=True)


def batches(prepared: Any, count: int, **changed: Any) -> list[Any]:
    dataset = read.training_dataset(prepared.storage, prepared.ref, **changed)
    return [np.concatenate([x, y[:, None]], axis=1) for x, y in dataset.take(count).as_numpy_iterator()]


def planned(prepared: Any, count: int, **changed: Any) -> list[Any]:
    root = prepared.storage.uri.removeprefix("file://")
    return batches(prepared, count, worker=WorkerFiles(root=root, batches=count), **changed)


@pytest.mark.slow
@FEW
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    first=st.integers(0, 30),
    window_shards=st.integers(1, 4),
    hosts=st.sampled_from([1, 2]),
    drop_remainder=st.booleans(),
    shuffle=st.booleans(),
)
def test_planned_batches_are_those_of_python(
    numbered: Callable[..., Any],
    *,
    counts: list[int],
    first: int,
    window_shards: int,
    hosts: int,
    drop_remainder: bool,
    shuffle: bool,
) -> None:
    prepared = numbered(counts)
    common = {
        "seed": 3,
        "global_batch_size": 4,
        "window_shards": window_shards,
        "first_batch": first,
        "host": hosts - 1,
        "hosts": hosts,
        "drop_remainder": drop_remainder and sum(counts) >= 4,
        "shuffle": shuffle,
    }
    found, expected = planned(prepared, 9, **common), batches(prepared, 9, **common)
    assert len(found) == 9
    assert np.array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("exhausted", ["repeat", "drop"])
def test_planned_batches_of_a_mixture_are_those_of_python(mixed: Mixed, exhausted: str) -> None:
    prepared = mixed([[40, 31, 17], [50, 9], [3]], [5, 3, 1], exhausted)
    for first in (0, 7, 29):
        common = {"seed": 3, "global_batch_size": 5, "window_shards": 2, "first_batch": first, "drop_remainder": True}
        assert np.array_equal(planned(prepared, 40, **common), batches(prepared, 40, **common))


def test_planned_batches_are_transformed(numbered: Callable[..., Any]) -> None:
    prepared = numbered([40, 31])
    common = {"seed": 3, "global_batch_size": BATCH, "window_shards": 1, "first_batch": 2, "functions": BOTH}
    assert np.array_equal(planned(prepared, 6, **common), batches(prepared, 6, **common))


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"in_memory": True}, r"data\.cache: memory"), ({"worker": {"batches": 0}}, "batches=0 must be at least 1")],
)
def test_input_that_another_host_cannot_read_is_refused(
    numbered: Callable[..., Any], changed: dict[str, Any], words: str
) -> None:
    prepared = numbered([9])
    files = {"root": "/nowhere", "batches": 1, **changed.pop("worker", {})}
    with pytest.raises(AcceleratorError, match=words):
        read.training_dataset(
            prepared.storage,
            prepared.ref,
            seed=0,
            global_batch_size=4,
            window_shards=1,
            first_batch=0,
            worker=WorkerFiles(**files),
            **changed,
        )


COMMON = {"seed": 3, "global_batch_size": 4, "window_shards": 2, "first_batch": 3}
BATCHES = 20
DISK = "disk"  # of the server's host, below its working folder


def serve(address: str, folder: str) -> None:
    """Run a TensorFlow server in a working folder until the process is killed."""
    import tensorflow as tf

    os.chdir(folder)
    server = tf.distribute.Server({"worker": [address]}, job_name="worker", task_index=0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.join()


def read_remotely(address: str, root: str, reference: str) -> dict[str, Any]:
    """Read batches in the server at `address`, by plans as tensors.

    Args:
        address: of the server.
        root: the storage root of this process.
        reference: of the dataset, JSON.

    Returns:
        The devices and bytes (hexadecimal) of the batches.
    """
    import tensorflow as tf

    ref = DatasetRef.from_json(reference.encode(), where="the command", error=AcceleratorError)
    storage = LocalStorage(Path(root))
    tf.config.experimental_connect_to_host(address, job_name="worker")
    following = tf.function(lambda iterator: next(iterator))  # noqa: PLW0108  # TensorFlow needs a signature
    with tf.device("/job:worker/replica:0/task:0/device:CPU:0"):
        worker = WorkerFiles(root=DISK, batches=BATCHES)
        plans = iter(read.training_dataset(storage, ref, worker=worker, **COMMON))
        batches = [following(plans) for _ in range(BATCHES)]
    return {
        "devices": sorted({value.device for batch in batches for value in batch}),
        "batches": [[value.numpy().tobytes().hex() for value in batch] for batch in batches],
    }


@pytest.mark.slow
def test_server_with_other_files_reads_the_same_bits(tmp_path: Path) -> None:
    """The client has manifests only. The shards are below the working folder of the server's host."""
    prepared = make_numbered(tmp_path, [9, 12, 7])
    storage, host = tmp_path / "storage", tmp_path / "host"
    expected = [
        [values.tobytes().hex() for values in batch]
        for batch in read.training_dataset(prepared.storage, prepared.ref, **COMMON).take(BATCHES).as_numpy_iterator()
    ]
    shutil.copytree(storage, host / DISK)
    for shard in storage.rglob("*.tfrecord"):
        shard.unlink()
    (address,) = free_addresses(1)
    command = [sys.executable, "-m", "tests.support.call_function", __name__]
    serving = json.dumps({"address": address, "folder": str(host)})
    reading = json.dumps({"address": address, "root": str(storage), "reference": prepared.ref.to_json().decode()})
    with forked.Popen([*command, "serve", serving], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            done = forked.run(
                [*command, "read_remotely", reading], capture_output=True, text=True, timeout=120, check=False
            )
        finally:
            server.kill()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1].removeprefix("result: "))
    assert found["devices"] == ["/job:worker/replica:0/task:0/device:CPU:0"]
    assert found["batches"] == expected
