"""The models of the benchmarks: Keras layers only, so that every peer trains the same ones."""

from typing import Any

import keras

_BYTES = 256


class Positions(keras.layers.Layer):
    """Adds a learned embedding of the position; float32 [batch, length, width] -> the same."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="uniform", name="table")

    def call(self, x: Any) -> Any:
        return x + self.table


def transformer(width: int, blocks: int, length: int = 64, heads: int = 8) -> keras.Model:
    """Bytes int32 [batch, length] -> logits of the next byte, float32 [batch, length, 256]; Adam has two slots."""
    text = keras.Input((length,), dtype="int32", name="x")
    x = Positions()(keras.layers.Embedding(_BYTES, width)(text))
    for _ in range(blocks):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        y = keras.layers.Dense(4 * width, activation="relu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(width)(y)
    logits = keras.layers.Dense(_BYTES, name="logits")(keras.layers.LayerNormalization()(x))
    return _compiled(keras.Model(text, logits))


def perceptron(width: int = 64, length: int = 64) -> keras.Model:
    """Bytes int32 [batch, length] -> logits float32 [batch, length, 256]; a step takes about a millisecond."""
    text = keras.Input((length,), dtype="int32", name="x")
    x = keras.layers.Embedding(_BYTES, width // 4)(text)
    x = keras.layers.Dense(width, activation="relu")(x)
    return _compiled(keras.Model(text, keras.layers.Dense(_BYTES, name="logits")(x)))


def _compiled(model: keras.Model) -> keras.Model:
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
