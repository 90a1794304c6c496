"""The means of what an own `train_step` returns, in the train state.

They are saved with it, so that a row is the same wherever a run is cut. A checkpoint without them, or with others, is
still the same model's.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tasks.foundation.contracts.checkpoint import CheckpointManifest, replica_key
from tasks.foundation.model.returned_metrics import Returned
from tasks.foundation.model.variables import Leaf
from tasks.foundation.state.layout import RETURNED, stored_name


def returned_leaves(returned: Returned | None) -> Iterator[Leaf]:
    """One for each variable of the means."""
    for name, metric in {} if returned is None else returned.metrics.items():
        for number, variable in enumerate(metric.variables):
            yield Leaf(path=f"{RETURNED}{name}/{number}", variable=variable.value, per_replica=True)


def read_returned(prefix: str, manifest: CheckpointManifest) -> dict[str, Any]:
    """What a checkpoint's files hold of them, by key.

    Args:
        prefix: of the files.
        manifest: the checkpoint's.
    """
    paths = [record.path for record in manifest.signature if record.path.startswith(RETURNED)]
    if not paths:
        return {}
    reader = tf.train.load_checkpoint(prefix)
    keys = [replica_key(path, index) for path in paths for index in range(manifest.replicas)]
    return {key: reader.get_tensor(stored_name(key)) for key in keys}


def saved_values(leaf: Leaf, held: dict[str, Any], replicas: int) -> list[Any]:
    """Of such a leaf, one value for each replica of a checkpoint; zeros where it holds none."""
    zero = tf.zeros(leaf.components[0].shape, leaf.components[0].dtype).numpy()
    return [held.get(replica_key(leaf.path, index), zero) for index in range(replicas)]


def without(leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
    """Leaves without these."""
    return tuple(leaf for leaf in leaves if not leaf.path.startswith(RETURNED))
