"""Text as the value of a feature: stored as UTF-8 bytes, and given to the model as `tf.string`."""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

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
