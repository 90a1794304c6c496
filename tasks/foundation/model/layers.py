"""The layers of a model by path: `encoder/block/dense` for a nested layer."""

from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tasks.foundation.errors import ModelError
from tasks.foundation.user_errors import user_error


def named_layers(model: keras.Model) -> Iterator[tuple[str, keras.Layer]]:
    """Yield each layer with its path, parents first; the model itself has an empty path.

    The order is that in which Keras saves: first the layers of Functional and Sequential models, then attributes by
    name. A layer that can be reached by several paths has the first.
    """
    seen: set[int] = set()
    yield from _below("", model, seen)


def own_variables(layer: keras.Layer) -> dict[str, keras.Variable]:
    """Return the variables that a layer itself holds, under the keys that Keras saves them by: "0", "1" and so on.

    Other values that a custom layer saves are left out.
    """
    store: dict[str, Any] = {}
    try:
        layer.save_own_variables(store)
    except Exception:  # noqa: BLE001 - the user's method may expect an HDF5 file
        store = {}
    return {str(key): value for key, value in store.items() if isinstance(value, keras.Variable)}


def stateful_layers_warning(model: keras.Model, *, shuffle: bool) -> str | None:
    """Return a warning if layers go on from batch to batch with the same rows, but these are shuffled; else None."""
    paths = [path or layer.name for path, layer in named_layers(model) if getattr(layer, "stateful", None) is True]
    if not shuffle or not paths:
        return None
    return (
        f"{', '.join(paths)}: stateful=True goes on with each row of a batch where that row of the one before ended, "
        "but the examples are shuffled; set data.shuffle: false, which keeps the order of the source"
    )


def has_finalized_state(item: Any) -> bool:
    """Whether a layer makes constants of its variables, as `Normalization` does, and computes with these."""
    return isinstance(item, keras.Layer) and callable(getattr(item, "finalize_state", None))


def finalize_layers(model: keras.Model) -> None:
    """Let layers make the constants that follow from their variables, as Keras does after it has loaded weights.

    Functions that Keras has compiled for a caller's `predict` hold the earlier constants, so they are dropped.

    Raises:
        ModelError: a layer's `finalize_state` raised.
    """
    layers = list(named_layers(model))
    finalized = [(path, layer) for path, layer in layers if has_finalized_state(layer)]
    for path, layer in finalized:
        try:
            layer.finalize_state()
        except Exception as fault:
            raise ModelError(user_error(f"layer {path}: finalize_state raised", fault)) from fault
    for _, layer in layers if finalized else ():
        if isinstance(layer, keras.Model):
            layer.train_function = layer.test_function = layer.predict_function = None


def _below(name: str, layer: keras.Layer, seen: set[int]) -> Iterator[tuple[str, keras.Layer]]:
    if id(layer) in seen:
        return
    seen.add(id(layer))
    yield name, layer
    ordered = layer.layers if isinstance(layer, keras.Sequential | keras.Model) and hasattr(layer, "layers") else []
    attributes = [value for _, value in sorted(vars(layer).items())]
    for child in _layers_in([ordered, *attributes], set()):
        yield from _below(f"{name}/{child.name}" if name else child.name, child, seen)


def _layers_in(value: Any, seen: set[int]) -> Iterator[keras.Layer]:
    """Yield the layers in nested containers, in order."""
    if isinstance(value, keras.Layer):
        yield value
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:  # a set has no order
        seen.add(id(value))
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _layers_in(item, seen)
