"""Which value of the train state goes into which data file of a checkpoint.

Files whose bytes stay are not written again (`unchanged_files.py`), so values that do not change are kept apart.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.foundation.checkpoint.bundle import Location, locate
from tasks.foundation.contracts.checkpoint import replica_key
from tasks.foundation.model.variables import Leaf

# Data files of at most this size are uploaded and downloaded side by side.
SHARD_BYTES = 64 << 20
# Smaller values that training does not update are statistics or seeds, or not worth a file.
_LEAST_RESTING_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """The order of values in the data files.

    Attributes:
        keys: of all values; those that training may change come first, each part sorted.
        resting: how many keys at the end are of values that training does not update.
        locations: of TensorFlow's graph, which comes first, and then of each key.
    """

    keys: tuple[str, ...]
    resting: int
    locations: tuple[Location, ...]

    @property
    def resting_files(self) -> frozenset[int]:
        """Indices of the files that hold only values that training does not update."""
        return frozenset(found.shard for found in self.locations[len(self.locations) - self.resting :])


def arrange(sizes: Mapping[str, int], *, graph_bytes: int, resting: Collection[str]) -> FileLayout:
    """Arrange values in files.

    A value of at least half a file has one of its own: an embedding that no batch touches changes alone, or not.

    Args:
        sizes: bytes of each value, by key.
        graph_bytes: size of TensorFlow's graph.
        resting: keys of values that training does not update.
    """
    keys = (*sorted(sizes.keys() - set(resting)), *sorted(resting))
    ordered = [graph_bytes, *(sizes[key] for key in keys)]
    return FileLayout(
        keys=keys,
        resting=len(resting),
        locations=tuple(locate(ordered, shard_bytes=SHARD_BYTES, borders=_borders(ordered, len(resting)))),
    )


def _borders(sizes: Sequence[int], resting: int) -> set[int]:
    large = {index for index, size in enumerate(sizes) if size >= SHARD_BYTES // 2}
    return large | {index + 1 for index in large} | {len(sizes) - resting}


def resting_keys(leaves: Sequence[Leaf], sizes: Mapping[str, int]) -> frozenset[str]:
    """Return the keys of large values that training does not update, such as the weights of a frozen layer.

    Args:
        leaves: of the train state.
        sizes: bytes of each value, by key.
    """
    return frozenset(
        key
        for leaf in leaves
        if leaf.path.startswith("model/") and not leaf.trainable and not leaf.seed
        for key in _keys(leaf)
        if sizes.get(key, 0) >= _LEAST_RESTING_BYTES
    )


def _keys(leaf: Leaf) -> list[str]:
    components: tuple[Any, ...] = leaf.components
    return [replica_key(leaf.path, index) for index in range(len(components))] if leaf.per_replica else [leaf.path]
