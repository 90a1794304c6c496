"""The means of the metrics that a custom `train_step` returns, as part of the train state.

They are saved, so that a logged row is the same wherever a run is cut. A checkpoint without them, or with others,
belongs to the same model.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tasks.foundation.contracts.checkpoint import CheckpointManifest, replica_key
from tasks.foundation.model.returned_metrics import ReturnedMetrics
from tasks.foundation.model.variables import Leaf
from tasks.foundation.state.layout import RETURNED, stored_name


def returned_leaves(returned: ReturnedMetrics | None) -> Iterator[Leaf]:
    """One leaf for each variable of the means."""
    for name, metric in {} if returned is None else returned.metrics.items():
        for number, variable in enumerate(metric.variables):
            yield Leaf(path=f"{RETURNED}{name}/{number}", variable=variable.value, per_replica=True)


def read_returned_means(prefix: str, manifest: CheckpointManifest) -> dict[str, Any]:
    """Read the means from a checkpoint's files.

    Args:
        prefix: path prefix of the files.
        manifest: the checkpoint's.

    Returns:
        Key to value; one key for each replica.
    """
    paths = [record.path for record in manifest.signature if record.path.startswith(RETURNED)]
    if not paths:
        return {}
    reader = tf.train.load_checkpoint(prefix)
    keys = [replica_key(path, index) for path in paths for index in range(manifest.replicas)]
    return {key: reader.get_tensor(stored_name(key)) for key in keys}


def stored_means(leaf: Leaf, stored: Mapping[str, Any], replicas: int) -> list[Any]:
    """The values of one leaf, one for each replica of a checkpoint; zeros where the checkpoint has none."""
    zero = tf.zeros(leaf.components[0].shape, leaf.components[0].dtype).numpy()
    return [stored.get(replica_key(leaf.path, index), zero) for index in range(replicas)]
