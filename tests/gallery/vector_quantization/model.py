"""An autoencoder with a codebook: gradients pass straight through it, and usage moves the codes."""

import keras
from keras import layers, ops


class VectorQuantizer(layers.Layer):
    def __init__(self, codes, width, beta=0.25, decay=0.9, **kwargs):
        super().__init__(**kwargs)
        self.codes, self.width, self.beta, self.decay = codes, width, beta, decay

    def build(self, _):
        self.book = self.add_weight(shape=(self.codes, self.width), initializer="uniform", name="book")
        self.usage = self.add_weight(shape=(self.codes,), initializer="zeros", trainable=False, name="usage")

    def call(self, x, training=False):
        book = ops.convert_to_tensor(self.book)
        distances = ops.sum((x[:, None, :] - book[None]) ** 2, axis=2)
        chosen = ops.one_hot(ops.argmin(distances, axis=1), self.codes)
        quantized = ops.matmul(chosen, book)
        self.add_loss(self.beta * ops.mean((ops.stop_gradient(quantized) - x) ** 2))
        self.add_loss(ops.mean((quantized - ops.stop_gradient(x)) ** 2))
        if training:
            self.usage.assign(self.decay * self.usage + (1 - self.decay) * ops.mean(chosen, axis=0))
        return x + ops.stop_gradient(quantized - x)


def build_model(codes=16, width=3):
    x = keras.Input((5,))
    encoded = layers.Dense(width)(layers.Dense(16, activation="relu")(x))
    decoded = layers.Dense(5)(layers.Dense(16, activation="relu")(VectorQuantizer(codes, width)(encoded)))
    model = keras.Model(x, decoded)
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
    return model
