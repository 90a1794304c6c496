"""`train.class_weight`: weights the loss of each training example by its class, as Keras's `fit` does."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tasks.foundation.errors import RunFileError

_KEY = "train.class_weight"
_ONE_HOT_RANK = 2


def apply_class_weight(batch: Sequence[Any], weights: Mapping[int, float] | None) -> tuple[Any, ...]:
    """Add sample weights to a training batch.

    Args:
        batch: (x,), (x, y) or (x, y, sample_weight) of NumPy arrays or tensors, [batch, ...].
        weights: weight of the loss by class; a class that is not listed has weight 1. None leaves the batch as it is.

    Returns:
        (x, y, sample_weight) with float32 [batch] weights.

    Raises:
        RunFileError: y is missing or has several parts, or the batch already has sample weights.
    """
    if weights is None:
        return tuple(batch)
    if len(batch) > 2:  # noqa: PLR2004 - x and y
        raise RunFileError(f"{_KEY}: the examples already have a sample_weight; remove one of the two")
    y = batch[1] if len(batch) > 1 else None
    if not hasattr(y, "shape"):
        found = "have no y" if y is None else f"have a y of several parts ({_names(y)})"
        raise RunFileError(f"{_KEY} needs a model with a single output; the examples {found}. Remove {_KEY}")
    return (batch[0], y, _weights_of(tf.convert_to_tensor(y), weights))


def _names(y: Any) -> str:
    return ", ".join(map(str, y)) if isinstance(y, dict) else f"{len(y)}"


def map_class_weight(dataset: Any, weights: Mapping[int, float] | None) -> Any:
    """Apply `apply_class_weight` to each batch of a `tf.data.Dataset`; the order stays."""
    if weights is None:
        return dataset
    # The function is plain Python; AutoGraph cannot convert it correctly.
    work = tf.autograph.experimental.do_not_convert(lambda *batch: apply_class_weight(batch, weights))
    return dataset.map(work, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)


def _weights_of(y: Any, weights: Mapping[int, float]) -> Any:
    """Return float32 [batch]. `y` has shape [batch] or [batch, 1] (labels), or [batch, classes] (one-hot)."""
    if y.shape.rank > _ONE_HOT_RANK:
        raise RunFileError(f"{_KEY} needs one label per example; y has shape {list(y.shape)}. Remove {_KEY}")
    one_hot = y.shape.rank == _ONE_HOT_RANK and y.shape[-1] != 1
    if one_hot and max(weights, default=0) >= y.shape[-1]:
        raise RunFileError(
            f"{_KEY} names class {max(weights)}, but y has shape {list(y.shape)}, which is read as one-hot labels of "
            f"{y.shape[-1]} classes; remove that class"
        )
    labels = tf.argmax(y, axis=-1) if one_hot else tf.reshape(y, [-1])
    labels = tf.cast(tf.round(labels), tf.int64)
    is_class = tf.equal(labels[:, tf.newaxis], tf.constant(list(weights), tf.int64))
    of_class = tf.reduce_sum(tf.where(is_class, tf.constant(list(weights.values()), tf.float32), 0.0), axis=-1)
    return tf.where(tf.reduce_any(is_class, axis=-1), of_class, 1.0)
