"""Reads a dataset in a TensorFlow server of another process, for `tests.support.call_function`."""

import os
import sys
from pathlib import Path
from typing import Any

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


def read(address: str, root: str, reference: str) -> dict[str, Any]:
    """Read batches in the server at `address`, by plans as tensors.

    Args:
        address: of the server.
        root: the storage root of this process.
        reference: of the dataset, JSON.

    Returns:
        The devices and bytes (hexadecimal) of the batches.
    """
    import tensorflow as tf

    from tasks.foundation.contracts.dataset import DatasetRef
    from tasks.foundation.dataset import read as reader
    from tasks.foundation.dataset.read import WorkerFiles
    from tasks.foundation.errors import AcceleratorError
    from tasks.foundation.storage.local import LocalStorage

    ref = DatasetRef.from_json(reference.encode(), where="the command", error=AcceleratorError)
    storage = LocalStorage(Path(root))
    tf.config.experimental_connect_to_host(address, job_name="worker")
    following = tf.function(lambda iterator: next(iterator))  # noqa: PLW0108  # TensorFlow needs a signature
    with tf.device("/job:worker/replica:0/task:0/device:CPU:0"):
        worker = WorkerFiles(root=DISK, batches=BATCHES)
        planned = iter(reader.training_dataset(storage, ref, worker=worker, **COMMON))
        batches = [following(planned) for _ in range(BATCHES)]
    return {
        "devices": sorted({value.device for batch in batches for value in batch}),
        "batches": [[value.numpy().tobytes().hex() for value in batch] for batch in batches],
    }
