"""A transformer over shifted windows of an image, with a DropPath layer that draws with tf.random."""

import keras
import tensorflow as tf
from keras import layers, ops


@keras.saving.register_keras_serializable("swin")
class DropPath(layers.Layer):
    """Leaves out a branch for some examples of a batch."""

    def __init__(self, drop_prob=0.2, **kwargs):
        super().__init__(**kwargs)
        self.drop_prob = drop_prob

    def call(self, inputs, training=None):
        if not training:
            return inputs
        shape = (tf.shape(inputs)[0], 1, 1)
        kept = tf.floor(1 - self.drop_prob + tf.random.uniform(shape, dtype=inputs.dtype))
        return inputs / (1 - self.drop_prob) * kept


@keras.saving.register_keras_serializable("swin")
class SwinBlock(layers.Layer):
    """Attention within windows of 2 x 2 of 4 x 4 patches, which a shift moves."""

    def __init__(self, dim, shift, **kwargs):
        super().__init__(**kwargs)
        self.dim, self.shift = dim, shift
        self.norm1, self.norm2 = layers.LayerNormalization(), layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(2, dim // 2, dropout=0.1)
        self.mlp = keras.Sequential([layers.Dense(2 * dim, activation="gelu"), layers.Dense(dim)])
        self.drop_path = DropPath()

    def call(self, x):
        y = ops.reshape(self.norm1(x), (-1, 4, 4, self.dim))
        y = ops.roll(y, (-self.shift, -self.shift), axis=(1, 2))
        windows = ops.transpose(ops.reshape(y, (-1, 2, 2, 2, 2, self.dim)), (0, 1, 3, 2, 4, 5))
        windows = ops.reshape(windows, (-1, 4, self.dim))
        windows = ops.reshape(self.attention(windows, windows), (-1, 2, 2, 2, 2, self.dim))
        y = ops.reshape(ops.transpose(windows, (0, 1, 3, 2, 4, 5)), (-1, 4, 4, self.dim))
        y = ops.reshape(ops.roll(y, (self.shift, self.shift), axis=(1, 2)), (-1, 16, self.dim))
        x = x + self.drop_path(y)
        return x + self.drop_path(self.mlp(self.norm2(x)))


def build_model(dim=8):
    images = keras.Input((8, 8, 1))
    x = layers.Reshape((16, dim))(layers.Conv2D(dim, 2, strides=2)(images))
    for shift in (0, 1):
        x = SwinBlock(dim, shift)(x)
    model = keras.Model(images, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4, clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
