"""A network that solves a differential equation: derivatives of its output are in the loss."""

import keras
import tensorflow as tf
from keras import layers, ops


class Oscillator(keras.Model):
    """Solves u'' + 0.4 u' + 4 u = 0 with u(0) = 1 and u'(0) = 0; damping and stiffness are learned a little too."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential(
            [keras.Input((1,)), *(layers.Dense(16, activation="tanh") for _ in range(2)), layers.Dense(1)]
        )
        self.stiffness = self.add_weight(shape=(), initializer=keras.initializers.Constant(3.5), name="stiffness")
        self.built = True

    def derivatives(self, time):
        with tf.GradientTape() as outer:
            outer.watch(time)
            with tf.GradientTape() as inner:
                inner.watch(time)
                u = self.net(time)
            first = inner.gradient(u, time)
        return u, first, outer.gradient(first, time)

    def train_step(self, time):
        with tf.GradientTape() as tape:
            u, first, second = self.derivatives(time)
            equation = ops.mean(ops.square(second + 0.4 * first + self.stiffness * u))
            u0, first0, _ = self.derivatives(ops.zeros((1, 1)))
            boundary = ops.sum(ops.square(u0 - 1.0) + ops.square(first0))
            loss = equation + 5.0 * boundary + 0.1 * ops.square(self.stiffness - 4.0)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "equation": equation, "boundary": boundary}


def build_model():
    model = Oscillator()
    model.compile(optimizer=keras.optimizers.Adam(5e-3))
    return model
