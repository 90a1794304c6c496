"""`train.class_weight`: each example of the training data weighs as its class does, as in Keras's `fit`."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tasks.foundation.errors import RunFileError

_KEY = "train.class_weight"
_ONE_HOT_RANK = 2


def weighed(batch: Sequence[Any], weights: Mapping[int, float] | None) -> tuple[Any, ...]:
    """A batch as training gets it.

    Args:
        batch: (x,), (x, y) or (x, y, sample_weight) of NumPy arrays or tensors, [batch, ...].
        weights: of the loss, by class; classes left out weigh 1. None: the batch as it is.

    Returns:
        (x, y, sample_weight) with float32 [batch] weights.

    Raises:
        RunFileError: the weights cannot be given: y is missing or more than one tensor, or there are others already.
    """
    if weights is None:
        return tuple(batch)
    if len(batch) > 2:  # noqa: PLR2004 - x and y
        raise RunFileError(f"{_KEY}: the examples have a sample_weight already; drop one of the two")
    y = batch[1] if len(batch) > 1 else None
    if not hasattr(y, "shape"):
        told = "have no y" if y is None else f"have a y of several parts ({', '.join(map(str, y))})"
        raise RunFileError(f"{_KEY} is for models with a single output; the examples {told}. Leave it out")
    return (batch[0], y, _weights_of(tf.convert_to_tensor(y), weights))


def weighed_dataset(dataset: Any, weights: Mapping[int, float] | None) -> Any:
    """The same for each batch of a `tf.data.Dataset`, in its order."""
    if weights is None:
        return dataset
    # Plain Python, which AutoGraph would only get wrong.
    work = tf.autograph.experimental.do_not_convert(lambda *batch: weighed(batch, weights))
    return dataset.map(work, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)


def _weights_of(y: Any, weights: Mapping[int, float]) -> Any:
    """Float32 [batch]. `y`: labels [batch] or [batch, 1], or one-hot [batch, classes], as `fit` takes them."""
    if y.shape.rank > _ONE_HOT_RANK:
        raise RunFileError(f"{_KEY} is for one label an example; y has shape {list(y.shape)}. Leave it out")
    one_hot = y.shape.rank == _ONE_HOT_RANK and y.shape[-1] != 1
    if one_hot and max(weights, default=0) >= y.shape[-1]:
        raise RunFileError(
            f"{_KEY} names class {max(weights)}, and y of shape {list(y.shape)} is taken for one-hot labels of "
            f"{y.shape[-1]} classes; leave that class out"
        )
    labels = tf.argmax(y, axis=-1) if one_hot else tf.reshape(y, [-1])
    labels = tf.cast(tf.round(labels), tf.int64)
    is_class = tf.equal(labels[:, tf.newaxis], tf.constant(list(weights), tf.int64))
    of_class = tf.reduce_sum(tf.where(is_class, tf.constant(list(weights.values()), tf.float32), 0.0), axis=-1)
    return tf.where(tf.reduce_any(is_class, axis=-1), of_class, 1.0)
