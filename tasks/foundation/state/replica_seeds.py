"""The random seed of each replica, derived from replica 0's.

By default Keras gives every replica the same seed, so all replicas draw the same dropout masks.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.errors import ModelError
from tasks.foundation.model.variables import Leaf
from tasks.foundation.state.replica_variables import ReplicaVariables


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
