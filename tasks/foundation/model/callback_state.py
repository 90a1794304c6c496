"""The state of a callback as JSON values: the plain values among its attributes, or what its `get_state()` returns.

A callback may define `get_state()`, which returns plain values, and `set_state(state)`; then nothing else is saved. The
numbers of a large array are bytes, which are no JSON: `HostState` keeps them beside it.
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
from tasks.foundation.telemetry.formatting import size_words

# Keras sets these again in every process.
_SET_BY_KERAS = {"_model", "model", "params"}
# Types of values without state; they are not saved.
_STATELESS = (
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
# Arrays from this size on are bytes; the states of most callbacks stay text.
_LARGE_ARRAY_BYTES = 1024
# A state of this size is worth a word, because each checkpoint has it.
LARGE_STATE_BYTES = 1_000_000
_MOST_ATTRIBUTES = 8
_GET_STATE = "get_state"


class _UnsupportedValueError(Exception):
    """The value cannot be converted to JSON exactly."""


def callback_state(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Return the callback's current state.

    Raises:
        ModelError: the callback holds a value that a checkpoint cannot store; names the attribute and its type.
    """
    name = type(callback).__name__
    if hasattr(callback, _GET_STATE):
        try:
            return {_GET_STATE: _encoded(callback.get_state())}
        except _UnsupportedValueError as fault:
            raise ModelError(
                f"callback {name}: its get_state() returned {fault}, which a checkpoint cannot store; return numbers, "
                "strings, NumPy arrays of numbers, or lists and dicts of these"
            ) from fault
    state = {}
    for key, value in sorted(vars(callback).items()):
        if key in _SET_BY_KERAS:
            continue
        try:
            state[key] = _encoded(value)
        except _UnsupportedValueError as fault:
            if not _is_stateless(value, callback.model):
                raise ModelError(
                    f"callback {name}: the attribute {key} has type {type(value).__name__}, which a checkpoint cannot "
                    "store; use numbers, strings, NumPy arrays of numbers, or lists and dicts of these, or define "
                    "get_state() and set_state(state) in the callback"
                ) from fault
    return state


def restore_callback_state(
    callback: keras.callbacks.Callback, state: Mapping[str, Any], *, initial: Mapping[str, Any]
) -> None:
    """Restore a callback to a saved state.

    Args:
        callback: in any state.
        state: what `callback_state` returned when the state was saved.
        initial: what `callback_state` returned for the new callback, after `on_train_begin`.
    """
    if _GET_STATE in state:
        callback.set_state(_decoded(state[_GET_STATE]))
        return
    for key in callback_state(callback).keys() - initial.keys() - state.keys():
        delattr(callback, key)  # set since the state was saved
    for key, value in {**initial, **state}.items():
        setattr(callback, key, _decoded(value))


def large_state_words(callback: keras.callbacks.Callback) -> str:
    """Return what to tell the user of a callback whose state makes checkpoints large; "" if it does not."""
    sizes = {name: _size(value) for name, value in callback_state(callback).items()}
    total = sum(sizes.values())
    if total < LARGE_STATE_BYTES:
        return ""
    largest = {name: size for name, size in sizes.items() if size >= total / _MOST_ATTRIBUTES}
    kept = " and ".join(f"{size_words(size)} in {name}" for name, size in largest.items())
    return (
        f"callback {type(callback).__name__} keeps {kept}: each checkpoint has them, and they are copied whenever the "
        "callback acts; define get_state() and set_state(state) in it, which return and take only what changes"
    )


def _size(encoded: Any) -> int:
    """The size of an encoded value in a checkpoint, in bytes."""
    held: list[int] = []
    return len(json.dumps(encoded, default=lambda data: held.append(len(data)))) + sum(held)


def _is_stateless(value: Any, model: keras.Model) -> bool:
    known = (model, model.optimizer, *model.layers)
    return isinstance(value, _STATELESS) or any(value is each for each in known)


def _encoded(value: Any) -> Any:  # noqa: PLR0911 - one a type
    """Convert a value to JSON. Lists stay lists; a type that JSON lacks becomes a dict with one key, its type."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS:
        array = np.asarray(value)
        form, data = "scalar" if isinstance(value, np.generic) else "array", array.tobytes()
        return {form: [array.dtype.str, list(array.shape), data if len(data) >= _LARGE_ARRAY_BYTES else data.hex()]}
    if kind is list:
        return [_encoded(item) for item in value]
    if kind is tuple:
        return {"tuple": [_encoded(item) for item in value]}
    if kind in (set, frozenset):  # the order of a set differs between processes
        return {kind.__name__: sorted(map(_encoded, value), key=json.dumps)}
    if kind is deque:
        return {"deque": [[_encoded(item) for item in value], value.maxlen]}
    if isinstance(value, dict) and kind.__module__ in {"builtins", "collections"} and not hasattr(value, "__missing__"):
        return {"dict": [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    # Keras callbacks such as EarlyStopping hold their comparison as an operation, and flip min_delta to match it.
    name = getattr(value, "__name__", "")
    if callable(value) and getattr(keras.ops, name, None) is value:
        return {"op": name}
    raise _UnsupportedValueError(f"a {kind.__name__}")


def _decoded(value: Any) -> Any:  # noqa: PLR0911 - one a kind
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    match kind:
        case "scalar" | "array":
            dtype, shape, data = held
            data = data if isinstance(data, bytes) else bytes.fromhex(data)
            array = np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
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
