"""The extreme values of integer features, and of labels that are one number, found while the data is prepared.

A label that the model has no output for, or a token that an embedding has no row for, fails in mid-training, or is NaN
on a GPU. With its extremes in the manifest a dataset need not be read again to know. The two smallest and the two
largest values are kept: the very smallest or largest may stand for "no label", as a loss's `ignore_class`.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tasks.foundation.contracts.dataset import ExtremeValue
from tasks.foundation.dataset.features import Array

_AT_EACH_END = 2
# Larger ones are images and the like, whose values index nothing.
_MOST_NUMBERS = 65_536
_WHERE_CHARACTERS = 200


class Extremes:
    """Collects the extreme values of all features."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int | float, str]] = {}

    def add(self, where: str, arrays: Mapping[str, Array]) -> None:
        """Look at one example; `where` is its position in the source."""
        for name, array in arrays.items():
            if _is_looked_at(name, array):
                found = self._found.setdefault(name, {})
                if array.size != 1 or array.item() not in found:
                    self._keep(found, where, array[_may_be_extreme(array, sorted(found))])

    def _keep(self, found: dict[int | float, str], where: str, values: Array) -> None:
        for value in np.unique(values).tolist():
            if not math.isnan(value):
                found[value] = where[:_WHERE_CHARACTERS]
        for value in sorted(found)[_AT_EACH_END:-_AT_EACH_END]:
            del found[value]

    def found(self) -> tuple[ExtremeValue, ...]:
        """The extreme values, by feature and value."""
        return tuple(
            ExtremeValue(feature=name, value=value, where=self._found[name][value])
            for name in self._found
            for value in sorted(self._found[name])
        )


def _is_looked_at(name: str, array: Array) -> bool:
    is_label = name[0] == "y" and array.size == 1 and array.dtype.kind == "f"
    return is_label or (array.dtype.kind in "iu" and array.size <= _MOST_NUMBERS)


def _may_be_extreme(array: Array, found: Sequence[int | float]) -> Array:
    """Where an array has values beyond those that were found, or between them as long as there are few."""
    new: Array = np.ones(array.shape, bool)
    if len(found) == 2 * _AT_EACH_END:
        new = (array < found[_AT_EACH_END - 1]) | (array > found[_AT_EACH_END])
    for value in found:
        new &= array != value
    return new
