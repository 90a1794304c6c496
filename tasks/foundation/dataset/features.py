"""The form of an example: features with names, dtypes and shapes, and the containers that users write them in.

An example has three forms: as the source gives it (arrays, dicts, tuples, text), flat by feature name as shards store
it, and as `fit` and the model take it. Text is stored as UTF-8 bytes, and given to the model as `tf.string`. Lists that
are one array are told from lists of inputs or outputs, and shapes that may mean one example from those of a batch.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final, cast

import numpy as np
import numpy.typing as npt

from baton.tasks.foundation.text import shown

# An example, as it is stored and as it is decoded: what a file says beyond this allocates nothing.
MOST_EXAMPLE_BYTES: Final = 1 << 29
# The dtype of a feature of text; all others are NumPy's.
STRING: Final = "string"


def is_text(value: object) -> bool:
    """Whether a value is text, a list of text, or a tensor of text. For a NumPy array, check its dtype."""
    if getattr(getattr(value, "dtype", None), "name", None) == STRING:
        return True
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, str | bytes)


def as_text(name: str, value: object) -> npt.NDArray[Any]:
    """Return text as an object array of bytes.

    Args:
        name: of the feature, for messages.
        value: text, a list or an array of text, or a tensor of text.

    Raises:
        ValueError: it is ragged, or holds something other than text.
    """
    if hasattr(value, "numpy") and not isinstance(value, np.ndarray):
        value = value.numpy()
    # Not through np.asarray, which would cut zero bytes from the end of bytes.
    array = np.asarray(value, object)
    encoded = np.empty(array.shape, object)
    for index, item in np.ndenumerate(array):
        if isinstance(item, bytes):
            encoded[index] = bytes(item)
        elif isinstance(item, str):
            encoded[index] = item.encode()
        else:
            raise ValueError(_not_text(name, list(index), item, array))  # noqa: TRY004 - of the data, not of the call
    return encoded


def _not_text(name: str, index: list[int], item: object, array: npt.NDArray[Any]) -> str:
    kind = type(item).__name__
    if isinstance(item, list | tuple | np.ndarray):
        return (
            f"{name} has dtype object{list(array.shape)}: ragged, with a {kind} of {np.shape(item)} at {index}; pad it "
            'to one shape: x = keras.utils.pad_sequences(x, maxlen=n, dtype="float32", padding="post")'
        )
    if item is None or kind in {"NAType", "NaTType"} or (isinstance(item, float) and math.isnan(item)):
        return (
            f"{name} has dtype object{list(array.shape)} with a missing value ({item}) at {index}; fill it, as with "
            f'{name}.fillna("") for text, or {name}.fillna(0) for numbers'
        )
    return (
        f"{name} has dtype object{list(array.shape)} with a {kind} at {index}; yield numbers with a fixed width, such "
        "as float32 or int64, or text alone; name columns of different kinds: {'age': ages, 'city': cities}"
    )


def dtype_name(array: npt.NDArray[Any]) -> str:
    """Return the dtype of a feature with these values."""
    return STRING if array.dtype == object else array.dtype.name


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


# Name -> (dtype, shape); names as in `features.flatten`.
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


def shared_batch_size(shapes: Shapes) -> int | None:
    """Return the batch size if these shapes may be a batch: x and y share one first dimension, which is above 1.

    A scalar label has no dimension, so an image with its class is one example. Without y the shapes are not conclusive.
    """
    if not any(_is_of(name, "y") for name in shapes):
        return None
    lengths = {shape[0] if shape else 0 for _, shape in shapes.values()}
    (length, *others) = lengths
    return length if not others and length > 1 else None


def single_example_shapes(shapes: Shapes) -> Shapes:
    """Return the shapes of one example of such a batch."""
    return {name: (dtype, shape[1:]) for name, (dtype, shape) in shapes.items()}


def describe_shapes(shapes: Mapping[str, tuple[str, Sequence[int | None]]]) -> str:
    """Return text such as `x float32[8] and y int64[]`."""
    words = [f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in shapes.items()]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _is_of(name: str, part: str) -> bool:
    return name == part or name.startswith((f"{part}/", f"{part}["))


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


MOST_NPY_HEADER_BYTES: Final = 1 << 16


def npy_header(stream: IO[bytes], size: int) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Return dtype, shape, whether the array is in Fortran's order, and the offset of its bytes.

    Args:
        stream: a .npy file, which is read up to its first value. No read may give more than `MOST_NPY_HEADER_BYTES`.
        size: the bytes of the whole file.

    Raises:
        ValueError: it is no such file, holds pickled objects, or is not as large as its header says.
    """
    form = cast(Any, np.lib.format)
    try:
        # Version 3 is for fields with names that are no ASCII.
        read = form.read_array_header_1_0 if form.read_magic(stream) == (1, 0) else form.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except Exception as fault:  # NumPy parses the header as Python: SyntaxError, TokenError, TypeError and more
        raise ValueError(f"is damaged ({shown(str(fault))}); write it with np.save or np.savez") from fault
    if dtype.hasobject:
        raise ValueError(
            "has dtype object; save numbers with a fixed width, such as float32: pickled objects are not read"
        )
    if min(shape, default=0) < 0 or size - stream.tell() != dtype.itemsize * math.prod(shape):
        raise ValueError(f"has {size} bytes, which do not fit {dtype}{shown(str(list(shape)))}; write it again")
    return dtype, shape, fortran, stream.tell()


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
        with np.errstate(over="ignore"):  # becomes infinity, which is refused later
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
