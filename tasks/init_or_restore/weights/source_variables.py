"""The variables that were found in a source of weights, and their names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SourceVariable:
    """One variable of a source.

    Attributes:
        names: names that match it; the first one is used in messages.
        value: its value.
    """

    names: tuple[str, ...]
    value: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContents:
    """What was read from one source.

    Attributes:
        variables: its weights; each name belongs to one variable.
        ignored: number of other entries: of optimizers, metrics, counters, random states.
        place: where it was read from.
        step: the step of a Baton run's checkpoint.
        by_position: for Keras's own files: loads the whole file into the model by the positions of layers, as
            `model.load_weights` does, and returns {path: value}, or None if Keras finds that it does not fit. It leaves
            the model unchanged.
    """

    variables: tuple[SourceVariable, ...]
    ignored: int
    place: str
    step: int | None = None
    by_position: Callable[[], Mapping[str, Array] | None] | None = field(default=None, compare=False)


def with_unique_names(found: Sequence[SourceVariable]) -> tuple[SourceVariable, ...]:
    """Remove names that several variables share, and merge copies of one variable.

    A SavedModel stores its variables under two keys, and names of TensorFlow 1 may repeat.
    """
    of_name: dict[str, list[int]] = {}
    for index, held in enumerate(found):
        for name in dict.fromkeys(held.names):
            of_name.setdefault(name, []).append(index)
    dropped: set[int] = set()
    taken: dict[int, list[str]] = {index: list(held.names) for index, held in enumerate(found)}
    for name, (first, *others) in of_name.items():
        others = [index for index in others if index not in dropped]  # noqa: PLW2901 - without merged ones
        if not others or first in dropped:
            continue
        if all(_equal(found[first].value, found[index].value) for index in others):
            dropped.update(others)
            continue
        for index in (first, *others):
            taken[index].remove(name)
    return tuple(
        SourceVariable(tuple(taken[index]), held.value)
        for index, held in enumerate(found)
        if index not in dropped and taken[index]
    )


def _equal(one: Array, other: Array) -> bool:
    # Compares bytes, because NaN is not equal to itself.
    return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()


def as_array(value: Any) -> Array:
    """Return a value as a NumPy array that is a copy."""
    return np.array(value)
