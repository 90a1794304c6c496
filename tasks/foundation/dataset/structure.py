"""Tells lists of inputs or outputs from lists that are one array."""

from collections.abc import Sequence

import numpy as np

# A list with more arrays than this is a stack of rows, never a list of inputs.
MAX_INPUTS = 16


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

    As in Keras, a list or tuple of arrays is several inputs or outputs. Numbers and lists of numbers are one array, and
    so is a list of more arrays of one shape than a model has inputs.
    """
    if not isinstance(content, list | tuple) or not holds_arrays(content):
        return None
    return None if len(content) > MAX_INPUTS and is_list_of_equals(content) else content


def is_list_of_equals(content: object) -> bool:
    """Whether a list holds several arrays of one shape, which could also be stacked to one array; no tuple does."""
    return isinstance(content, list) and len(content) > 1 and len({_shape(each) for each in content}) == 1


def holds_arrays(value: object) -> bool:
    """Whether a value is a list or tuple of arrays."""
    return isinstance(value, list | tuple) and any(map(is_array, value))


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
