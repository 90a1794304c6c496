"""Small models whose train step can be traced and compiled."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from baton.tasks.foundation.model.variables import layers_of


class ApplyLayer(keras.layers.Layer):
    """A layer that calls `work` with its input."""

    def __init__(self, work: Callable[[Any], Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.work = work

    def call(self, x: Any) -> Any:
        return self.work(x)


def batch_of(*shapes: tuple[int, ...], dtype: str = "float32") -> tuple[Any, ...]:
    return tuple(np.ones(shape, dtype) for shape in shapes)


def step_of(model: keras.Model, batch: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any], list[str]]:
    """Create all variables; return the train step, the specs of its arguments, and the names of the layers."""
    predictions = model(batch[0], training=False)
    model.optimizer.build(model.trainable_variables)
    model.compute_metrics(batch[0], batch[1], predictions, sample_weight=None)
    specs = [tf.TensorSpec(part.shape, part.dtype) for part in batch]
    return (lambda *parts: model.train_step(parts)["loss"]), specs, [layer.name for layer in layers_of(model)]
