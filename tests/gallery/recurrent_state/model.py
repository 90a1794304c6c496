"""An LSTM that starts from a state of its own and counts the steps that it has seen."""

import keras
from keras import layers, ops


class Remembering(layers.Layer):
    """An LSTM whose mean last state is carried from batch to batch."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.lstm = layers.LSTM(units, return_sequences=True, return_state=True, recurrent_dropout=0.1, dropout=0.1)
        self.units = units

    def build(self, input_shape):
        start, path = input_shape
        self.enter = layers.Dense(2 * self.units, activation="tanh")
        self.enter.build(start)
        self.lstm.build(path)
        self.carried = self.add_weight(shape=(2, self.units), initializer="zeros", trainable=False, name="carried")
        self.seen = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="seen")

    def call(self, inputs, training=False):
        start, path = inputs
        hidden, cell = ops.split(self.enter(start), 2, axis=1)
        state = [hidden + self.carried[0], cell + self.carried[1]]
        outputs, hidden, cell = self.lstm(path, initial_state=state, training=training)
        if training:
            self.carried.assign(0.1 * ops.stop_gradient(ops.stack([ops.mean(hidden, 0), ops.mean(cell, 0)])))
            self.seen.assign_add(1)
        return outputs


def build_model(units=8):
    start, path = keras.Input((2,), name="start"), keras.Input((10, 1), name="path")
    x = Remembering(units)([start, path])
    model = keras.Model({"start": start, "path": path}, layers.TimeDistributed(layers.Dense(1))(x))
    model.compile(optimizer=keras.optimizers.Adamax(1e-2), loss=keras.losses.LogCosh(), metrics=["mse"])
    return model
