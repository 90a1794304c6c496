"""Which examples are held out: decided by a seeded hash of the example's index, whatever the shards are."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from tasks.foundation.errors import SourceError
from tasks.prepare_data.seeded import fractions, hashes

T = TypeVar("T")
_PURPOSE = "validation"
_CHUNK = 1 << 20


def split(items: Iterable[T], *, fraction: float, seed: int) -> Iterator[tuple[bool, T]]:
    """Deal items out as (held out?, item); with two items or more, no part stays empty that should not.

    An item is held out if its hash is below `fraction`. As long as all go to one part, the item that comes closest
    to the other is kept back, and goes there if the end comes first.

    Args:
        items: in the order of the source.
        fraction: share that is held out, in [0, 1).
        seed: of the run.

    Raises:
        SourceError: one item alone is to be divided.
    """
    numbered = zip(fractions(_PURPOSE, seed), items, strict=False)
    if fraction == 0:
        yield from ((False, item) for _, item in numbered)
        return
    kept = next(numbered, None)
    if kept is None:
        return
    part = kept[0] < fraction
    alone = True
    for value, item in numbered:
        if (value < fraction) != part:
            yield part, kept[1]
            yield not part, item
            yield from ((value < fraction, item) for value, item in numbered)
            return
        alone = False
        closer = (value < kept[0]) != part
        yield part, kept[1] if closer else item
        kept = (value, item) if closer else kept
    if alone:
        raise SourceError(
            f"data.validation_fraction: {fraction}: the source has a single example, which cannot be divided; "
            "set it to 0, or give more examples"
        )
    yield not part, kept[1]


def part_sizes(length: int, *, fraction: float, seed: int) -> tuple[int, int]:
    """How many of `length` items, at least 2 where fraction > 0, `split` gives to training and to validation."""
    if fraction == 0:
        return length, 0
    held_out = 0
    for begin in range(0, length, _CHUNK):
        values = (hashes(_PURPOSE, seed, begin, min(begin + _CHUNK, length)) >> np.uint64(11)) * 2.0**-53
        held_out += int(np.count_nonzero(values < fraction))
    held_out = min(max(held_out, 1), length - 1)
    return length - held_out, held_out
