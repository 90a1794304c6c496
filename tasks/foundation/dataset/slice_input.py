"""What TensorFlow servers read: hosts that run no Python of Baton, driven by a client on another machine.

A graph that runs there can neither call Python nor read the client's disk. So the plans of what to read are constants
of the graph, the shards are in a bucket or in a folder that all hosts share, and transforms consist of TensorFlow's
operations. What cannot be read like that is refused by name.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from baton.tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, ShardRecord
from baton.tasks.foundation.dataset import order
from baton.tasks.foundation.dataset.manifest import Part, manifest_path
from baton.tasks.foundation.dataset.shards import part_of, require_intact
from baton.tasks.foundation.errors import AcceleratorError
from baton.tasks.foundation.machine.tpu import servers_of
from baton.tasks.foundation.model.randomness import PYTHON_OPERATIONS, nodes_in
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.transfers import parallel_map


def constant_plans(
    at: Storage,
    address: str,
    manifest: DatasetManifest,
    part: Part,
    plans: Sequence[tuple[Sequence[ShardRecord], order.Seed, tuple[int, int]]],
) -> Any:
    """Return a dataset of plans that needs no Python, for another host; the shards are compared with the manifest here.

    Args:
        at: store rooted at the dataset's folder.
        address: the same folder as that host finds it.
        plans: at least one: its shards, and seed and numbers as `Plan` has them.

    Raises:
        AcceleratorError: the dataset reads files where they were before.
        DamagedDataset: a shard is missing or differs from the manifest.
    """
    shards = [list(each) for each, _, _ in plans]
    if any(shard.is_external for each in shards for shard in each):
        raise unreadable_elsewhere(manifest)
    read = {shard.path: shard for each in shards for shard in each}
    parallel_map(partial(require_intact, at), list(read.values()), workers=at.transfers)
    parts = [part_of(manifest, each, part) for each in shards]
    constants = (
        tf.ragged.constant([[f"{address}/{shard.path}" for shard in each] for each in shards], tf.string),
        tf.constant([count for count, _ in parts], tf.int64),
        tf.RaggedTensor.from_row_lengths(
            np.concatenate([positions for _, positions in parts]), [len(positions) for _, positions in parts]
        ),
        tf.constant([seed for _, seed, _ in plans], tf.int64),
        tf.constant([taken for _, _, taken in plans], tf.int64),
    )
    return tf.data.Dataset.from_tensor_slices(constants)


def unreadable_elsewhere(manifest: DatasetManifest) -> AcceleratorError:
    """The error of a dataset that only this process can read."""
    return AcceleratorError(
        f"{manifest.source}: its examples are parts of files outside the storage root, which another host cannot "
        "read by itself; set data.options.copy: true"
    )


def require_no_python(dataset: Any) -> None:
    """Refuse a dataset whose graph calls Python, which a server cannot; transforms may call stateless functions.

    Raises:
        AcceleratorError: it does.
    """
    graph = tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph().numpy())
    found = sorted({node.op for node in nodes_in(graph)} & PYTHON_OPERATIONS)
    if found:
        raise AcceleratorError(
            f"data.transform, batch_transform or validation_transform calls Python ({', '.join(found)}), which the "
            "TensorFlow servers of accelerator.tpu cannot; use TensorFlow's operations in place of tf.py_function and "
            "tf.numpy_function"
        )


def require_shared_storage(storage: Storage, ref: DatasetRef, strategy: Any) -> None:
    """Let each host read the manifest of the dataset.

    Args:
        strategy: over devices of the hosts.

    Raises:
        AcceleratorError: a host finds no such file, or another one, or has no access to it.
    """
    path = manifest_path(ref.folder)
    expected = storage.read(path)
    remedy = "use gs://BUCKET as storage, or a folder that all hosts share and have at the same path"
    if storage.uri.startswith("gs://"):
        remedy = "give the service account of the hosts the role Storage Object Viewer, and a route to Google's APIs"
    for host in servers_of(strategy):
        try:
            with tf.device(f"{host}/device:CPU:0"):
                same, why = tf.io.read_file(f"{storage.uri}/{path}").numpy() == expected, "another file"
        except tf.errors.UnavailableError:  # the server is gone; if it cannot reach a bucket for minutes, AbortedError
            raise
        except tf.errors.OpError as fault:
            same, why = False, f"{type(fault).__name__}: {' '.join(fault.message.split())[:400]}"
        if not same:
            raise AcceleratorError(f"{host} of accelerator.tpu cannot read {storage.uri}/{path} ({why}); {remedy}")
