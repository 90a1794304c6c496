"""The variables in which replicas may differ: one for each replica, in the order of the replicas.

A host holds the variables of its own replicas only. For the replicas of other hosts it has plain variables as
placeholders. A collective fills them before the state is written or compared; a restore fills them from the checkpoint.
On one host there are none.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.checkpoint import replica_key
from tasks.foundation.model.variables import Leaf

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
