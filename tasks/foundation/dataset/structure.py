"""Tells lists of inputs or outputs from lists that are one array."""

from collections.abc import Sequence

import numpy as np


def is_array(value: object) -> bool:
    """Whether a value is an array or a tensor of at least one dimension, not a number or a list."""
    shape = getattr(value, "shape", None)
    if shape is None or (not hasattr(value, "dtype") and not hasattr(value, "iloc")):
        return False
    try:
        return len(shape) > 0
    except (TypeError, ValueError):  # a tensor of unknown rank
        return True


def items_of_example(content: object) -> Sequence[object] | None:
    """Return the arrays that a list or tuple in a single example consists of; None if it is one array, or no list.

    A tuple of arrays is several inputs or outputs. A list of equally shaped arrays is one array, which stacks them; a
    list of arrays of other shapes cannot be. Numbers and lists of numbers are one array.
    """
    if not isinstance(content, list | tuple) or len(content) < 2:  # noqa: PLR2004 - one array is not several
        return None
    if not any(map(is_array, content)):
        return None
    return content if isinstance(content, tuple) or len({_shape(each) for each in content}) > 1 else None


def ragged_items(value: object) -> Sequence[object] | None:
    """Return the examples of an array whose examples differ in length; None if it is an ordinary array.

    Args:
        value: a list, a tuple or a NumPy array of objects, whose items are lists or arrays; or a RaggedTensor.
    """
    if type(value).__name__ == "RaggedTensor":
        return [each.numpy() for each in value]  # type: ignore[attr-defined]
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:
        items: Sequence[object] = value.tolist()
    elif isinstance(value, list | tuple):
        items = value
    else:
        return None
    if not items or not all(isinstance(each, list | tuple | np.ndarray) or is_array(each) for each in items):
        return None
    is_objects = isinstance(value, np.ndarray)
    return items if is_objects or len({_length(each) for each in items}) > 1 else None


def _length(value: object) -> int:
    return len(value)  # type: ignore[arg-type]


def _shape(value: object) -> tuple[int, ...] | str:
    shape = getattr(value, "shape", None)
    try:
        return tuple(np.shape(value) if shape is None else shape)  # type: ignore[arg-type]
    except ValueError:
        return "ragged"
