"""Which examples are held out for validation: a seeded hash of an example's index in the source decides.

Shards that Baton writes hold examples of one part. Records that stay in their original files are mixed: a shard holds
both parts, and a reader of one part selects its records with the functions here.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from tasks.foundation.contracts.dataset import HeldOut, ShardRecord
from tasks.foundation.dataset.hashing import hashes, unit_interval

Part = Literal["train", "validation"]

_PURPOSE = "validation"


def held_out_values(seed: int, begin: int, end: int) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) per example of [begin, end); an example is held out if it is below the fraction."""
    return unit_interval(hashes(_PURPOSE, seed, begin, end))


def held_out_mask(rule: HeldOut, begin: int, end: int) -> npt.NDArray[np.bool_]:
    """Return, for each example of [begin, end), whether it is held out for validation."""
    held_out = held_out_values(rule.seed, begin, end) < rule.fraction
    if rule.exception is not None and begin <= rule.exception < end:
        held_out[rule.exception - begin] ^= True
    return held_out


def positions_of_part(part: Part, rule: HeldOut, shards: Sequence[ShardRecord]) -> npt.NDArray[np.int64]:
    """Return the positions of a part's examples among all records of some shards, read in order.

    Args:
        part: train or validation.
        rule: the dataset's rule.
        shards: in reading order.

    Returns:
        Ascending positions from 0, one for each example of the part.
    """
    masks = [held_out_mask(rule, shard.first, shard.first + shard.records_held) for shard in shards]
    return np.flatnonzero(np.concatenate(masks) == (part == "validation")).astype(np.int64)
