"""Models for several replicas, with and without operations that depend on which examples share a replica."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from . import layers

# The steps of the longest run with `Seen` in its model, and its global batch size.
STEPS, BATCH = 9, 16


class OwnStep(keras.Model):
    """A custom train_step whose result does not depend on which examples share a replica."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.hidden = keras.layers.Dense(5, activation="tanh")
        self.out = keras.layers.Dense(3)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
            share = ops.mean(losses) / tf.distribute.get_strategy().num_replicas_in_sync
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(share, weights), weights, strict=True))
        self.tracker.update_state(losses)
        return {"loss": self.tracker.result()}


class Seen(keras.layers.Layer):
    """Records the examples of each step and their positions in the global batch; removes the first feature.

    The first feature is the number of the example, from 0. `ids` is int32 [STEPS, BATCH] with numbers from 1. Each
    replica fills its own columns, and leaves 0 in all others.
    """

    def build(self, _shape: Any) -> None:
        self.steps = self.add_weight((), "zeros", dtype="int32", trainable=False, name="steps")
        self.ids = self.add_weight((STEPS, BATCH), "zeros", dtype="int32", trainable=False, name="ids")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            count = tf.shape(x)[0]
            before = replica * count
            row = tf.pad(tf.cast(x[:, 0], tf.int32) + 1, [[before, BATCH - before - count]])
            self.ids.assign_add(tf.one_hot(self.steps, STEPS, dtype=tf.int32)[:, tf.newaxis] * row)
            self.steps.assign_add(1)
        return x[:, 1:]


def _compiled(model: keras.Model, optimizer: Any, metrics: Any = ("accuracy",)) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=list(metrics))
    return model


def own_step() -> Any:
    model = OwnStep()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    return model


def pretrained() -> Any:
    """For freezing up to `norm`: frozen batch normalization uses loaded statistics, not those of the batch."""
    x = keras.Input((6,))
    y = keras.layers.Dense(8, activation="relu", name="first")(x)
    y = keras.layers.BatchNormalization(name="norm")(y)
    return _compiled(keras.Model(x, keras.layers.Dense(3, name="head")(y)), keras.optimizers.Adam(0.01))


def synchronized() -> Any:
    x = keras.Input((7,))
    y = keras.layers.Dense(5, activation="relu")(Seen(name="seen")(x))
    y = keras.layers.BatchNormalization(synchronized=True, name="norm")(y)
    metrics = ["accuracy", layers.CountRight()]
    return _compiled(keras.Model(x, keras.layers.Dense(3)(y)), keras.optimizers.Adam(0.02), metrics)


def dependent() -> Any:
    """A model whose replicas differ in statistics, dropout, raw variables, and metrics that are not sums."""
    x = keras.Input((7,))
    y = layers.GeneratorNoise()(keras.layers.BatchNormalization(name="norm")(Seen(name="seen")(x)))
    y = keras.layers.Dropout(0.4, name="drop")(y)
    metrics = ["accuracy", layers.CountRight(), layers.Peak()]
    return _compiled(keras.Model(x, keras.layers.Dense(3)(y)), keras.optimizers.Adam(0.02), metrics)
