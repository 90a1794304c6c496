"""Batch sizes in a model's configuration: those that its author fixed, and those of the batch it was built with.

A layer that is built on its first call records the shape of that call. The first dimension is the per-replica batch
size, so without this module the same model would look like another one on another number of replicas.
"""

from typing import Any
from weakref import WeakKeyDictionary

import keras

from tasks.foundation.model.layers import named_layers

_SHAPES = {"batch_shape", "build_input_shape"}
_BUILD = "build_config"
_BUILD_SHAPES = {"input_shape", "shapes_dict"}

# Whether the author of a model fixed a batch size. It must be recorded before the first call: afterwards Keras's own
# inputs look the same. A weak dictionary, because Baton adds no attributes to the user's model.
_fixed_batch_size: "WeakKeyDictionary[keras.Model, bool]" = WeakKeyDictionary()


def record_fixed_batch_size(model: keras.Model) -> None:
    """Record whether the model fixes a batch size; call before the model is called for the first time."""
    _fixed_batch_size[model] = any(_fixes_batch_size(layer) for _, layer in named_layers(model))


def has_fixed_batch_size(model: keras.Model) -> bool:
    """Whether the model has an input with a batch size, or a recurrent layer that keeps its state between batches."""
    return _fixed_batch_size.get(model, True)


def without_batch_sizes(config: Any) -> Any:
    """Return a model's configuration with null as the first dimension of every shape that a layer was built with."""
    if isinstance(config, list):
        return [without_batch_sizes(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {key: _value(key, value) for key, value in config.items()}


def _value(key: str, value: Any) -> Any:
    if key in _SHAPES:
        return _without_first(value)
    if key == _BUILD and isinstance(value, dict):
        return {name: _without_first(below) if name in _BUILD_SHAPES else below for name, below in value.items()}
    return without_batch_sizes(value)


def _without_first(shape: Any) -> Any:
    if isinstance(shape, dict):
        return {name: _without_first(below) for name, below in shape.items()}
    if not isinstance(shape, list) or not shape:
        return shape
    if all(size is None or isinstance(size, int) for size in shape):
        return [None, *shape[1:]]
    return [_without_first(below) for below in shape]


def _fixes_batch_size(layer: keras.Layer) -> bool:
    if getattr(layer, "stateful", False) is True:
        return True
    return isinstance(layer, keras.layers.InputLayer) and layer.batch_shape[0] is not None
