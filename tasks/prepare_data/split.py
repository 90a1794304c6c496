"""Which examples are held out: decided by a seeded hash of the example's index, whatever the shards are."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tasks.foundation.contracts.dataset import HeldOut
from tasks.foundation.dataset.validation_split import chances
from tasks.foundation.errors import SourceError

T = TypeVar("T")
_FEW = 4096
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
    numbered = zip(_chances_without_end(seed), items, strict=False)
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
        raise _single(fraction)
    yield not part, kept[1]


def part_sizes(length: int, *, fraction: float, seed: int) -> tuple[int, int]:
    """How many of `length` items, at least 2 where fraction > 0, `split` gives to training and to validation."""
    if fraction == 0:
        return length, 0
    held_out = sum(int(np.count_nonzero(values < fraction)) for _, values in _chances_of(length, seed))
    held_out = min(max(held_out, 1), length - 1)
    return length - held_out, held_out


def rule(length: int, *, fraction: float, seed: int) -> HeldOut | None:
    """What `split` does with `length` items, as a value; None if nothing is held out.

    Raises:
        SourceError: one item alone is to be divided.
    """
    if fraction == 0:
        return None
    if length == 1:
        raise _single(fraction)
    plain = HeldOut(fraction=fraction, seed=seed)
    lowest, highest = (2.0, 0), (-1.0, 0)
    for begin, values in _chances_of(length, seed):
        least, most = int(values.argmin()), int(values.argmax())
        lowest = min(lowest, (float(values[least]), begin + least))
        highest = max(highest, (float(values[most]), begin + most))
    if lowest[0] >= fraction:
        return plain.model_copy(update={"exception": lowest[1]})
    if highest[0] < fraction:
        return plain.model_copy(update={"exception": highest[1]})
    return plain


def _chances_of(length: int, seed: int) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    for begin in range(0, length, _CHUNK):
        yield begin, chances(seed, begin, min(begin + _CHUNK, length))


def _chances_without_end(seed: int) -> Iterator[float]:
    begin = 0
    while True:
        yield from chances(seed, begin, begin + _FEW).tolist()
        begin += _FEW


def _single(fraction: float) -> SourceError:
    return SourceError(
        f"data.validation_fraction: {fraction}: the source has a single example, which cannot be divided; "
        "set it to 0, or give more examples"
    )
