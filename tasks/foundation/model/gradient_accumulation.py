"""A train step over micro-batches: less memory for the same global batch.

Keras's own `gradient_accumulation_steps` counts whole batches, and fails to trace under a strategy; this one is inside
a step. The gradients of the micro-batches are averaged, which is the gradient of the whole batch for every loss that is
a mean over examples. What a layer makes of a batch as a whole (batch normalization) it makes of each micro-batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.errors import ModelError
from tasks.foundation.model.variables import layers_of

_LOSS = "loss"
# Relative; sums in another order differ by less, and a sum over half of the batch by far more.
_SAME = 1e-2


def accumulating_step(model: keras.Model, micro_batches: int) -> Callable[[Any], dict[str, Any]]:
    """What `model.train_step` does, in pieces.

    Args:
        model: compiled, with Keras's own `train_step`.
        micro_batches: pieces of a replica's batch; its size must be a multiple of it.

    Returns:
        A function of a batch `(x,)`, `(x, y)` or `(x, y, sample_weight)`, each tensor [per_replica_batch, ...], that
        takes one step and returns the metrics, for `strategy.run`.
    """

    def step(batch: Any) -> dict[str, Any]:
        weights = model.trainable_weights
        pieces = tree.map_structure(lambda value: _pieces(value, micro_batches), batch)

        def add(index: Any, *sums: Any) -> tuple[Any, ...]:
            piece = tree.map_structure(lambda value: value[index], pieces)
            gradients = _gradients(model, weights, piece)
            return index + 1, *(total + part for total, part in zip(sums, gradients, strict=True))

        begin = (tf.constant(0), *(tf.zeros(weight.shape, weight.dtype) for weight in weights))
        _, *sums = tf.while_loop(lambda index, *_: index < micro_batches, add, begin, parallel_iterations=1)
        mean = [total / tf.cast(micro_batches, total.dtype) for total in sums]
        model.optimizer.apply_gradients(zip(mean, weights, strict=True))
        return model.get_metrics_result()  # type: ignore[no-any-return]

    return step


def require_accumulation(
    model: keras.Model, batch: Sequence[Any], micro_batches: int, *, reference: str, accelerator: Accelerator
) -> None:
    """Refuse a model whose step cannot be cut into micro-batches, or would then train something else.

    Args:
        model: with all its variables.
        batch: one per-replica batch, whose shapes and dtypes are looked at.
        micro_batches: pieces that it is cut into.
        reference: what the user calls the model, for messages.
        accelerator: whose replicas take the step.

    Raises:
        ModelError: naming what stands against it.
    """
    for name in ("train_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ModelError(
                f"{reference}: the model has a {name} of its own, which cannot be cut into micro-batches unseen; "
                "leave out train.accumulate, and accumulate there"
            )
    together = [layer.path for layer in layers_of(model) if getattr(layer, "synchronized", False)]
    if together and accelerator.replicas > 1 and accelerator.kind != "tpu":
        raise ModelError(
            f"{reference}: {together[0]} is synchronized between replicas, which TensorFlow cannot trace within "
            "micro-batches; leave out train.accumulate, or synchronized"
        )
    with accelerator.strategy.scope():
        whole = _loss_of_equals(model, batch)
        pieces = _loss_of_equals(model, tree.map_structure(lambda value: value[: len(value) // micro_batches], batch))
        model.reset_metrics()
    # Of examples that are all the same, every piece has the mean of the whole, and only a part of its sum.
    if abs(whole - pieces) > _SAME * max(abs(whole), abs(pieces)):
        raise ModelError(
            f"{reference}: its loss is {whole:.6g} for a batch of equal examples and {pieces:.6g} for one of its "
            f"{micro_batches} micro-batches, so it is no mean over the examples (but a sum, or of the batch as a "
            "whole), and micro-batches would train something else; make it a mean, or leave out train.accumulate"
        )


def tells_a_mask(model: keras.Model, batch: Sequence[Any]) -> bool:
    """Whether a Keras mask comes out of the model, so that losses are means over what it keeps."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(tuple(batch))
    return any(getattr(each, "_keras_mask", None) is not None for each in tree.flatten(model(x, training=False)))


def _loss_of_equals(model: keras.Model, batch: Sequence[Any]) -> float:
    """The loss of a batch of such shapes whose examples are all the same, without dropout."""

    def equal(value: Any) -> Any:
        return np.full_like(value, 0.5 if np.issubdtype(value.dtype, np.floating) else 0)

    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tree.map_structure(equal, tuple(batch)))
    predictions = model(x, training=False)
    return float(tf.reduce_sum(model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight)))


def _gradients(model: keras.Model, weights: list[Any], piece: Any) -> list[Any]:
    """Gradients of one micro-batch; metrics are updated as Keras's `train_step` does."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(piece)
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight, training=True)
        examples = tf.shape(tree.flatten(x)[0])[0]
        # Keras divides each replica's loss by their number, so that the sum of gradients is their mean.
        replicas = tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, loss.dtype)
        _loss_tracker(model).update_state(loss * replicas, sample_weight=examples)
        scaled = model.optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, weights)
    model.compute_metrics(x, y, predictions, sample_weight=sample_weight)
    # A weight that the loss does not depend on has no gradient; an optimizer does nothing with one of zeros but decay.
    return [
        tf.zeros(weight.shape, weight.dtype) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, weight in zip(gradients, weights, strict=True)
    ]


def _pieces(value: Any, count: int) -> Any:
    size = value.shape[0] // count
    return tf.reshape(value, [count, size, *value.shape[1:]])


def _loss_tracker(model: keras.Model) -> Any:
    return next(metric for metric in model.metrics if metric.name == _LOSS)
