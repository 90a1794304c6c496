"""An example as the user yields it, as flat named arrays, and as Keras's `train_step` takes it.

user:  x | (x, y) | (x, y, sample_weight)         x, y: an array, or a flat dict name -> array
flat:  {"x": …, "x/<key>": …, "y": …, "y/<key>": …, "sample_weight": …}
Keras: (x,) | (x, y) | (x, y, sample_weight)      a step gets x itself for (x,), see `own_steps.as_fit_gives`
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_PARTS = ("x", "y", "sample_weight")
# What has the same width on every machine, as longdouble has not.
_DTYPES = {
    np.dtype(code).newbyteorder("<")
    for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}


def flatten(example: object) -> dict[str, Array]:
    """Named arrays of one example, x first, then y, then sample_weight; keys of a dict sorted.

    Arrays keep their dtype (in little-endian byte order). What is plain Python becomes int64, float32 or bool.

    Args:
        example: see the module's head. A tuple is (x, y) or (x, y, sample_weight); a list is an array.

    Raises:
        ValueError: it has another form, an array is ragged, or its dtype has no fixed width, such as object or str.
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
    """The tuple that Keras's `train_step` takes; the values may be arrays or tensors, batched or not.

    Args:
        features: as `flatten` returns them.
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
            raise ValueError(f"{part} has the key {key!r}; name inputs and outputs by non-empty strings")
    if nested := [key for key, value in content.items() if isinstance(value, Mapping)]:
        raise ValueError(f"{part}/{nested[0]} is a dict within a dict; yield one flat dict name -> array")
    yield from ((f"{part}/{key}", content[key]) for key in sorted(content))


def _fixed_width(name: str, value: object) -> Array:
    if value is None:
        raise ValueError(f"{name} is None; yield an array, or leave it out")
    try:
        array = np.asarray(value)
    except ValueError as fault:
        raise ValueError(f"{name} is ragged ({fault}); yield arrays of one shape") from fault
    if array.dtype == np.float64 and _is_plain_python(value):
        array = array.astype(np.float32)
    if array.dtype in _DTYPES:
        return array
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {array.dtype}; yield numbers of a fixed width, such as float32 or int64")
    return array.astype(dtype)


def _is_plain_python(value: object) -> bool:
    """Whether it is made of Python's own numbers, whose float is wider than what models compute in."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    # NumPy's float64 is a subclass of Python's float.
    return isinstance(value, (int, float, list, tuple)) and not isinstance(value, np.generic)
