"""Converts an example between three forms.

As the user yields it:        x | (x, y) | (x, y, sample_weight)      x, y: an array, a flat dict name -> array, or a
                                                                      list or tuple of arrays (`structure.py`)
As named arrays:              {"x": …, "x/<key>": …, "x[0]": …, "y": …, "y/<key>": …, "sample_weight": …}
As Keras's `train_step` sees: (x,) | (x, y) | (x, y, sample_weight)   (x,) is passed as x: `keras_steps.called_like_fit`

Lists become tuples, as in Keras's `fit`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.foundation.dataset.structure import holds_arrays, items_of_example
from tasks.foundation.dataset.text_values import STRING, as_text, dtype_name, is_text

Array = npt.NDArray[Any]

PARTS = ("x", "y", "sample_weight")
# Dtypes whose width is the same on every machine; longdouble's is not.
_DTYPES = {
    np.dtype(code).newbyteorder("<")
    for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
}
_ITEM = re.compile(r"(x|y|sample_weight)\[\d+\]")


def flatten(example: object) -> dict[str, Array]:
    """Convert an example to named arrays: x first, then y, then sample_weight; dict keys in their own order.

    Arrays keep their dtype, in little-endian byte order. Python numbers become int64, float32 or bool. Text becomes an
    object array of UTF-8 bytes.

    Args:
        example: as the user yields it. A tuple is (x, y) or (x, y, sample_weight); a list of arrays is several inputs,
            see `items_of_example`.

    Raises:
        ValueError: the example has another form, an array is ragged, or its dtype has no fixed width (object).
    """
    parts = example if isinstance(example, tuple) else (example,)
    if not 1 <= len(parts) <= len(PARTS):
        raise ValueError(f"a tuple of {len(parts)}; yield x, (x, y) or (x, y, sample_weight)")
    arrays: dict[str, Array] = {}
    for part, content in zip(PARTS, parts, strict=False):
        for name, value in named_parts(part, content, items_of_example(content)):
            if value is not content and holds_arrays(value):
                raise ValueError(
                    f"{name} is a nested list of arrays; for one array, stack it: np.stack(…); for several inputs, "
                    "give each its place in one flat list, or its name in one flat dict"
                )
            arrays[name] = as_array(name, value)
    return arrays


def unflatten(features: Mapping[str, Any]) -> tuple[Any, ...]:
    """Convert named arrays to the tuple that Keras's `train_step` takes.

    Args:
        features: as `flatten` returns them; arrays or tensors, batched or not.
    """
    example: dict[str, Any] = {}
    for name, value in features.items():
        part, slash, key = name.partition("/")
        item = None if slash else _ITEM.fullmatch(name)
        if slash:
            example.setdefault(part, {})[key] = value
        elif item is not None:
            example[item[1]] = (*example.get(item[1], ()), value)
        else:
            example[part] = value
    return tuple(example[part] for part in PARTS if part in example)


def named_parts(part: str, content: object, items: Any | None) -> Iterator[tuple[str, object]]:
    """Yield the name and the value of each array of x, y or sample_weight.

    Args:
        part: `x`, `y` or `sample_weight`.
        content: an array, a flat dict of arrays, or a list or tuple.
        items: the arrays of a list or tuple that is not one array itself; None otherwise.

    Raises:
        ValueError: a dict or list is empty or nested, or a key is not a name.
    """
    if items is not None:
        if nested := [index for index, value in enumerate(items) if isinstance(value, Mapping | tuple)]:
            kind = type(items[nested[0]]).__name__
            raise ValueError(f"{part}[{nested[0]}] is a nested {kind}; yield one flat list, or a flat dict of arrays")
        yield from ((f"{part}[{index}]", value) for index, value in enumerate(items))
        return
    if not isinstance(content, Mapping):
        yield part, content
        return
    if not content:
        raise ValueError(f"{part} is an empty dict; yield an array")
    for key in content:
        if not isinstance(key, str) or not key:
            raise ValueError(f"{part} has the key {key!r}; use non-empty strings as names of inputs and outputs")
    for key, value in content.items():
        if isinstance(value, Mapping) or (isinstance(value, tuple) and holds_arrays(value)):
            kind = "tuple" if isinstance(value, tuple) else "dict"
            raise ValueError(f"{part}/{key} is a nested {kind}; yield one flat dict name -> array")
    yield from ((f"{part}/{key}", value) for key, value in content.items())


def zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """Return zeros, or empty strings, of a feature's dtype."""
    return np.full(shape, b"", object) if dtype == STRING else np.zeros(shape, dtype)


def as_array(name: str, value: object) -> Array:
    """Return one array of an example, or of many examples, with a dtype of fixed width or as text.

    Args:
        name: of the feature, for messages.
        value: an array, a tensor, a list of numbers or text, or a number or text.

    Raises:
        ValueError: it is None, ragged or sparse, or has an unsupported dtype; has the remedy.
    """
    if value is None:
        raise ValueError(f"{name} is None; yield an array, or remove it")
    value = _dense(name, value)
    if is_text(value):
        return as_text(name, value)
    if isinstance(value, np.ma.MaskedArray) and np.any(value.mask):
        raise ValueError(f"{name} is a masked array, whose masked values would count; fill them: {name}.filled(0)")
    try:
        array = np.asarray(value)
    except ValueError as fault:
        raise ValueError(
            f"{name} is ragged ({fault}); yield arrays with a single shape, set data.pad: {{{name}: n}}, or: {PAD}"
        ) from fault
    if array.dtype == np.float64 and _is_plain_python(value):
        array = array.astype(np.float32)
    if array.dtype in _DTYPES:
        return array
    if array.dtype.kind in "OSU":
        return as_text(name, array)
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {dtype_name(array)}; {_as_numbers(name, array)}")
    return array.astype(dtype)


def _as_numbers(name: str, array: Array) -> str:
    """How to make numbers of an array of another kind."""
    if array.dtype.kind in "mM":
        word = "datetime64" if array.dtype.kind == "M" else "timedelta64"
        return f"give seconds, as np.asarray({name}, '{word}[s]').astype('int64'), or days"
    if array.dtype.names:
        return f"give its fields as inputs with names: {{field: {name}[field] for field in {name}.dtype.names}}"
    return "yield numbers with a fixed width, such as float32 or int64"


# The remedy for sequences of different lengths.
PAD = 'n = max(map(len, x)); x = keras.utils.pad_sequences(x, maxlen=n, dtype="float32", padding="post")'


def _dense(name: str, value: object) -> object:
    """Return a sparse matrix or tensor as a dense one; refuse a ragged tensor."""
    module, kind = type(value).__module__, type(value).__name__
    if kind.startswith("RaggedTensor"):
        raise ValueError(
            f"{name} is a RaggedTensor {list(getattr(value, 'shape', []))}; pad it: {name}.to_tensor(shape=[None, n]), "
            "with the same n for all examples"
        )
    if kind == "SparseTensor" and module.startswith("tensorflow"):
        import tensorflow as tf

        return tf.sparse.to_dense(tf.sparse.reorder(value)).numpy()
    if module.startswith("scipy.sparse"):
        return value.toarray()  # type: ignore[attr-defined]
    return value


def _is_plain_python(value: object) -> bool:
    """Whether a value consists of Python numbers, whose floats are wider than the float32 that models compute in."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    # NumPy's float64 is a subclass of Python's float.
    return isinstance(value, (int, float, list, tuple)) and not isinstance(value, np.generic)
