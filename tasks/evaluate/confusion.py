"""Counts which classes a classifier takes for which others: the confusion matrix of an evaluation.

A classifier is a model with one of Keras's cross-entropies as its only loss, Keras's own `test_step`, and one number
for each class, or a single one for two classes.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import keras
import tensorflow as tf

from tasks.foundation.model.keras_steps import not_converted, overrides

Counts = tuple[tuple[int, ...], ...]
MOST_CLASSES: Final = 50
_RANK: Final = 2  # examples and classes
_HALF: Final = 0.5
_Labels = Literal["index", "one-hot", "binary"]
_LOSSES: Sequence[tuple[_Labels, tuple[type, ...], Any]] = (
    ("index", (keras.losses.SparseCategoricalCrossentropy,), keras.losses.sparse_categorical_crossentropy),
    ("one-hot", (keras.losses.CategoricalCrossentropy,), keras.losses.categorical_crossentropy),
    ("binary", (keras.losses.BinaryCrossentropy,), keras.losses.binary_crossentropy),
)


def labels_of(model: keras.Model, batch: Sequence[Any]) -> _Labels | None:
    """How a classifier's labels say their class; None if the model is no classifier.

    Args:
        model: a compiled model.
        batch: x, y and more of any example, which is not looked at but for the shape of y.
    """
    shape = getattr(batch[1], "shape", None) if len(batch) > 1 else None
    if shape is None or len(shape) > _RANK or overrides(model, "test_step"):
        return None
    loss = keras.losses.get(model.loss) if isinstance(model.loss, str) else model.loss
    labels = next((labels for labels, kinds, function in _LOSSES if isinstance(loss, kinds) or loss is function), None)
    return labels if labels == "one-hot" or shape[1:] in {(), (1,)} else None


class Confusion:
    """Counts the examples by label and predicted class.

    The result has a row for each label and a column for each prediction; None if the model has another number of
    outputs than a classifier of at most `MOST_CLASSES` classes. Each example counts 1, whatever its sample weight.
    """

    def __init__(self, model: keras.Model, strategy: Any, labels: _Labels) -> None:
        """Create the counts; nothing is traced yet.

        Args:
            model: a built and compiled model.
            strategy: the strategy in whose scope it was built.
            labels: see `labels_of`.
        """
        self._model = model
        self._labels = labels
        # Keras's own binary accuracy asks for more than one half of a probability.
        self._threshold = 0.0 if getattr(model.loss, "from_logits", False) else _HALF
        self._classes: int | None = None
        with strategy.scope():
            self._counts = tf.Variable(
                tf.zeros((MOST_CLASSES, MOST_CLASSES), tf.int64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

    @property
    def is_idle(self) -> bool:
        """Whether the traced model is none whose classes can be counted."""
        return self._classes is None

    def step(self, batch: Sequence[Any]) -> None:
        """Predict one replica's batch, and count."""
        _, y, _ = keras.utils.unpack_x_y_sample_weight(tuple(batch))
        # As `evaluate` calls the model, whatever the user's own predict_step does.
        self._count(y, keras.Model.predict_step(self._model, tuple(batch)))

    def reset(self) -> None:
        """Set all counts to 0."""
        self._counts.assign(tf.zeros_like(self._counts))

    def take(self) -> Counts | None:
        """The counts of all replicas."""
        if self._classes is None:
            return None
        counts = tf.convert_to_tensor(self._counts).numpy()[: self._classes, : self._classes]
        return tuple(tuple(int(number) for number in row) for row in counts)

    @not_converted
    def _count(self, y: Any, outputs: Any) -> None:
        both = tf.is_tensor(y) and tf.is_tensor(outputs)
        if not both or outputs.shape.rank != _RANK or not 1 <= (outputs.shape[1] or 0) <= MOST_CLASSES:
            return
        scores, single = tf.cast(outputs, tf.float32), outputs.shape[1] == 1
        if self._labels == "binary" and single:
            predicted, label = scores[:, 0] > self._threshold, tf.cast(y, tf.float32) > _HALF
        elif self._labels == "one-hot" and not single:
            predicted, label = tf.argmax(scores, axis=1), tf.argmax(y, axis=1)
        elif self._labels == "index" and not single:
            predicted, label = tf.argmax(scores, axis=1), y
        else:
            return
        self._classes = max(2, outputs.shape[1])
        rows, columns = (
            tf.one_hot(tf.cast(tf.reshape(each, (-1,)), tf.int32), MOST_CLASSES) for each in (label, predicted)
        )
        self._counts.assign_add(tf.cast(tf.matmul(rows, columns, transpose_a=True), tf.int64))
