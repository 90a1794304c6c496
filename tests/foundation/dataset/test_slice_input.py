"""Plans as tensors give the batches of plans in Python, also in a TensorFlow server that has other files."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.dataset import read
from baton.tasks.foundation.dataset.evaluation_sets import set_batches
from baton.tasks.foundation.dataset.read import WorkerFiles
from baton.tasks.foundation.dataset.shards import original_read_errors
from baton.tasks.foundation.dataset.slice_input import (
    constant_plans,
    require_no_python,
    require_shared_storage,
)
from baton.tasks.foundation.errors import AcceleratorError, DamagedDataset, StorageError
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.opening import open_storage
from tests.fakes.gcs.server import FakeGcs
from tests.foundation.dataset.conftest import make_numbered
from tests.foundation.dataset.test_mixed_batches import Mixed, mixed
from tests.foundation.dataset.test_transformed_batches import BATCH, BOTH
from tests.support import forked
from tests.support.google_proxy import google_proxy
from tests.support.lab import in_fresh_process
from tests.support.worker_processes import free_addresses

__all__ = ["mixed"]

COMMON = {"seed": 3, "global_batch_size": 4, "window_shards": 2, "first_batch": 3}


def batches(prepared: Any, count: int, **changed: Any) -> list[Any]:
    dataset = read.training_dataset(prepared.storage, prepared.ref, **changed)
    return [np.concatenate([x, y[:, None]], axis=1) for x, y in dataset.take(count).as_numpy_iterator()]


def planned(prepared: Any, count: int, **changed: Any) -> list[Any]:
    root = prepared.storage.uri.removeprefix("file://")
    return batches(prepared, count, worker=WorkerFiles(root=root, batches=count), **changed)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [4, pytest.param(8, marks=pytest.mark.nightly)])
def test_planned_batches_are_those_of_python(numbered: Callable[..., Any], examples: int) -> None:
    @settings(max_examples=examples, derandomize=True)
    @given(
        counts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
        first=st.integers(0, 30),
        window_shards=st.integers(1, 4),
        hosts=st.sampled_from([1, 2]),
        drop_remainder=st.booleans(),
        shuffle=st.booleans(),
    )
    def check(
        *, counts: list[int], first: int, window_shards: int, hosts: int, drop_remainder: bool, shuffle: bool
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

    check()


@pytest.mark.slow
@pytest.mark.parametrize("exhausted", ["repeat", "drop"])
def test_planned_batches_of_a_mixture_are_those_of_python(mixed: Mixed, exhausted: str) -> None:
    prepared = mixed([[40, 31, 17], [50, 9], [3]], [5, 3, 1], exhausted)
    for first in (0, 29):
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


def test_planned_evaluation_has_the_examples_of_python(numbered: Callable[..., Any]) -> None:
    prepared = numbered([9, 4], [5, 7, 3])
    found, expected = (
        [
            y.numpy().tolist()
            for _, y in set_batches(prepared.storage, prepared.ref, on="validation", batch_size=4, **server)
        ]
        for server in ({"on_server": True}, {})
    )
    assert len(found) == 3
    assert found == expected


@pytest.mark.parametrize("on", ["training", "validation"])
def test_damaged_shard_is_found_before_a_server_reads_it(numbered: Callable[..., Any], on: str) -> None:
    prepared = numbered([9], [8])
    shard = prepared.manifest.train[0] if on == "training" else prepared.manifest.validation[0]
    file = prepared.storage.local_path(f"{prepared.ref.folder}/{shard.path}")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    read_it = {
        "training": lambda: planned(prepared, 1, seed=0, global_batch_size=4, window_shards=1, first_batch=0),
        "validation": lambda: set_batches(
            prepared.storage, prepared.ref, on="validation", batch_size=4, on_server=True
        ),
    }
    with pytest.raises(DamagedDataset, match=shard.path):
        read_it[on]()


def test_shard_that_goes_after_the_check_is_no_fault_of_the_model(numbered: Callable[..., Any]) -> None:
    prepared = numbered([9])
    root = prepared.storage.uri.removeprefix("file://")
    batches = read.training_dataset(
        prepared.storage, prepared.ref, worker=WorkerFiles(root=root, batches=1), **COMMON | {"first_batch": 0}
    )
    (shard,) = Path(root).rglob("train-*.tfrecord")
    shard.unlink()
    with pytest.raises(StorageError, match=rf"TensorFlow server cannot read .*{shard.name}"), original_read_errors():
        next(iter(batches))


def test_examples_in_place_are_refused(numbered: Callable[..., Any]) -> None:
    prepared = numbered([9])
    shard = prepared.manifest.train[0].model_copy(update={"path": "file:///elsewhere/data.tfrecord"})
    with pytest.raises(AcceleratorError, match=r"set data\.options\.copy: true"):
        constant_plans(prepared.storage, "", prepared.manifest, "train", [([shard], (0, 0), (0, 9))])


class _Elsewhere:
    """A storage that hosts have at another path, or not at all."""

    def __init__(self, storage: LocalStorage, uri: Path) -> None:
        self.read, self.uri = storage.read, str(uri)


def test_each_host_must_have_the_storage(numbered: Callable[..., Any], tmp_path: Path) -> None:
    prepared = numbered([9])
    device = "/job:localhost/replica:0/task:0/device:CPU:0"
    strategy = SimpleNamespace(extended=SimpleNamespace(worker_devices=(device,)))
    require_shared_storage(prepared.storage, prepared.ref, strategy)
    other: Any = _Elsewhere(prepared.storage, tmp_path / "other")
    with pytest.raises(AcceleratorError, match=r"task:0 of accelerator.tpu cannot read .*/other/.* \(NotFoundError: "):
        require_shared_storage(other, prepared.ref, strategy)
    path = Path(other.uri) / prepared.ref.folder / "manifest.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{}")
    with pytest.raises(AcceleratorError, match=r"\(another file\); use gs://BUCKET as storage"):
        require_shared_storage(other, prepared.ref, strategy)


def access_error(root: str, reference: str) -> str:
    """What a process says that cannot read the dataset in a bucket."""
    ref = DatasetRef.from_json(reference.encode(), where="the command", error=AcceleratorError)
    device = "/job:localhost/replica:0/task:0/device:CPU:0"
    strategy = SimpleNamespace(extended=SimpleNamespace(worker_devices=(device,)))
    with pytest.raises(AcceleratorError) as raised:
        require_shared_storage(open_storage(root, relative_to=Path()), ref, strategy)
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reachable", "words"),
    [
        pytest.param(True, "(PermissionDeniedError: {{function_node", id="refused"),
        pytest.param(
            False,
            "All 1 retry attempts failed. The last failure: Error executing an HTTP request: libcurl code 7",
            marks=pytest.mark.nightly,
            id="unreachable",
        ),
    ],
)
def test_each_host_must_have_access_to_the_bucket(
    cloud: FakeGcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, reachable: bool, words: str
) -> None:
    """TensorFlow's own reader, which tries ten times, for three minutes, unless told otherwise."""
    root = "gs://bucket/runs"
    prepared = make_numbered(tmp_path, [9], storage=open_storage(root, relative_to=tmp_path))
    with google_proxy(cloud.url, tmp_path) as proxy:
        proxy.refuses = True
        nowhere = {} if reachable else {"https_proxy": f"http://{free_addresses(1)[0]}"}
        for name, value in {**proxy.environment, **nowhere, "GCS_RETRY_CONFIG_MAX_RETRIES": "1"}.items():
            monkeypatch.setenv(name, value)
        found = in_fresh_process(access_error, root=root, reference=prepared.ref.to_json().decode())
    assert words in found
    assert "task:0 of accelerator.tpu cannot read gs://bucket/runs/datasets/numbered/manifest.json (" in found
    assert "give the service account of the hosts the role Storage Object Viewer" in found


@pytest.mark.parametrize("words", ["has 108 bytes and crc32c", "is missing"])
def test_shards_in_a_bucket_are_compared_without_reading(cloud: FakeGcs, tmp_path: Path, words: str) -> None:
    storage = open_storage("gs://bucket/runs", relative_to=tmp_path)
    prepared = make_numbered(tmp_path, [2, 1], storage=storage, name=words.replace(" ", "-"))
    folder = prepared.ref.folder
    plans = [(prepared.manifest.train, (0, 0), (0, 3))]
    if words == "is missing":
        cloud.store.delete("bucket", f"runs/{folder}/{prepared.manifest.train[1].path}")
    else:
        cloud.store.put("bucket", f"runs/{folder}/{prepared.manifest.train[1].path}", b"x" * 108)
    with pytest.raises(DamagedDataset, match=f"{folder}/train-00001.tfrecord {words}"):
        constant_plans(storage.at(folder), "", prepared.manifest, "train", plans)
    assert not cloud.tally.media


def _absolute(function: Any, number: Any) -> Any:
    return function(func=abs, inp=[number], Tout=tf.int64)


def test_transforms_that_call_python_are_refused() -> None:
    numbers = tf.data.Dataset.range(4)
    require_no_python(numbers.map(lambda number: number + 1))
    for function in (tf.py_function, partial(tf.numpy_function, stateful=False)):
        with pytest.raises(AcceleratorError, match=r"calls Python .*PyFunc"):
            require_no_python(numbers.map(partial(_absolute, function)))


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
    """The server finds the shards below its working folder, where the client has none."""
    prepared = make_numbered(tmp_path, [9, 12, 7])
    storage, host = tmp_path / "storage", tmp_path / "host"
    expected = [
        [values.tobytes().hex() for values in batch]
        for batch in read.training_dataset(prepared.storage, prepared.ref, **COMMON).take(BATCHES).as_numpy_iterator()
    ]
    shutil.copytree(storage, host / DISK)
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
