"""What each replica keeps for itself, on whichever host it is: one variable for each, in the order of the replicas.

A host holds its own replicas' parts only. For those of the others it has stand-ins, plain variables, which are filled
by a collective before the state is written or compared, and by reading a checkpoint. On one host there are none.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.contracts.checkpoint import replica_key
from tasks.foundation.model.variables import Leaf

# What collectives carry, on CPUs and on GPUs.
_CARRIED = frozenset({tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})


class Replicas:
    """The variables behind the leaves of a train state, those of other hosts included."""

    def __init__(self, leaves: Iterable[Leaf], accelerator: Accelerator) -> None:
        """Stand-ins begin as the values here: right after building, all replicas hold the same."""
        self._strategy = accelerator.strategy
        self._hosts = accelerator.hosts
        self._parts: dict[str, tuple[Any, ...]] = {}
        self._firsts: dict[str, Any] = {}
        self._far: list[Leaf] = []
        for leaf in leaves:
            if self._hosts > 1 and (leaf.per_replica or leaf.seed):
                self._far.append(leaf)
            if leaf.seed:
                first = leaf.components[0]
                self._firsts[leaf.path] = first if accelerator.is_chief else _stand_in(first)
            elif leaf.per_replica:
                before, count = accelerator.host * len(leaf.components), len(leaf.components)
                self._parts[leaf.path] = tuple(
                    leaf.components[index - before]
                    if before <= index < before + count
                    else _stand_in(leaf.components[0])
                    for index in range(count * self._hosts)
                )
        self._gathered = tf.function(self._trace_gathering, jit_compile=False)

    def of(self, leaf: Leaf) -> tuple[Any, ...]:
        """The variable of every replica, of a leaf that may differ between them."""
        return self._parts[leaf.path]

    def first_seed(self, leaf: Leaf) -> Any:
        """Replica 0's, of a leaf that holds a random seed."""
        return self._firsts[leaf.path]

    def saved(self, leaves: Iterable[Leaf]) -> dict[str, Any]:
        """Key to the variable that is saved under it: each leaf's once, or each replica's."""
        return {key: part for leaf in leaves for key, part in self._saved(leaf)}

    def gather(self) -> None:
        """Fill the stand-ins; a collective, so all hosts call it at the same step."""
        if not self._far:
            return
        for leaf, values in zip(self._far, self._gathered(), strict=True):
            local = {id(part) for part in leaf.components}
            parts = (self._firsts[leaf.path],) if leaf.seed else self._parts[leaf.path]
            for part, value in zip(parts, values.numpy(), strict=False):
                if id(part) not in local:
                    part.assign(tf.cast(value, part.dtype))

    def _saved(self, leaf: Leaf) -> Iterator[tuple[str, Any]]:
        if leaf.seed:  # the others are derived from it
            yield leaf.path, self._firsts[leaf.path]
        elif leaf.per_replica:
            for index, part in enumerate(self._parts[leaf.path]):
                yield replica_key(leaf.path, index), part
        else:
            yield leaf.path, leaf.variable

    def _trace_gathering(self) -> list[Any]:
        def on_replica() -> list[Any]:
            context = tf.distribute.get_replica_context()
            return [context.all_gather(_carried(tf.identity(leaf.variable))[tf.newaxis], axis=0) for leaf in self._far]

        return [self._strategy.experimental_local_results(each)[0] for each in self._strategy.run(on_replica)]


def _stand_in(variable: Any) -> Any:
    return tf.Variable(variable.numpy(), trainable=False, dtype=variable.dtype)


def _carried(value: Any) -> Any:
    if value.dtype in _CARRIED:
        return value
    return tf.cast(value, tf.float32 if value.dtype.is_floating else tf.int64)
