"""Reads the layers and parameters of a built model, without running the user's code."""

import math
from collections.abc import Iterable
from typing import Any

import keras
from keras import tree

from tasks.foundation.contracts.home_files import LayerSummary, ModelSummary


def summarize(model: keras.Model) -> ModelSummary:
    """Return the layers of a built model and the numbers of its parameters.

    Unlike `model.summary()`, it asks no layer to compute a shape, which could run the user's Python code.
    """
    return ModelSummary(
        layers=tuple(
            LayerSummary(
                name=layer.name,
                kind=type(layer).__name__,
                output_shape=_output_shape(layer),
                parameters=_numbers_in(layer.weights),
            )
            for layer in model.layers
        ),
        trainable=_numbers_in(model.trainable_weights),
        frozen=_numbers_in(model.non_trainable_weights),
        optimizer=_numbers_in(model.optimizer.variables),
    )


def _numbers_in(variables: Iterable[Any]) -> int:
    return sum(math.prod(variable.shape) for variable in {id(each): each for each in variables}.values())


def _output_shape(layer: keras.Layer) -> str | None:
    """The shape of what the layer computes in a functional or sequential model; None for layers of other models."""
    try:
        output = layer.output
    except (AttributeError, ValueError):  # it was never called on a symbolic tensor
        return None
    shapes = [str(tuple(tensor.shape)) for tensor in tree.flatten(output)]
    return ", ".join(shapes)
