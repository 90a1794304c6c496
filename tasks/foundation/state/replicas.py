"""The variables in which replicas may differ: one for each replica, in the order of the replicas.

A host holds the variables of its own replicas only. For the replicas of other hosts it has plain variables as
placeholders. A collective fills them before the state is written or compared; a restore fills them from the checkpoint.
On one host there are none.

By default Keras gives every replica the same seed, so all replicas would draw the same dropout masks; each gets a seed
derived from replica 0's. The means of the metrics that a custom `train_step` returns are part of the state, so that a
logged row is the same wherever a run is cut. A checkpoint without them, or with others, belongs to the same model.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from baton.tasks.foundation.contracts.checkpoint import CheckpointManifest, replica_key
from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.machine.devices import Accelerator
from baton.tasks.foundation.model.metrics import ReturnedMetrics
from baton.tasks.foundation.model.variables import Leaf
from baton.tasks.foundation.state.digest import RETURNED, stored_name

# The dtypes that collectives support on both CPUs and GPUs.
_COLLECTIVE_DTYPES = frozenset({tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})


class ReplicaVariables:
    """The variables behind the leaves of a train state, those of other hosts included."""

    def __init__(self, leaves: Iterable[Leaf], accelerator: Accelerator) -> None:
        """Create the placeholders with the values of this host: right after building, all replicas hold the same."""
        self._strategy = accelerator.strategy
        self._hosts = accelerator.hosts
        self._per_replica: dict[str, tuple[Any, ...]] = {}
        self._seeds: dict[str, Any] = {}
        self._remote_leaves: list[Leaf] = []
        for leaf in leaves:
            if self._hosts > 1 and (leaf.per_replica or leaf.seed):
                self._remote_leaves.append(leaf)
            if leaf.seed:
                first = leaf.components[0]
                self._seeds[leaf.path] = first if accelerator.is_chief else _placeholder(first)
            elif leaf.per_replica:
                before, count = accelerator.host * len(leaf.components), len(leaf.components)
                self._per_replica[leaf.path] = tuple(
                    leaf.components[index - before]
                    if before <= index < before + count
                    else _placeholder(leaf.components[0])
                    for index in range(count * self._hosts)
                )
        self._gathered = tf.function(self._trace_gathering, jit_compile=False)

    def of(self, leaf: Leaf) -> tuple[Any, ...]:
        """The variable of every replica, for a leaf that may differ between them."""
        return self._per_replica[leaf.path]

    def first_seed(self, leaf: Leaf) -> Any:
        """Replica 0's variable, for a leaf that holds a random seed."""
        return self._seeds[leaf.path]

    def saved(self, leaves: Iterable[Leaf]) -> dict[str, Any]:
        """Key to saved variable: one for each leaf, or one for each replica of a leaf that may differ."""
        return {key: part for leaf in leaves for key, part in self._saved(leaf)}

    def gather(self) -> None:
        """Fill the placeholders. This is a collective: all hosts call it at the same step."""
        if not self._remote_leaves:
            return
        for leaf, values in zip(self._remote_leaves, self._gathered(), strict=True):
            local = {id(part) for part in leaf.components}
            parts = (self._seeds[leaf.path],) if leaf.seed else self._per_replica[leaf.path]
            for part, value in zip(parts, values.numpy(), strict=False):
                if id(part) not in local:
                    part.assign(tf.cast(value, part.dtype))

    def _saved(self, leaf: Leaf) -> Iterator[tuple[str, Any]]:
        if leaf.seed:  # the other replicas' seeds are derived from it
            yield leaf.path, self._seeds[leaf.path]
        elif leaf.per_replica:
            for index, part in enumerate(self._per_replica[leaf.path]):
                yield replica_key(leaf.path, index), part
        else:
            yield leaf.path, leaf.variable

    def _trace_gathering(self) -> list[Any]:
        def on_replica() -> list[Any]:
            context = tf.distribute.get_replica_context()
            values = [_as_collective_dtype(tf.identity(leaf.variable)) for leaf in self._remote_leaves]
            return [context.all_gather(value[tf.newaxis], axis=0) for value in values]

        return [self._strategy.experimental_local_results(each)[0] for each in self._strategy.run(on_replica)]


def _placeholder(variable: Any) -> Any:
    return tf.Variable(variable.numpy(), trainable=False, dtype=variable.dtype)


def _as_collective_dtype(value: Any) -> Any:
    if value.dtype in _COLLECTIVE_DTYPES:
        return value
    return tf.cast(value, tf.float32 if value.dtype.is_floating else tf.int64)


class ReplicaSeeds:
    """The seed variables of this host's replicas. A checkpoint holds replica 0's only."""

    def __init__(self, leaves: Iterable[Leaf], variables: ReplicaVariables, accelerator: Accelerator) -> None:
        self._leaves = tuple(leaf for leaf in leaves if leaf.seed)
        self._variables = variables
        self._local_replicas = accelerator.local_replicas

    def derive(self) -> None:
        """Set the seed of every replica but replica 0; call it after each build and each restore."""
        for _, variable, seed in self._derived():
            variable.assign(seed)

    def require_derived(self) -> None:
        """Check that restoring replica 0's seed will give every replica the seed it has now.

        Raises:
            ModelError: a replica drew more often, or less often, than replica 0.
        """
        for name, variable, seed in self._derived():
            if not np.array_equal(variable.numpy(), seed):
                raise ModelError(
                    f"{name} no longer uses the random seed derived from replica 0's, so a resumed run could not "
                    "continue its stream; draw equally often on every replica"
                )

    def _derived(self) -> Iterator[tuple[str, Any, Any]]:
        """Name, variable and derived seed, for each seed of this host's replicas except replica 0."""
        for leaf in self._leaves:
            first = self._variables.first_seed(leaf).numpy()
            for replica, variable in zip(self._local_replicas, leaf.components, strict=False):
                if replica > 0:
                    yield f"{leaf.path}: replica {replica}", variable, _derived_seed(first, replica)


def _derived_seed(seed: Any, replica: int) -> Any:
    """The seed state [seed, counter] of a replica: another seed, the same counter.

    Drawing only moves the counter. So the derived seed is the same before and after drawing, and a restored run
    continues every stream.
    """
    text = f"{int(seed[0])}/{replica}".encode()
    own = int.from_bytes(hashlib.sha256(text).digest()[:4], "big") & 0x7FFFFFFF
    return np.array([own, seed[1]], dtype=seed.dtype)


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
