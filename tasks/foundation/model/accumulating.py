"""A train step over micro-batches: less memory for the same global batch.

Keras's own `gradient_accumulation_steps` counts whole batches, and fails to trace under a strategy; this one is inside
a step. The gradients of the micro-batches are averaged, which is the gradient of the whole batch for every loss that is
a mean over examples. What a layer makes of a batch as a whole (batch normalization) it makes of each micro-batch.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tasks.foundation.errors import ModelError

_LOSS = "loss"


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


def require_accumulation(model: keras.Model, reference: str) -> None:
    """Refuse a model whose step cannot be cut into micro-batches.

    Raises:
        ModelError: it has a `train_step` of its own, or a loss that is no mean over examples.
    """
    if type(model).train_step is not keras.Model.train_step:
        raise ModelError(
            f"{reference}: the model has a train_step of its own, which cannot be cut into micro-batches; leave out "
            "train.accumulate, and accumulate there"
        )
    for loss in _losses(model.loss):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in {"sum_over_batch_size", "mean"}:
            raise ModelError(
                f"{reference}: loss {loss.name} has reduction {reduction}, which is no mean over the examples, so "
                "micro-batches would train something else; use sum_over_batch_size, or leave out train.accumulate"
            )


def _gradients(model: keras.Model, weights: list[Any], piece: Any) -> list[Any]:
    """Gradients of one micro-batch; metrics are updated as Keras's `train_step` does."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(piece)
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        settings = {"training": True} if "training" in inspect.signature(model.compute_loss).parameters else {}
        loss = model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight, **settings)
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


def _losses(loss: Any) -> Iterator[Any]:
    for each in tree.flatten(loss):
        if isinstance(each, keras.losses.Loss):
            yield each
