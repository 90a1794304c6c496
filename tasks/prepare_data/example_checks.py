"""Checks every example before it is written.

The extreme values of integer features, and of labels that are one number, found while the data is prepared.

A label that the model has no output for, or a token that an embedding has no row for, fails in mid-training, or is NaN
on a GPU. With its extremes in the manifest a dataset need not be read again to know. The two smallest and the two
largest values are kept: the very smallest or largest may stand for "no label", as a loss's `ignore_class`.

The check of the first example's features, which may refuse the run before anything is written.

The features of a source's first example, read before anything is written, and their words for messages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.dataset import ExtremeValue, Feature, Reading, with_class_names
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.dataset.features import (
    PAD,
    STRING,
    Array,
    dtype_name,
    flatten,
    is_list_of_equals,
    items_of_example,
)
from baton.tasks.foundation.errors import BatonError, SourceError
from baton.tasks.foundation.text import message
from baton.tasks.prepare_data.sequences import Packing, Padding
from baton.tasks.prepare_data.sources.registry import open_source
from baton.tasks.prepare_data.sources.source import Row

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

    def add_rows(self, where: Callable[[int], str], arrays: Mapping[str, Array]) -> None:
        """Look at many examples; `where` says the position of one, given its index."""
        for name, array in arrays.items():
            if not len(array) or not _is_looked_at(name, array[:1]):
                continue
            found = self._found.setdefault(name, {})
            flat, of_example = array.reshape(-1), array.size // len(array)
            chosen = np.flatnonzero(_may_be_extreme(flat, sorted(found)))
            values, first = np.unique(flat[chosen], return_index=True)
            for at in sorted({*range(len(values))[:_AT_EACH_END], *range(len(values))[-_AT_EACH_END - 1 :]}):
                self._keep(found, where(int(chosen[first[at]]) // of_example), values[at : at + 1])

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


# Name, dtype and shape of one array of an example.
_Kind = tuple[str, str, tuple[int, ...]]


class Checker:
    """Converts examples to named arrays, pads them, and compares each with the first.

    Attributes:
        packing: packs the examples later; None: they stay as they are.
        reading: how the examples were found, see `DatasetManifest.reading`.
    """

    def __init__(self, data: DataSpec, vocabularies: Mapping[str, tuple[str, ...]] | None = None) -> None:
        """Check examples of a run file's `data`; `vocabularies` are those of the source."""
        self._vocabularies = vocabularies or {}
        self._classes = data.classes
        self._allow_nan = data.allow_nan
        self._padding = None if data.pad is None else Padding(data.pad)
        self.packing = None if data.pack is None else Packing(data.pack, group=data.split_by)
        self._first = ""
        self._kinds: list[_Kind] = []
        self.reading: Reading = "examples"
        self._extremes = Extremes()

    def check(self, where: str, example: object) -> dict[str, Array]:
        """Return the example as named arrays.

        Args:
            where: its position in the source, for messages.
            example: as the source yields it, or a `Row`.

        Raises:
            SourceError: the example has an unsupported form, differs from the first in names, shapes or dtypes,
                contains NaN or infinity, or has a label out of range; or it cannot be padded or packed.
        """
        try:
            arrays = example.arrays if isinstance(example, Row) else flatten(example)
        except ValueError as fault:
            raise SourceError(f"{where}: {fault}") from fault
        arrays = _in_order(arrays, self._kinds)
        if self._padding is not None or self.packing is not None:
            arrays = _with_dtypes_of_empty(arrays, self._kinds)
        if self._padding is not None:
            arrays = self._padding.apply(where, arrays)
        if self.packing is not None:
            self.packing.check(where, arrays)
        kinds = [(name, dtype_name(array), array.shape) for name, array in arrays.items()]
        if not self._kinds:
            self._first, self._kinds = where, kinds
            self.reading = _reading(example)
        elif kinds != self._kinds and not (self.packing is not None and _may_be_sequences(self._kinds, kinds)):
            remedy = "give all examples the same names, dtypes and shapes"
            if _may_be_shorter_batch(self._kinds, kinds):
                remedy += ", or, if these are batches, set data.batched: true"
            hints = [_pad_hint(self._kinds, kinds)] if _may_be_sequences(self._kinds, kinds) else []
            raise SourceError(message(f"{where}: {self._difference(kinds)}; {remedy}", hints=hints))
        if not self._allow_nan:
            _check_finite(where, arrays)
        if self._classes is not None:
            _check_label(where, arrays, self._classes)
        self._extremes.add(where, arrays)
        return arrays

    def check_rows(self, where: Callable[[int], str], arrays: Mapping[str, Array], features: Sequence[Feature]) -> None:
        """Check many examples at once, as `check` does one by one.

        Args:
            where: says the position of an example in the source, given its index, for messages.
            arrays: by feature, [examples, *shape] of its dtype; of texts and images bytes objects.
            features: of the examples, which all of them have.

        Raises:
            SourceError: an example contains NaN or infinity, or has a label out of range.
        """
        if not self._kinds:
            self._kinds = [(each.name, each.dtype, each.shape) for each in features]
        numbers = {each.name: arrays[each.name] for each in features if arrays[each.name].dtype != object}
        if not self._allow_nan:
            for name, array in numbers.items():
                if array.dtype.kind in "fc" and not np.isfinite(array).all():
                    row = int(np.argwhere(~np.isfinite(array))[0][0])
                    _check_finite(where(row), {name: array[row]})
        if self._classes is not None and len(next(iter(arrays.values()))):
            label = arrays.get("y")
            wrong = None if label is None or label.dtype.kind not in "iu" else (label < 0) | (label >= self._classes)
            row = 0 if wrong is None or not wrong.any() else int(np.argwhere(wrong)[0][0])
            _check_label(where(row), {name: array[row] for name, array in arrays.items()}, self._classes)
        self._extremes.add_rows(where, numbers)

    @property
    def extremes(self) -> tuple[ExtremeValue, ...]:
        """The extreme values of the examples so far."""
        return self._extremes.found()

    @property
    def features(self) -> tuple[Feature, ...]:
        """The features of the examples, as in the first one; if they are packed, those of the rows."""
        kinds = self._kinds if self.packing is None else self.packing.kinds
        return tuple(
            Feature(
                name=name,
                dtype=dtype,
                shape=shape,
                encoding="text" if dtype == STRING else "raw",
                vocabulary=self._vocabularies.get(name, ()),
            )
            for name, dtype, shape in kinds
        )

    def _difference(self, kinds: list[_Kind]) -> str:
        names, first_names = ([name for name, _, _ in some] for some in (kinds, self._kinds))
        if names != first_names:
            return f"has {', '.join(names)}, but the first example ({self._first}) has {', '.join(first_names)}"
        here, first = next(pair for pair in zip(kinds, self._kinds, strict=True) if pair[0] != pair[1])
        word, at = ("dtype", 1) if here[1] != first[1] else ("shape", 2)
        return f"{here[0]} has {word} {here[at]}, but in the first example ({self._first}) it has {first[at]}"


def _reading(example: object) -> Reading:
    if isinstance(example, Row):
        return "rows"
    parts = example if isinstance(example, tuple) else (example,)
    return "lists" if any(is_list_of_equals(items_of_example(part)) for part in parts) else "examples"


def _in_order(arrays: dict[str, Array], kinds: list[_Kind]) -> dict[str, Array]:
    """Return the arrays in the order of the first example's: each dict may have its own."""
    names = [name for name, _, _ in kinds]
    return {name: arrays[name] for name in names} if arrays.keys() == set(names) else arrays


def _with_dtypes_of_empty(arrays: dict[str, Array], kinds: list[_Kind]) -> dict[str, Array]:
    """Give empty sequences the dtype of the first example's: an empty list has none."""
    dtypes = {name: dtype for name, dtype, _ in kinds if dtype != STRING}
    return {
        name: array if array.size else array.astype(dtypes.get(name, array.dtype)) for name, array in arrays.items()
    }


def _pad_hint(first: list[_Kind], kinds: list[_Kind]) -> str:
    name = next(here[0] for here, other in zip(first, kinds, strict=True) if here != other)
    return f"pad sequences of different lengths: data.pad: {{{name}: n}}, or in your code: {PAD}"


def _may_be_sequences(first: list[_Kind], kinds: list[_Kind]) -> bool:
    """Whether the arrays differ in the length of their first dimension, as sequences do."""
    return [(name, dtype, shape[1:], len(shape)) for name, dtype, shape in first] == [
        (name, dtype, shape[1:], len(shape)) for name, dtype, shape in kinds
    ]


def _may_be_shorter_batch(first: list[_Kind], kinds: list[_Kind]) -> bool:
    """Whether the arrays differ in their first dimension only, as the last batch differs from the others.

    Vectors of different lengths do not count: they are more likely examples of different lengths.
    """
    if all(len(shape) < 2 for _, _, shape in first):  # noqa: PLR2004 - a batch of arrays has at least two dimensions
        return False
    lengths = {tuple(shape[0] if shape else 0 for _, _, shape in each) for each in (first, kinds)}
    of_each = [set(each) for each in lengths]
    other_dimensions = [[(name, dtype, shape[1:]) for name, dtype, shape in each] for each in (first, kinds)]
    return (
        other_dimensions[0] == other_dimensions[1]
        and len(lengths) > 1
        and all(len(each) == 1 and 0 not in each for each in of_each)
    )


def _check_finite(where: str, arrays: dict[str, Array]) -> None:
    for name, array in arrays.items():
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            position = tuple(int(index) for index in np.argwhere(~np.isfinite(array))[0])
            raise SourceError(
                f"{where}: {name} contains {array[position]} at {list(position)}; clean the source, or set "
                "data.allow_nan: true to allow it"
            )


def _check_label(where: str, arrays: dict[str, Array], classes: int) -> None:
    label = arrays.get("y")
    if label is None:
        raise SourceError(
            f"{where}: data.classes: {classes} needs a single label y, but the example has {', '.join(arrays)}; "
            "yield (x, y), or remove data.classes"
        )
    if label.dtype.kind not in "iu":
        raise SourceError(
            f"{where}: y has dtype {label.dtype}, but data.classes: {classes} needs integers; convert it, or remove "
            "data.classes"
        )
    wrong = label[(label < 0) | (label >= classes)]
    if wrong.size:
        raise SourceError(
            f"{where}: label y is {wrong.flat[0]}, outside of [0, {classes}); correct the source, or data.classes"
        )


# Receives the features of the examples and how they were read, and may refuse the run.
FeatureCheck = Callable[[tuple[Feature, ...], Reading], None]


class FeaturesRefused(Exception):
    """A check raised an error. The data is valid, so prepared shards stay for the corrected model."""

    def __init__(self, fault: BatonError) -> None:
        super().__init__(str(fault))
        self.fault = fault


def check_features(check: FeatureCheck | None, features: tuple[Feature, ...], reading: Reading) -> None:
    """Call the check, if there is one.

    Raises:
        FeaturesRefused: it raised.
    """
    if check is None:
        return
    try:
        check(features, reading)
    except BatonError as fault:
        raise FeaturesRefused(fault) from fault


Kinds = Mapping[str, tuple[str, tuple[int, ...]]]


def features_of_first_example(spec: RunSpec, code_folder: Path) -> tuple[Feature, ...]:
    """Return the features of the first example of `data.source`, which is read and not written, with names of classes.

    Global random numbers stay as they are, because other examples are being read meanwhile.

    Raises:
        SourceError: the source is missing or empty, or its first example is invalid.
        RunFileError: the source or an option cannot be used.
    """
    from baton.tasks.foundation.model.build import preserved_global_state

    data = spec.data
    with preserved_global_state():
        source = open_source(data, code_folder, spec.train.seed)
        if source.in_place is not None:
            return with_class_names(source.in_place.features, source.origin)
        checker = Checker(data, source.vocabularies)
        with source.surroundings():
            first = next(source.read(), None)
        if first is None:
            raise SourceError(f"data.source: {data.source}: it has no examples; check data.options")
        checker.check(*first)
        return with_class_names(checker.features, source.origin)


def kinds_of(features: Sequence[Feature]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each feature, by name."""
    return {each.name: (each.dtype, each.shape) for each in features}


def words_of(kinds: Kinds) -> str:
    """Return `x float32[3], y int64[]`."""
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in kinds.items())
