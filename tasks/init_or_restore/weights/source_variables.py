"""What was found in a source: variables with the names that they can be asked for by."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Held:
    """One variable of a source.

    Attributes:
        names: what it can be asked for by; the first one is what people are shown.
        value: its value.
    """

    names: tuple[str, ...]
    value: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What was read from one source.

    Attributes:
        variables: its weights, each name of one variable only.
        ignored: entries that are no weights: of optimizers, metrics, counters, random states.
        place: where it was read from.
        step: of a Baton run's checkpoint.
        by_place: for Keras's own files: asks Keras to load the whole file into the model, as `model.load_weights` does
            it by the places of layers, and returns {path: value}, or None if Keras finds that it does not fit. The
            model is left as it was.
    """

    variables: tuple[Held, ...]
    ignored: int
    place: str
    step: int | None = None
    by_place: Callable[[], Mapping[str, Array] | None] | None = field(default=None, compare=False)


def told_apart(found: Sequence[Held]) -> tuple[Held, ...]:
    """Variables without the names that several of them share; copies of one variable become one.

    A SavedModel has its variables under two keys, and TensorFlow 1's names may repeat.
    """
    of_name: dict[str, list[int]] = {}
    for index, held in enumerate(found):
        for name in dict.fromkeys(held.names):
            of_name.setdefault(name, []).append(index)
    dropped: set[int] = set()
    taken: dict[int, list[str]] = {index: list(held.names) for index, held in enumerate(found)}
    for name, (first, *others) in of_name.items():
        others = [index for index in others if index not in dropped]  # noqa: PLW2901 - those still there
        if not others or first in dropped:
            continue
        if all(_equal(found[first].value, found[index].value) for index in others):
            dropped.update(others)
            continue
        for index in (first, *others):
            taken[index].remove(name)
    return tuple(
        Held(tuple(taken[index]), held.value)
        for index, held in enumerate(found)
        if index not in dropped and taken[index]
    )


def _equal(one: Array, other: Array) -> bool:
    # As bytes, for a value may be NaN.
    return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()


def as_array(value: Any) -> Array:
    """A value as NumPy has it; never a view of something that may change."""
    return np.array(value)
