"""Gradient accumulation: a train step over micro-batches, which needs less memory for the same global batch.

Keras's own `gradient_accumulation_steps` counts whole batches, and cannot be traced under a strategy; this one works
inside a step. It averages the gradients of the micro-batches. For a loss that is a mean over examples, that is the
gradient of the whole batch. A layer that works on the whole batch (batch normalization) works on each micro-batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.losses import loss as losses  # Keras's own step undoes its division by the number of replicas with it

from tasks.foundation.errors import ModelError
from tasks.foundation.machine.devices import Accelerator
from tasks.foundation.model.metrics import ReturnedMetrics
from tasks.foundation.model.variables import layers_of

_LOSS = "loss"
# Relative. Sums in another order differ by less; a sum over half of the batch differs by far more.
_TOLERANCE = 1e-2


def accumulating_step(
    model: keras.Model, micro_batches: int, returned: ReturnedMetrics | None = None
) -> Callable[[Any], dict[str, Any]]:
    """Return a train step that does what `model.train_step` does, in micro-batches.

    Args:
        model: compiled, with Keras's own `train_step`.
        micro_batches: number of micro-batches; must divide the per-replica batch size.
        returned: metrics of the values that a `compute_metrics` of the user's returns.

    Returns:
        A function of a batch `(x,)`, `(x, y)` or `(x, y, sample_weight)`, each tensor [per_replica_batch, ...]. It
        takes one step and returns the metrics; call it with `strategy.run`.
    """

    def step(batch: Any) -> Any:
        weights = model.trainable_weights
        pieces = tree.map_structure(lambda value: _pieces(value, micro_batches), batch)

        def add(index: Any, *sums: Any) -> tuple[Any, ...]:
            piece = tree.map_structure(lambda value: value[index], pieces)
            gradients = _gradients(model, weights, piece, returned)
            return index + 1, *(total + part for total, part in zip(sums, gradients, strict=True))

        begin = (tf.constant(0), *(tf.zeros(weight.shape, weight.dtype) for weight in weights))
        _, *sums = tf.while_loop(lambda index, *_: index < micro_batches, add, begin, parallel_iterations=1)
        mean = [total / tf.cast(micro_batches, total.dtype) for total in sums]
        model.optimizer.apply_gradients(zip(mean, weights, strict=True))
        return model.get_metrics_result()

    return step


def require_accumulation(
    model: keras.Model, batch: Sequence[Any], micro_batches: int, *, reference: str, accelerator: Accelerator
) -> None:
    """Refuse a model whose step cannot be split into micro-batches, or would train differently.

    Args:
        model: with all its variables.
        batch: one per-replica batch; only its shapes and dtypes are used.
        micro_batches: number of micro-batches.
        reference: the function's name in the run file, for messages.
        accelerator: its replicas take the step.

    Raises:
        ModelError: names what prevents accumulation.
    """
    for name in ("train_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ModelError(
                f"{reference}: the model has a custom {name}, which Baton cannot split into micro-batches; remove "
                f"train.accumulate, and accumulate in {name}"
            )
    synchronized = [layer.path for layer in layers_of(model) if getattr(layer, "synchronized", False)]
    if synchronized and accelerator.replicas > 1 and accelerator.kind != "tpu":
        raise ModelError(
            f"{reference}: {synchronized[0]} is synchronized between replicas, which TensorFlow cannot trace within "
            "micro-batches; remove train.accumulate, or synchronized=True"
        )
    with accelerator.strategy.scope():
        whole = _loss_of_equal_examples(model, batch)
        pieces = _loss_of_equal_examples(
            model, tree.map_structure(lambda value: value[: len(value) // micro_batches], batch)
        )
        model.reset_metrics()
    # With equal examples, each micro-batch has the mean of the whole batch, but only a part of its sum.
    if abs(whole - pieces) > _TOLERANCE * max(abs(whole), abs(pieces)):
        raise ModelError(
            f"{reference}: its loss is {whole:.6g} for a batch of equal examples but {pieces:.6g} for one of its "
            f"{micro_batches} micro-batches, so it is not a mean over the examples, and micro-batches would train "
            "differently; make it a mean, or remove train.accumulate"
        )


def outputs_keras_mask(model: keras.Model, batch: Sequence[Any]) -> bool:
    """Whether the model outputs a Keras mask, so that losses are means over the unmasked values only."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(tuple(batch))
    return any(getattr(each, "_keras_mask", None) is not None for each in tree.flatten(model(x, training=False)))


def _loss_of_equal_examples(model: keras.Model, batch: Sequence[Any]) -> float:
    """Return the loss, without dropout, of a batch of these shapes whose examples are all equal."""

    def equal(value: Any) -> Any:
        return np.full_like(value, 0.5 if np.issubdtype(value.dtype, np.floating) else 0)

    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tree.map_structure(equal, tuple(batch)))
    predictions = model(x, training=False)
    return float(tf.reduce_sum(model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight)))


def _gradients(model: keras.Model, weights: list[Any], piece: Any, returned: ReturnedMetrics | None) -> list[Any]:
    """Return the gradients of one micro-batch, and update metrics as Keras's `train_step` does."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(piece)
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight, training=True)
        examples = tf.shape(tree.flatten(x)[0])[0]
        _loss_tracker(model).update_state(losses.unscale_loss_for_distribution(loss), sample_weight=examples)
        scaled = model.optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, weights)
    logs = model.compute_metrics(x, y, predictions, sample_weight=sample_weight)
    if returned is not None:
        returned.keep(logs, piece)
    # A weight that does not affect the loss has no gradient; with zeros the optimizer applies weight decay only.
    return [
        tf.zeros(weight.shape, weight.dtype) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, weight in zip(gradients, weights, strict=True)
    ]


def _pieces(value: Any, count: int) -> Any:
    size = value.shape[0] // count
    return tf.reshape(value, [count, size, *value.shape[1:]])


def _loss_tracker(model: keras.Model) -> Any:
    return next(metric for metric in model.metrics if metric.name == _LOSS)
