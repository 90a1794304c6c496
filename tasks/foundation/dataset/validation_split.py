"""Which examples are held out for validation: decided by a seeded hash of an example's index in the source.

Where Baton writes the shards, each holds examples of one part. Where the records stay in the files that they came in, a
shard holds both, and whoever reads one part picks its records by the same arithmetic.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from tasks.foundation.contracts.dataset import HeldOut, ShardRecord
from tasks.foundation.dataset.hashing import hashes, unit_interval

Part = Literal["train", "validation"]

_PURPOSE = "validation"


def chances(seed: int, begin: int, end: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each example of [begin, end): it is held out if that is below the fraction."""
    return unit_interval(hashes(_PURPOSE, seed, begin, end))


def is_held_out(rule: HeldOut, begin: int, end: int) -> npt.NDArray[np.bool_]:
    """For each example of [begin, end), whether it is for validation."""
    held_out = chances(rule.seed, begin, end) < rule.fraction
    if rule.exception is not None and begin <= rule.exception < end:
        held_out[rule.exception - begin] ^= True
    return held_out


def positions_of(part: Part, rule: HeldOut, shards: Sequence[ShardRecord]) -> npt.NDArray[np.int64]:
    """Where the examples of a part are among all records of some shards, read one after the other.

    Args:
        part: train or validation.
        rule: of the dataset.
        shards: as they are read.

    Returns:
        Ascending positions from 0; as many as the shards hold examples of that part.
    """
    masks = [is_held_out(rule, shard.first, shard.first + shard.records_held) for shard in shards]
    return np.flatnonzero(np.concatenate(masks) == (part == "validation")).astype(np.int64)
