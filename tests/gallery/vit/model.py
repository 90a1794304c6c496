"""A vision transformer with augmentation inside the model."""

import keras
from keras import layers, ops

PATCH = 3
WIDTH = 16


class Patches(layers.Layer):
    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    def call(self, images):
        patches = ops.image.extract_patches(images, self.size)
        _, height, width, channels = patches.shape
        return ops.reshape(patches, (-1, height * width, channels))


class PatchEncoder(layers.Layer):
    def __init__(self, patches, width, **kwargs):
        super().__init__(**kwargs)
        self.projection = layers.Dense(width)
        self.positions = layers.Embedding(patches, width)
        self.patches = patches

    def call(self, patches):
        return self.projection(patches) + self.positions(ops.arange(self.patches))


def build_model(blocks=2):
    images = keras.Input((12, 12, 3))
    x = layers.Rescaling(1 / 255)(images)
    x = layers.RandomTranslation(0.05, 0.05, seed=1)(x)
    x = layers.RandomContrast(0.2, seed=2)(x)
    x = PatchEncoder((12 // PATCH) ** 2, WIDTH)(Patches(PATCH)(x))
    for _ in range(blocks):
        normed = layers.LayerNormalization(epsilon=1e-6)(x)
        x = x + layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.1)(normed, normed)
        normed = layers.LayerNormalization(epsilon=1e-6)(x)
        hidden = layers.Dense(2 * WIDTH, activation="gelu")(normed)
        x = x + layers.Dense(WIDTH)(layers.Dropout(0.1)(hidden))
    x = layers.LayerNormalization(epsilon=1e-6)(x)
    x = layers.Flatten()(x)
    model = keras.Model(images, layers.Dense(4)(layers.Dropout(0.3)(x)))
    model.compile(
        optimizer=keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(3e-3, 60), weight_decay=1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")],
    )
    return model
