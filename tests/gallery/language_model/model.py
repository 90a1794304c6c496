"""A small causal transformer, with a metric of its own."""

import keras
from keras import layers, ops


@keras.saving.register_keras_serializable("language_model")
class Perplexity(keras.metrics.Metric):
    def __init__(self, name="perplexity", **kwargs):
        super().__init__(name=name, **kwargs)
        self.entropy = self.add_variable(shape=(), initializer="zeros", name="entropy")
        self.count = self.add_variable(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        entropy = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        self.entropy.assign_add(ops.sum(entropy))
        self.count.assign_add(ops.cast(ops.size(entropy), "float32"))

    def result(self):
        return ops.exp(ops.divide_no_nan(self.entropy, self.count))


class Positions(layers.Layer):
    def build(self, input_shape):
        self.table = self.add_weight(shape=input_shape[1:], initializer="uniform", name="table")

    def call(self, x):
        return x + self.table


def build_model(letters=20, width=16):
    codes = keras.Input((12,), dtype="uint8")
    x = Positions()(layers.Embedding(letters, width)(codes))
    for _ in range(2):
        normed = layers.RMSNormalization()(x)
        x = x + layers.GroupQueryAttention(8, 2, 1, dropout=0.1)(normed, normed, use_causal_mask=True)
        normed = layers.RMSNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(2 * width, activation="silu")(normed))
    model = keras.Model(codes, layers.Dense(letters)(layers.RMSNormalization()(x)))
    model.compile(
        optimizer=keras.optimizers.Adafactor(1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", Perplexity()],
    )
    return model
