"""Every example is looked at before it is written."""

from typing import Any

import numpy as np

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.dataset.features import Array, flatten
from tasks.foundation.errors import SourceError

# Name, dtype and shape of an array of an example.
_Kind = tuple[str, np.dtype[Any], tuple[int, ...]]


class Checker:
    """Flattens examples and compares each with the first."""

    def __init__(self, *, classes: int | None, allow_nan: bool) -> None:
        self._classes = classes
        self._allow_nan = allow_nan
        self._first = ""
        self._kinds: list[_Kind] = []

    def check(self, where: str, example: object) -> dict[str, Array]:
        """The example as named arrays.

        Args:
            where: its place in the source, for messages.
            example: as the source yields it.

        Raises:
            SourceError: it has no usable form, differs from the first in names, shapes or dtypes, holds NaN or
                infinity, or its label is out of range.
        """
        try:
            arrays = flatten(example)
        except ValueError as fault:
            raise SourceError(f"{where}: {fault}") from fault
        kinds = [(name, array.dtype, array.shape) for name, array in arrays.items()]
        if not self._kinds:
            self._first, self._kinds = where, kinds
        elif kinds != self._kinds:
            remedy = "make all examples of one kind"
            if _may_be_shorter_batch(self._kinds, kinds):
                remedy += ", or, if these are batches, yield their examples one by one, as yield from zip(x, y)"
            raise SourceError(f"{where}: {self._difference(kinds)}; {remedy}")
        if not self._allow_nan:
            _check_finite(where, arrays)
        if self._classes is not None:
            _check_label(where, arrays, self._classes)
        return arrays

    @property
    def features(self) -> tuple[Feature, ...]:
        """What all examples hold, as the first one does."""
        return tuple(Feature(name=name, dtype=dtype.name, shape=shape) for name, dtype, shape in self._kinds)

    def _difference(self, kinds: list[_Kind]) -> str:
        names, first_names = ([name for name, _, _ in some] for some in (kinds, self._kinds))
        if names != first_names:
            return f"has {', '.join(names)}, the first example ({self._first}) has {', '.join(first_names)}"
        here, first = next(pair for pair in zip(kinds, self._kinds, strict=True) if pair[0] != pair[1])
        word, at = ("dtype", 1) if here[1] != first[1] else ("shape", 2)
        return f"{here[0]} has {word} {here[at]}, in the first example ({self._first}) it has {first[at]}"


def _may_be_shorter_batch(first: list[_Kind], kinds: list[_Kind]) -> bool:
    """Whether all differ in their first dimension alone, by which the last batch differs from the others.

    Vectors of different lengths are more likely to be just that.
    """
    if all(len(shape) < 2 for _, _, shape in first):  # noqa: PLR2004 - examples of a batch that are more than numbers
        return False
    lengths = {tuple(shape[0] if shape else 0 for _, _, shape in each) for each in (first, kinds)}
    of_each = [set(each) for each in lengths]
    rests = [[(name, dtype, shape[1:]) for name, dtype, shape in each] for each in (first, kinds)]
    return rests[0] == rests[1] and len(lengths) > 1 and all(len(each) == 1 and 0 not in each for each in of_each)


def _check_finite(where: str, arrays: dict[str, Array]) -> None:
    for name, array in arrays.items():
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            place = tuple(int(index) for index in np.argwhere(~np.isfinite(array))[0])
            raise SourceError(
                f"{where}: {name} holds {array[place]} at {list(place)}; clean the source, or set "
                "data.allow_nan: true to let it in"
            )


def _check_label(where: str, arrays: dict[str, Array], classes: int) -> None:
    label = arrays.get("y")
    if label is None:
        raise SourceError(
            f"{where}: data.classes: {classes} needs a single label y, the example has {', '.join(arrays)}; "
            "yield (x, y), or drop data.classes"
        )
    if label.dtype.kind not in "iu":
        raise SourceError(
            f"{where}: y has dtype {label.dtype}, data.classes: {classes} needs integers; convert it, or drop "
            "data.classes"
        )
    wrong = label[(label < 0) | (label >= classes)]
    if wrong.size:
        raise SourceError(
            f"{where}: label y is {wrong.flat[0]}, outside [0, {classes}); correct the source, or set data.classes"
        )
