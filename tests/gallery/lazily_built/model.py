"""A subclassed model that knows its input's shape only when it is first called."""

import keras
from keras import layers


class Block(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.dense = layers.Dense(units)
        self.norm = layers.GroupNormalization(groups=4)
        self.drop = layers.AlphaDropout(0.1)

    def call(self, x, training=None):
        return self.drop(keras.ops.selu(self.norm(self.dense(x))), training=training)


class TopicModel(keras.Model):
    def __init__(self, topics):
        super().__init__()
        self.blocks = [Block(16), Block(8)]
        self.heads = {"topic": layers.Dense(topics)}

    def call(self, counts, training=None):
        x = keras.ops.log1p(counts)
        for block in self.blocks:
            x = block(x, training=training)
        return self.heads["topic"](x)


def build_model():
    model = TopicModel(4)
    model.compile(
        optimizer=keras.optimizers.Lion(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
