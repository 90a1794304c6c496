"""The layers of a model by their names: `encoder/block/dense` for a layer within layers."""

from collections.abc import Iterator, Mapping
from typing import Any

import keras


def named_layers(model: keras.Model) -> Iterator[tuple[str, keras.Layer]]:
    """Every layer with the names that lead to it, parents first; the model itself has the empty name.

    In the order in which Keras saves: the layers of Functional and Sequential models first, then attributes by name.
    A layer that is reached on several ways has the first one's name.
    """
    seen: set[int] = set()
    yield from _below("", model, seen)


def own_variables(layer: keras.Layer) -> dict[str, keras.Variable]:
    """What a layer itself holds, under the keys that Keras saves them by: "0" and so on.

    A layer of the user's may save something else than its variables; that has no place here.
    """
    store: dict[str, Any] = {}
    try:
        layer.save_own_variables(store)
    except Exception:  # noqa: BLE001 - the user's own method, which may want a file of HDF5
        store = {}
    return {str(key): value for key, value in store.items() if isinstance(value, keras.Variable)}


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
    """Layers among values and containers of them, at any depth, in order."""
    if isinstance(value, keras.Layer):
        yield value
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:  # a set has no order
        seen.add(id(value))
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _layers_in(item, seen)
