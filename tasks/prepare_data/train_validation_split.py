"""Splits a source into training and validation by a seeded hash of each example's index."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tasks.foundation.contracts.dataset import HeldOut
from tasks.foundation.dataset.held_out import held_out_values
from tasks.foundation.errors import SourceError

T = TypeVar("T")
_SMALL_CHUNK = 4096
_CHUNK = 1 << 20


def split(items: Iterable[T], *, fraction: float, seed: int) -> Iterator[tuple[bool, T]]:
    """Yield (held out, item) for each item. With at least two items and fraction > 0, both parts get one.

    An item is held out if its hash is below `fraction`. While all items so far belong to one part, the item whose hash
    is closest to the fraction is kept back; if the items end, it goes to the other part.

    Args:
        items: in source order.
        fraction: fraction that is held out, in [0, 1).
        seed: the run's seed.

    Raises:
        SourceError: there is a single item, which cannot be split.
    """
    numbered = zip(_endless_values(seed), items, strict=False)
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
        raise _single_example_error(fraction)
    yield not part, kept[1]


def part_sizes(length: int, *, fraction: float, seed: int) -> tuple[int, int]:
    """Return the sizes of training and validation for `length` items, at least 2 if fraction > 0; see `split`."""
    if fraction == 0:
        return length, 0
    held_out = sum(int(np.count_nonzero(values < fraction)) for _, values in _chunked_values(length, seed))
    held_out = min(max(held_out, 1), length - 1)
    return length - held_out, held_out


def held_out_rule(length: int, *, fraction: float, seed: int) -> HeldOut | None:
    """Return the rule by which `split` splits `length` items; None if nothing is held out.

    Raises:
        SourceError: there is a single item, which cannot be split.
    """
    if fraction == 0:
        return None
    if length == 1:
        raise _single_example_error(fraction)
    base = HeldOut(fraction=fraction, seed=seed)
    lowest, highest = (2.0, 0), (-1.0, 0)
    for begin, values in _chunked_values(length, seed):
        least, most = int(values.argmin()), int(values.argmax())
        lowest = min(lowest, (float(values[least]), begin + least))
        highest = max(highest, (float(values[most]), begin + most))
    if lowest[0] >= fraction:
        return base.model_copy(update={"exception": lowest[1]})
    if highest[0] < fraction:
        return base.model_copy(update={"exception": highest[1]})
    return base


def _chunked_values(length: int, seed: int) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    for begin in range(0, length, _CHUNK):
        yield begin, held_out_values(seed, begin, min(begin + _CHUNK, length))


def _endless_values(seed: int) -> Iterator[float]:
    begin = 0
    while True:
        yield from held_out_values(seed, begin, begin + _SMALL_CHUNK).tolist()
        begin += _SMALL_CHUNK


def _single_example_error(fraction: float) -> SourceError:
    return SourceError(
        f"data.validation_fraction: {fraction}: the source has a single example, which cannot be split; set it to 0, "
        "or add examples"
    )
