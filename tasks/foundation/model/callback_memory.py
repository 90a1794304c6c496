"""What a callback remembers, as JSON values: the plain values among its attributes, or what it says itself.

A callback may offer `get_state()`, which returns plain values, and `set_state(state)`; then nothing else is kept.
"""

import enum
import functools
import json
import logging
import pathlib
import re
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tasks.foundation.errors import ModelError

# Set by Keras, and anew in every process.
_OF_KERAS = {"_model", "model", "params"}
# Without state that a run could miss.
_HARMLESS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    pathlib.PurePath,
    re.Pattern,
    logging.Logger,
    enum.Enum,
)
_NUMBERS = "biufc"
_ITSELF = "get_state"


class _CannotBeKeptError(Exception):
    """A value is none of those that JSON can be made of, exactly."""


def remembered(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """What a callback remembers now.

    Raises:
        ModelError: it keeps what no checkpoint can hold; names the attribute and its type.
    """
    name = type(callback).__name__
    if hasattr(callback, _ITSELF):
        try:
            return {_ITSELF: _encoded(callback.get_state())}
        except _CannotBeKeptError as fault:
            raise ModelError(
                f"callback {name}: its get_state() returned {fault}, which a checkpoint cannot hold; return numbers, "
                "strings, NumPy arrays of numbers, or lists and dicts of them"
            ) from fault
    memory = {}
    for key, value in sorted(vars(callback).items()):
        if key in _OF_KERAS:
            continue
        try:
            memory[key] = _encoded(value)
        except _CannotBeKeptError as fault:
            if not _is_harmless(value, callback.model):
                raise ModelError(
                    f"callback {name} keeps {key} of type {type(value).__name__}, which a checkpoint cannot hold; keep "
                    "numbers, strings, NumPy arrays of numbers, or lists and dicts of them, or give the callback "
                    "get_state() and set_state(state)"
                ) from fault
    return memory


def give_back(callback: keras.callbacks.Callback, memory: Mapping[str, Any], *, fresh: Mapping[str, Any]) -> None:
    """Have a callback remember what it did then.

    Args:
        callback: any state of it.
        memory: what `remembered` said then.
        fresh: what it said of a new callback, after `on_train_begin`.
    """
    if _ITSELF in memory:
        callback.set_state(_decoded(memory[_ITSELF]))
        return
    for key in remembered(callback).keys() - fresh.keys() - memory.keys():
        delattr(callback, key)  # got to know since
    for key, value in {**fresh, **memory}.items():
        setattr(callback, key, _decoded(value))


def _is_harmless(value: Any, model: keras.Model) -> bool:
    known = (model, model.optimizer, *model.layers)
    return isinstance(value, _HARMLESS) or any(value is each for each in known)


def _encoded(value: Any) -> Any:  # noqa: PLR0911 - one a type
    """Lists stay lists; what JSON does not know is a dict of one key, its kind."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS:
        array = np.asarray(value)
        form = "scalar" if isinstance(value, np.generic) else "array"
        return {form: [array.dtype.str, list(array.shape), array.tobytes().hex()]}
    if kind is list:
        return [_encoded(item) for item in value]
    if kind is tuple:
        return {"tuple": [_encoded(item) for item in value]}
    if kind in (set, frozenset):  # which has another order in every process
        return {kind.__name__: sorted(map(_encoded, value), key=json.dumps)}
    if kind is deque:
        return {"deque": [[_encoded(item) for item in value], value.maxlen]}
    if isinstance(value, dict) and kind.__module__ in {"builtins", "collections"} and not hasattr(value, "__missing__"):
        return {"dict": [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    # EarlyStopping and its like keep their comparison so, and turn the sign of min_delta when they set it.
    name = getattr(value, "__name__", "")
    if callable(value) and getattr(keras.ops, name, None) is value:
        return {"op": name}
    raise _CannotBeKeptError(f"a {kind.__name__}")


def _decoded(value: Any) -> Any:  # noqa: PLR0911 - one a kind
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    match kind:
        case "scalar" | "array":
            dtype, shape, data = held
            array = np.frombuffer(bytes.fromhex(data), np.dtype(dtype)).reshape(shape).copy()
            return array if kind == "array" else array[()]
        case "tuple":
            return tuple(map(_decoded, held))
        case "set":
            return set(map(_decoded, held))
        case "frozenset":
            return frozenset(map(_decoded, held))
        case "deque":
            return deque(map(_decoded, held[0]), maxlen=held[1])
        case "dict":
            return {_decoded(key): _decoded(item) for key, item in held}
    return getattr(keras.ops, held)
