"""The form in which a transform receives and returns an example: x, (x, y) or (x, y, sample_weight), as in a source.

Several inputs or outputs are a flat dict, or a list: a bare tuple would look like (x, y).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.errors import ModelError

_PARTS = ("x", "y", "sample_weight")


def as_user_sees(parts: tuple[Any, ...]) -> Any:
    """Convert (x,), (x, y) or (x, y, sample_weight) to the example that a transform receives: (x,) becomes x."""
    seen = tuple(list(part) if isinstance(part, tuple) else part for part in parts)
    return seen[0] if len(seen) == 1 else seen


def parts_of(returned: object, *, where: str) -> tuple[Any, ...]:
    """Convert what a transform returned to (x,), (x, y) or (x, y, sample_weight) of tensors, flat dicts or tuples.

    Args:
        returned: x, (x, y) or (x, y, sample_weight); each a tensor, an array, a number, or a flat dict or list of them.
        where: begins the message.

    Raises:
        ModelError: it has another form.
    """
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= len(_PARTS):
        raise ModelError(
            f"{where} returned a tuple of {len(parts)}; return x, (x, y) or (x, y, sample_weight), as the source does"
        )
    return tuple(_tensors(part, content, where) for part, content in zip(_PARTS, parts, strict=False))


def features_of(parts: tuple[Any, ...], *, where: str, batch: int | None = None) -> tuple[Feature, ...]:
    """Describe what a transform returned, as a manifest describes examples.

    Args:
        parts: from `parts_of`.
        where: begins the message.
        batch: the size of the first dimension, which is left out; None: the tensors are those of one example.

    Raises:
        ModelError: a shape is not static, a dtype has no NumPy counterpart, or the first dimension is not `batch`.
    """
    found = []
    for name, tensor in _named(parts):
        shape = tensor.shape
        if not shape.is_fully_defined():
            raise ModelError(
                f"{where} returned {name} with the shape {shape}; the model needs a static shape: end with "
                "tf.ensure_shape, or give the size as Python numbers"
            )
        sizes = tuple(int(size) for size in shape)
        if batch is not None:
            if not sizes or sizes[0] != batch:
                raise ModelError(
                    f"{where} returned {name} with the shape {list(sizes)} for a batch of {batch}; keep the number of "
                    "examples"
                )
            sizes = sizes[1:]
        found.append(Feature(name=name, dtype=_numpy_name(tensor.dtype, name, where), shape=sizes))
    return tuple(found)


def _tensors(part: str, content: object, where: str) -> Any:
    if isinstance(content, Mapping) and content and part != "sample_weight":
        wrong = [key for key in content if not isinstance(key, str) or not key]
        if wrong:
            raise ModelError(f"{where} returned {part} with the key {wrong[0]!r}; use non-empty strings")
        return {key: _tensor(f"{part}/{key}", value, where) for key, value in content.items()}
    if isinstance(content, list | tuple) and content:
        return tuple(_tensor(f"{part}[{number}]", value, where) for number, value in enumerate(content))
    return _tensor(part, content, where)


def _tensor(name: str, value: object, where: str) -> Any:
    plain = isinstance(value, bool | int | float | np.ndarray | np.generic | tf.Tensor)
    if not plain and not hasattr(value, "__tf_tensor__"):
        raise ModelError(
            f"{where} returned {name} as {type(value).__name__}; return tensors: x, (x, y) or (x, y, sample_weight), "
            "each also as a list, x and y also as flat dicts"
        )
    return tf.convert_to_tensor(value)


def _named(parts: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    for part, content in zip(_PARTS, parts, strict=False):
        if isinstance(content, Mapping):
            yield from ((f"{part}/{key}", value) for key, value in content.items())
        elif isinstance(content, tuple):
            yield from ((f"{part}[{number}]", value) for number, value in enumerate(content))
        else:
            yield part, content


def _numpy_name(dtype: Any, name: str, where: str) -> str:
    if dtype == tf.string:
        return "string"
    # Other dtypes, such as bfloat16, have a NumPy type that only TensorFlow registers.
    if not (dtype.is_bool or dtype.is_integer or dtype.is_complex or dtype in {tf.float16, tf.float32, tf.float64}):
        raise ModelError(f"{where} returned {name} as {dtype.name}; cast it to numbers such as float32 or int64")
    return str(dtype.name)
