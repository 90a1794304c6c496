"""Losses that layers add: sparsity, a regularizer of activities, a penalty that grows with the steps."""

import keras
from keras import layers, ops


class Sparsity(layers.Layer):
    def __init__(self, target=0.1, **kwargs):
        super().__init__(**kwargs)
        self.target = target

    def build(self, _):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, x, training=False):
        active = ops.mean(ops.sigmoid(5 * x), axis=0)
        divergence = self.target * ops.log(self.target / active)
        divergence += (1 - self.target) * ops.log((1 - self.target) / (1 - active))
        self.add_loss(0.01 * ops.minimum(self.steps / 20, 1.0) * ops.mean(divergence))
        if training:
            self.steps.assign_add(1.0)
        return x


def build_model():
    x = keras.Input((12,))
    hidden = layers.Dense(24, kernel_regularizer=keras.regularizers.L1L2(1e-4, 1e-4))(x)
    hidden = layers.Activation("tanh", activity_regularizer=keras.regularizers.L1(1e-4))(hidden)
    hidden = Sparsity()(hidden)
    model = keras.Model(x, layers.Dense(12, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(1e-3))(hidden))
    model.compile(optimizer="adam", loss="mse", metrics=[keras.metrics.CosineSimilarity()])
    return model
