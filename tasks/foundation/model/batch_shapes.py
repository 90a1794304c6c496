"""Batch sizes in a model's configuration: those that its author means, and those that only came with the first batch.

A layer that is built when it is first called records the shape that it was called with. Its first size is the batch of
one replica, so the same model on another number of replicas would seem to be another one.
"""

from typing import Any
from weakref import WeakKeyDictionary

import keras

from tasks.foundation.model.layers import named_layers

_SHAPES = {"batch_shape", "build_input_shape"}
_BUILD = "build_config"
_BUILD_SHAPES = {"input_shape", "shapes_dict"}

# Of each model, whether its author has said a batch size. Once it is built, Keras's own inputs look the same.
_meant: "WeakKeyDictionary[keras.Model, bool]" = WeakKeyDictionary()


def note_batch_sizes(model: keras.Model) -> None:
    """Look for batch sizes that are meant; call before the model is called for the first time."""
    _meant[model] = any(_is_of_one_batch(layer) for _, layer in named_layers(model))


def means_a_batch_size(model: keras.Model) -> bool:
    """Whether it has an input with a batch size, or a recurrent layer that keeps its state from batch to batch."""
    return _meant.get(model, True)


def of_any_batch(config: Any) -> Any:
    """A model's configuration with null for the first size of every shape that a layer was built with."""
    if isinstance(config, list):
        return [of_any_batch(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {key: _value(key, value) for key, value in config.items()}


def _value(key: str, value: Any) -> Any:
    if key in _SHAPES:
        return _open(value)
    if key == _BUILD and isinstance(value, dict):
        return {name: _open(below) if name in _BUILD_SHAPES else below for name, below in value.items()}
    return of_any_batch(value)


def _open(shape: Any) -> Any:
    if isinstance(shape, dict):
        return {name: _open(below) for name, below in shape.items()}
    if not isinstance(shape, list) or not shape:
        return shape
    if all(size is None or isinstance(size, int) for size in shape):
        return [None, *shape[1:]]
    return [_open(below) for below in shape]


def _is_of_one_batch(layer: keras.Layer) -> bool:
    if getattr(layer, "stateful", False) is True:
        return True
    return isinstance(layer, keras.layers.InputLayer) and layer.batch_shape[0] is not None
