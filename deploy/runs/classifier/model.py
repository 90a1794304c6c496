"""A small convolutional network. Its first layers augment the images while it trains."""

import keras
from keras import layers


def build_model():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.RandomRotation(0.05),
            layers.RandomTranslation(0.1, 0.1),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.BatchNormalization(momentum=0.95),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(3e-3, decay_steps=500)
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.01)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def build_callbacks():
    return [keras.callbacks.EarlyStopping("val_loss", patience=5, min_delta=0.001)]
