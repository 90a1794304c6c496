"""Message passing over the edges of small graphs."""

import keras
from keras import layers, ops


class MessagePassing(layers.Layer):
    """Sums messages of the neighbors and updates each node with a GRU cell."""

    def __init__(self, units, rounds, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.rounds = rounds
        self.messages = layers.Dense(units, activation="relu")
        self.update = layers.GRUCell(units)

    def build(self, input_shape):
        nodes, _ = input_shape
        self.messages.build((*nodes[:-1], self.units))
        self.update.build((None, self.units))
        self.start = self.add_weight(shape=(nodes[-1], self.units), initializer="glorot_uniform", name="start")

    def call(self, inputs):
        nodes, edges = inputs
        count = nodes.shape[1]
        state = ops.matmul(nodes, self.start)
        for _ in range(self.rounds):
            incoming = ops.matmul(edges, self.messages(state))
            flat, _ = self.update(ops.reshape(incoming, (-1, self.units)), [ops.reshape(state, (-1, self.units))])
            state = ops.reshape(flat, (-1, count, self.units))
        return state


def build_model():
    features = keras.Input((8, 2), name="features")
    edges = keras.Input((8, 8), name="edges")
    x = MessagePassing(12, rounds=3)([features, edges])
    attention = layers.Softmax(axis=1)(layers.Dense(1)(x))
    x = layers.Dot(axes=1)([attention, x])
    output = layers.Dense(1, activation="sigmoid")(layers.Flatten()(x))
    model = keras.Model([features, edges], output)
    model.compile(
        optimizer=keras.optimizers.Nadam(5e-3), loss="binary_crossentropy", metrics=["binary_accuracy", "auc"]
    )
    return model
