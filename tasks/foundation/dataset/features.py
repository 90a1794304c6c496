"""Converts an example between three forms.

As the user yields it:        x | (x, y) | (x, y, sample_weight)      x, y: an array, or a flat dict name -> array
As named arrays:              {"x": …, "x/<key>": …, "y": …, "y/<key>": …, "sample_weight": …}
As Keras's `train_step` sees: (x,) | (x, y) | (x, y, sample_weight)   (x,) is passed as x: `keras_steps.called_like_fit`
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_PARTS = ("x", "y", "sample_weight")
# Dtypes whose width is the same on every machine; longdouble's is not.
_DTYPES = {
    np.dtype(code).newbyteorder("<")
    for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}


def flatten(example: object) -> dict[str, Array]:
    """Convert an example to named arrays: x first, then y, then sample_weight; dict keys in sorted order.

    Arrays keep their dtype, in little-endian byte order. Python numbers become int64, float32 or bool.

    Args:
        example: as the user yields it. A tuple is (x, y) or (x, y, sample_weight); a list is an array.

    Raises:
        ValueError: the example has another form, an array is ragged, or its dtype has no fixed width (object, str).
    """
    parts = example if isinstance(example, tuple) else (example,)
    if not 1 <= len(parts) <= len(_PARTS):
        raise ValueError(f"a tuple of {len(parts)}; yield x, (x, y) or (x, y, sample_weight)")
    return {
        name: _fixed_width(name, value)
        for part, content in zip(_PARTS, parts, strict=False)
        for name, value in _named(part, content)
    }


def unflatten(features: Mapping[str, Any]) -> tuple[Any, ...]:
    """Convert named arrays to the tuple that Keras's `train_step` takes.

    Args:
        features: as `flatten` returns them; arrays or tensors, batched or not.
    """
    example: dict[str, Any] = {}
    for name, value in features.items():
        part, slash, key = name.partition("/")
        if slash:
            example.setdefault(part, {})[key] = value
        else:
            example[part] = value
    return tuple(example[part] for part in _PARTS if part in example)


def _named(part: str, content: object) -> Iterator[tuple[str, object]]:
    if not isinstance(content, Mapping):
        yield part, content
        return
    if part == "sample_weight" or not content:
        raise ValueError(f"{part} is {'a dict' if content else 'an empty dict'}; yield an array")
    for key in content:
        if not isinstance(key, str) or not key:
            raise ValueError(f"{part} has the key {key!r}; use non-empty strings as names of inputs and outputs")
    if nested := [key for key, value in content.items() if isinstance(value, Mapping)]:
        raise ValueError(f"{part}/{nested[0]} is a nested dict; yield one flat dict name -> array")
    yield from ((f"{part}/{key}", content[key]) for key in sorted(content))


def _fixed_width(name: str, value: object) -> Array:
    if value is None:
        raise ValueError(f"{name} is None; yield an array, or remove it")
    try:
        array = np.asarray(value)
    except ValueError as fault:
        raise ValueError(f"{name} is ragged ({fault}); yield arrays with a single shape") from fault
    if array.dtype == np.float64 and _is_plain_python(value):
        array = array.astype(np.float32)
    if array.dtype in _DTYPES:
        return array
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {array.dtype}; yield numbers with a fixed width, such as float32 or int64")
    return array.astype(dtype)


def _is_plain_python(value: object) -> bool:
    """Whether a value consists of Python numbers, whose floats are wider than the float32 that models compute in."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    # NumPy's float64 is a subclass of Python's float.
    return isinstance(value, (int, float, list, tuple)) and not isinstance(value, np.generic)
